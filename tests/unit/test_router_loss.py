"""The router loss against transformers' own, by value and gradient, and under every split into micro-batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_families import gradients, round_trip_config
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from samecurve.accelerator.accelerator import Accelerator
from samecurve.accelerator.mesh import Mesh
from samecurve.config.schema_training import Memory
from samecurve.data.micro_batch import MicroBatch
from samecurve.engines import router_loss
from samecurve.engines.forward import Forward
from samecurve.errors import ConfigurationError
from samecurve.interfaces.task import Task
from samecurve.losses import router
from samecurve.losses.chunked_cross_entropy import install_chunked_head
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models import routers
from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.strategy.parallel_dims import ParallelDims

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "jetmoe", "gpt_oss"]
MORE = ["granitemoeshared", "flex_olmo", "jamba", "ernie4_5_moe"]
LENGTHS = 12, 5, 9, 12, 3
COEFFICIENT = 0.5  # large enough that its gradient cannot hide behind the token loss


class Tokens(Task):
    """Next-token prediction."""


def tiny(family: str, **fields):
    torch.manual_seed(0)
    config = round_trip_config(family)
    name = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    config.update({name: COEFFICIENT, "use_cache": False, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for module, _ in routers.routers(model):  # far from balance
            for weight in module.parameters(recurse=False):
                weight.mul_(20)
    return model


def batch() -> MicroBatch:
    """Rows of different lengths; the first tokens of the last one are a prompt, and the fourth one trains nothing."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (len(LENGTHS), 13), generator=generator)
    labels = ids[:, 1:].clone()
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = IGNORE_INDEX
    labels[3] = IGNORE_INDEX
    labels[4, 0] = IGNORE_INDEX
    positions = torch.arange(12).expand(len(LENGTHS), -1).clone()
    return MicroBatch({"input_ids": ids[:, :-1].contiguous(), "position_ids": positions}, {"labels": labels})


def step(model, kind: str | None, rows: int, chunked: bool = False) -> tuple[float, dict, dict[str, Tensor]]:
    """(token loss, router metrics, gradients) of one step with micro-batches of `rows` rows."""
    accelerator = Accelerator(dims=ParallelDims(), cpu=True)
    recipe = SimpleNamespace(model=SimpleNamespace(router_loss=kind))
    mesh = Mesh(ParallelDims(), 0, accelerator.device)
    balance = router_loss.install(recipe, model, mesh)
    if chunked:
        install_chunked_head(model)
    forward = Forward(accelerator, mesh, model, Tokens(), "chunked" if chunked else "full", router=balance)
    micro_batches = batch().split(rows)
    counts, value = forward.count(micro_batches), 0.0
    for each, context, _ in forward.with_contexts(micro_batches, counts):
        loss, _ = forward.loss(each, context)
        (loss / counts.trained).backward()
        value += loss.item() / counts.trained
    # recomputed logits would keep all recomputed activations alive
    assert balance is None or not balance._recorder._logits
    return value, balance.metrics(balance.sums().tolist()) if balance else {}, gradients(model)


def of_transformers(model, part: MicroBatch) -> tuple[Tensor, Tensor]:
    """(sum of the token losses, load-balancing loss) of one forward pass, with the padding masked."""
    mask = part.real_tokens().long()
    out = model(input_ids=part.inputs["input_ids"], attention_mask=mask, output_router_logits=True, use_cache=False)
    return Tokens().loss(out.logits, part.labels), out.aux_loss


def reference(model, kind: str) -> tuple[float, float, dict[str, Tensor]]:
    """As `step`, by transformers: the trained rows in one micro-batch, or each row on its own."""
    rows = [part for part in batch().split(1) if (part.labels != IGNORE_INDEX).any()]
    whole = MicroBatch(*({n: torch.cat([getattr(r, k)[n] for r in rows]) for n in getattr(rows[0], k)} for k in PARTS))
    found = [of_transformers(model, part) for part in ([whole] if kind == "batch" else rows)]
    tokens = Tokens().count(whole.labels)
    loss, balance = sum(pair[0] for pair in found) / tokens, sum(pair[1] for pair in found) / len(found)
    (loss + COEFFICIENT * balance).backward()
    return loss.item(), balance.item(), gradients(model)


PARTS = "inputs", "targets"


OTHERS = [family for family in FAMILIES + MORE if family != "mixtral"]  # the kind of loss does not depend on the family
CASES = [("mixtral", "sequence"), ("mixtral", "batch"), *((family, "sequence") for family in OTHERS)]
CASES += [pytest.param(family, "batch", marks=pytest.mark.full) for family in OTHERS]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_loss_and_gradient_are_those_of_transformers(family, kind):
    model = tiny(family)
    loss, balance, expected = reference(model, kind)
    for rows in (5, 2):
        found_loss, metrics, found = step(model, kind, rows)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert metrics["router_loss"] == pytest.approx(balance, rel=1e-5)
        assert sum(metrics["expert_share"]) == pytest.approx(1)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_reference_depends_on_the_split_and_on_the_loss():
    """Otherwise the comparison above would show nothing."""
    model = tiny("mixtral")
    _, per_row, by_row = reference(model, "sequence")
    _, whole, by_batch = reference(model, "batch")
    without = step(model, "off", 5)
    assert without[1] == {} and per_row > 1.02 * whole > 2.04
    name = "model.layers.0.mlp.gate.weight"
    distances = [(a[name] - b[name]).norm() / b[name].norm() for a, b in ((by_row, by_batch), (without[2], by_batch))]
    assert min(distances) > 0.05


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_chunks_and_recomputation_change_nothing(kind):
    loss, metrics, expected = step(tiny("mixtral"), kind, 2)
    model = tiny("mixtral")
    checkpoint_layers(model, Memory(activation_checkpointing="full"))
    found_loss, found_metrics, found = step(model, kind, 2, chunked=True)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found_metrics["router_loss"] == pytest.approx(metrics["router_loss"], rel=1e-6)
    assert found_metrics["expert_share"] == metrics["expert_share"]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_sums_by_hand():
    """Two experts, one per token. Logits 0 and log 3: chances 1/4 and 3/4. Three tokens choose the second expert, one
    the first, the last one is padding: f = (1/4, 3/4), P = (3/4 + 3 x 1/4, 1/4 + 3 x 3/4) / 4 = (3/8, 5/8)."""
    log3 = torch.tensor(3.0).log().item()
    first, second = [log3, 0.0], [0.0, log3]
    found = router.routing([torch.tensor([first, second, second, second, second])], torch.ones(1, 5) > 0, 1)
    assert found.counts.tolist() == [[[1, 4]]]
    counted = torch.tensor([[True, True, True, True, False]])
    found = router.routing([torch.tensor([first, second, second, second, first])], counted, 1)
    assert found.counts.tolist() == [[[1, 3]]] and found.places.tolist() == [4]
    by_hand = 2 * (1 / 4 * 3 / 8 + 3 / 4 * 5 / 8)
    assert router.sum_over_sequences(found).item() == pytest.approx(by_hand)
    assert router.share_of_batch(found, torch.tensor([1.0, 3.0]), 4).item() == pytest.approx(by_hand)
    assert found.squares.item() == pytest.approx(4 * torch.tensor(4.0).log().item() ** 2)  # log(1 + 3)


def test_sequences_without_a_counted_token_add_nothing():
    logits = [torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    counted = torch.tensor([[True, True, False], [False, False, False]])
    found = router.routing(logits, counted, 2)
    alone = load_balancing_loss_func(tuple(each[:2] for each in logits), 4, 2)
    assert router.sum_over_sequences(found).item() == pytest.approx(alone.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_z_loss_is_that_of_transformers_where_the_config_has_it(kind):
    model = tiny("mixtral", router_z_loss_coef=0.25)
    kept = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: kept.append(out[0])) for module, _ in routers.routers(model)
    ]
    of_transformers(model, batch())
    mask = batch().real_tokens().flatten()
    z_loss = router_z_loss_func(torch.cat([each[mask] for each in kept])[None])
    for hook in hooks:
        hook.remove()
    _, _, plain = step(tiny("mixtral"), kind, 5)
    (0.25 * z_loss).backward()
    expected = gradients(model)
    _, metrics, found = step(model, kind, 2)
    assert metrics["router_z_loss"] == pytest.approx(z_loss.item(), rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] - plain[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_tokens_that_count():
    """Causal rows end at the last trained token, other rows at the padding; those that train nothing do not count."""
    ids, skip = torch.zeros(2, 4, dtype=torch.long), IGNORE_INDEX
    causal = MicroBatch({"input_ids": ids}, {"labels": torch.tensor([[skip, 5, skip, skip], [skip] * 4])})
    assert causal.real_tokens().tolist() == [[True, True, False, False], [False] * 4]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    masked = MicroBatch({"input_ids": ids, "attention_mask": mask}, causal.targets)
    assert masked.real_tokens().tolist() == [[True, True, True, False], [False] * 4]
    pairs = MicroBatch(
        {"input_ids": ids.repeat(2, 1), "attention_mask": mask.repeat(2, 1)}, {"labels": torch.tensor([0, skip])}
    )
    assert pairs.real_tokens().tolist() == [*mask.bool().tolist(), [False] * 4, [False] * 4]


def on_meta(family: str, **fields):
    config = AutoConfig.for_model(family) if family in ("dbrx", "doge") else round_trip_config(family)
    config.update(fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_the_default_follows_the_config():
    assert routers.settings(None, on_meta("mixtral")) == routers.RouterSettings("sequence", 0.001, 0.0, 2)
    assert routers.settings("batch", on_meta("jetmoe")).coefficient == 0.01
    assert routers.settings(None, on_meta("llama")) is None and routers.settings("off", on_meta("mixtral")) is None


def test_logits_of_another_shape_are_refused(monkeypatch):
    """Of one token alone, as transformers 5.17 gives them for a jamba."""
    take = routers.RouterRecorder.take
    monkeypatch.setattr(routers.RouterRecorder, "take", lambda self: [layer[0] for layer in take(self)])
    with pytest.raises(
        ConfigurationError, match=r"model.router_loss: .* gives router logits of \[\d+\] for 60 tokens;"
    ):
        step(tiny("mixtral"), "sequence", 5)


@pytest.mark.parametrize(
    ("wanted", "family", "text"),
    [
        (None, "llama", ""),
        (None, "mixtral", "sequence: load balancing x 0.001"),
        ("off", "mixtral", "off"),
        (None, "llama4_text", "off: transformers has none for a llama4_text"),
    ],
)
def test_no_mixture_of_experts_trains_without_saying_how(wanted, family, text):
    assert routers.describe(wanted, on_meta(family)) == text


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModel])
def test_other_heads_have_the_same_routers(auto):
    with torch.device("meta"):
        model = auto.from_config(round_trip_config("mixtral"))
    assert routers.settings(None, model) == routers.RouterSettings("sequence", 0.001, 0.0, 2)
    assert len(routers.routers(model)) == 2


@pytest.mark.parametrize(
    ("wanted", "family", "fields", "words"),
    [
        ("sequence", "llama", {}, "found sequence, but transformers has no router loss for a llama; remove the key"),
        (
            None,
            "granitemoe",
            {"router_aux_loss_coef": None},
            "loss of a granitemoe's routers is not supported.* set it to off",
        ),
        (None, "doge", {"is_moe": True, "num_hidden_layers": 1}, "loss of a doge's routers is not supported"),
    ],
)
def test_what_has_no_known_loss_is_refused(wanted, family, fields, words):
    with pytest.raises(ConfigurationError, match=f"^model.router_loss: .*{words}"):
        routers.settings(wanted, on_meta(family, **fields))
