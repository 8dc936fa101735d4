"""Masks of dropout: bits by hand, statistics, and that they depend on rows and steps alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_data import PAD, DocumentRows, random_stream
from tiny_families import COMMON, TOKENS, round_trip_config
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from samecurve.config.schema_training import Batch
from samecurve.data.batches import StepBatches
from samecurve.errors import ConfigurationError
from samecurve.models import dropout, routers
from samecurve.models.dropout_bits import keep_mask, keys_of, moved, uniform

CPU = torch.device("cpu")


def site(number: int) -> np.ndarray:
    return np.array([number], dtype=np.uint64)


def keys(num_sequences: int, seed: int = 1, step: int = 2, number: int = 3) -> torch.Tensor:
    return keys_of(seed, step, np.arange(num_sequences), site(number))[0]


def by_hand(first: int, second: int, index: int, rate: float) -> bool:
    """MurmurHash3's finalizer with Python's integers, the key's second word in its middle."""
    whole = 2**32
    value = (index * 0x9E3779B1 + first) % whole
    value = (value ^ (value >> 16)) * 0x85EBCA6B % whole
    value ^= second % whole
    value = (value ^ (value >> 13)) * 0xC2B2AE35 % whole
    signed = value - whole if value >= 2**31 else value
    return signed >= round(rate * whole) - 2**31


@pytest.mark.parametrize("length", [5, 2**20 + 3])
def test_bits_by_hand(length):
    found = keep_mask(keys(3), length, 0.3)
    places = sorted({0, 1, 2, 4, length // 2, min(2**20 - 1, length - 1), min(2**20, length - 1), length - 1})
    for row, (first, second) in enumerate(keys(3).tolist()):
        assert [found[row, place].item() for place in places] == [by_hand(first, second, at, 0.3) for at in places]


@pytest.mark.parametrize("length", [12, 3 * 2**20])
def test_parts_are_drawn_as_the_whole(length):
    whole = keep_mask(keys(2), length, 0.3)
    parts = [keep_mask(moved(keys(2), part * length // 3), length // 3, 0.3) for part in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(parts[0], parts[1])


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 5), 0), ((7, 8), 1), ((7, 2**19), -1)])
def test_parts_of_a_mask(shape, axis):
    """Heads of (head, query, key), features of (token, feature): all ranks together draw the mask of one process."""
    whole = dropout.DropoutPlace(fixed_keys(3), "dropout", 0, None).drop(torch.ones(3, *shape), 0.3)
    axis = axis + 1 if axis >= 0 else axis
    for index, expected in enumerate(whole.chunk(2, axis)):
        place = dropout.DropoutPlace(fixed_keys(3), "dropout", 0, dropout.SequenceShard(axis, index, 2))
        assert torch.equal(place.drop(torch.ones_like(expected), 0.3), expected), index


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("chunks", [(1,), (1, 2), (0, 3)])
def test_chunks_of_a_mask(chunks, parts):
    """A rank with the first and the last of four chunks of tokens, or with consecutive ones; features are cut, too."""
    count = 2 * len(chunks)
    whole = dropout.DropoutPlace(fixed_keys(3), "dropout", 0, None).drop(torch.ones(3, 8, 6), 0.3)
    tokens = torch.cat([whole.chunk(count, dim=1)[chunk] for chunk in chunks], dim=1)
    for index, expected in enumerate(tokens.chunk(parts, dim=-1)):
        shard = dropout.SequenceShard(-1, index, parts) if parts > 1 else None
        place = dropout.DropoutPlace(fixed_keys(3, chunks), "dropout", 0, shard)
        assert torch.equal(place.drop(torch.ones_like(expected), 0.3), expected), index


def fixed_keys(num_sequences: int, chunks: tuple[int, ...] = (0,)) -> dropout.DropoutKeys:
    used = dropout.DropoutKeys(0, CPU, SimpleNamespace(), chunks)
    used.current = keys(num_sequences + 1)[None]
    return used


def test_keys_depend_on_seed_step_row_and_site():
    found = {
        tuple(keys(1, seed, step, number)[0].tolist()) for seed in range(4) for step in range(4) for number in range(4)
    }
    assert len(found) == 64
    assert torch.equal(keys(8)[3:5], keys_of(1, 2, np.array([3, 4]), site(3))[0])


def test_uniform_numbers():
    """The bits of the masks, whose sign they count as the upper one; equal counts in 16 bins; neither end."""
    found = uniform(keys(4), 2**18)
    assert torch.equal(found < 0.5, keep_mask(keys(4), 2**18, 0.5)) and 0 < found.min() < found.max() < 1
    counts = torch.bincount((found.ravel() * 16).long(), minlength=16)
    assert (counts - 2**16).abs().max() < 5 * (2**16 * 15 / 16) ** 0.5


def test_rate_and_independence():
    """20 million draws: each count is within 5 standard deviations of what independent draws give."""
    rate, length = 0.1, 2**20
    variants = keys(5), keys(5, step=3), keys(5, number=4), keys(5, seed=2)
    masks = torch.stack([keep_mask(variant, length, rate) for variant in variants])
    dropped = (~masks).reshape(20, length).double()
    assert (dropped.mean(1) - rate).abs().max() < 5 * (rate * (1 - rate) / length) ** 0.5
    # between rows, steps, modules and seeds: the correlation of any two masks; shifted, too: none repeats another
    for shift in (0, 1, 512):
        centred = dropped - dropped.mean(1, keepdim=True)
        correlation = centred @ centred.roll(shift, 1).T / (length * rate * (1 - rate))
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5.5 / length**0.5
    # runs of 16 values: the number of dropped ones is binomial
    counts = dropped.reshape(-1, 16).sum(1)
    assert counts.var().item() == pytest.approx(16 * rate * (1 - rate), rel=0.01)
    # features of a token and tokens of a feature
    grid = dropped.reshape(20, 1024, 1024)
    for axis in (1, 2):
        assert grid.mean(axis).var().item() == pytest.approx(rate * (1 - rate) / 1024, rel=0.05)


def test_the_compiled_mask_is_the_same():
    compiled = torch.compile(lambda k: keep_mask(k, 1000, 0.3).float() * 2, fullgraph=True)
    assert torch.equal(compiled(keys(3)), keep_mask(keys(3), 1000, 0.3).float() * 2)


def test_expected_value_and_gradient_are_those_of_torch():
    """Mean over 4,096 masks of the gradient of a squared sum, and its variance, beside torch's own dropout."""
    weight, values = torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16)

    def gradients(drops) -> torch.Tensor:
        leaf = values.expand(4096, 16).clone().requires_grad_()
        (drops(leaf) * weight).sum(1).square().sum().backward()
        return leaf.grad

    used = dropout.DropoutKeys(0, CPU, SimpleNamespace())
    place = used.add("here")
    used.current = keys_of(0, 1, np.arange(4097), site(9))
    torch.manual_seed(0)
    ours = gradients(lambda leaf: place.drop(leaf, 0.2))
    torchs = gradients(lambda leaf: functional.dropout(leaf, 0.2))
    error = (torchs.std(0) / 64) * 6
    assert ((ours.mean(0) - torchs.mean(0)).abs() < error).all()
    torch.testing.assert_close(ours.std(0), torchs.std(0), rtol=0.15, atol=0)


@pytest.mark.parametrize("case", ["causal", "bool mask", "added mask", "grouped heads"])
def test_attention_without_dropout_is_torchs(case):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 2 if case == "grouped heads" else 4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril(1)
    options = {
        "causal": {"is_causal": True, "scale": 0.3},
        "bool mask": {"attn_mask": mask},
        "added mask": {"attn_mask": torch.where(mask, 0.0, -torch.inf)},
        "grouped heads": {"enable_gqa": True},
    }[case]
    found = dropout.attention_with_dropout(query, key, value, lambda values, rate: values, dropout_p=0.1, **options)
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, expected)


# Families with dropout by default, and the ways in which transformers drops: modules, functions, fused attention.
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.1},
    "llama": {"attention_dropout": 0.2},
    "mistral": {"attention_dropout": 0.2, "sliding_window": 6},
    "gptj": {"rotary_dim": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox_japanese": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bert": {}, "roberta": {}, "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "xlm": {"emb_dim": 32, "n_layers": 6, "n_heads": 4},
    "electra": {"embedding_size": 32}, "mpnet": {}, "roformer": {"embedding_size": 32},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.5},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.5},
    "funnel": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48, "attention_type": "factorized"},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 4},
}  # fmt: skip
MASKED = {"bert", "xlm", "roberta", "distilbert", "electra", "mpnet", "roformer", "deberta-v2", "funnel"}


def tiny(family: str, attention: str | None = None, **more) -> nn.Module:
    known = AutoConfig.for_model(family)
    fields = {name: value for name, value in {**COMMON, **TOKENS}.items() if hasattr(known, name)}
    if family == "funnel":
        del fields["num_hidden_layers"]  # block_sizes says it
    fields |= {"max_position_embeddings": 64} if hasattr(known, "max_position_embeddings") else {}
    config = AutoConfig.for_model(family, **fields | FAMILIES[family] | more)
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    return (AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM).from_config(config, **options).train()


class KeyedBatch(SimpleNamespace):
    """Some rows of a global batch of 6."""

    @classmethod
    def of(cls, rows: slice, step: int = 4):
        tokens = (torch.arange(6 * 8).reshape(6, 8) * 7) % 90 + 5
        return cls(inputs={"input_ids": tokens[rows]}, step=step, places=torch.arange(6)[rows])


def logits(model: nn.Module, used: dropout.DropoutKeys, batch: KeyedBatch) -> torch.Tensor:
    with used.micro_batch(batch):
        return model(**batch.inputs).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_drops_alike_in_any_micro_batch(family):
    model = tiny(family)
    before = torch.get_rng_state()
    used = dropout.install(model, 5, CPU)
    whole = logits(model, used, KeyedBatch.of(slice(6)))
    parts = [logits(model, used, KeyedBatch.of(slice(first, first + 2))) for first in (4, 0, 2)]
    torch.testing.assert_close(torch.cat([parts[1], parts[2], parts[0]]), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.allclose(logits(model, used, KeyedBatch.of(slice(6), step=5)), whole, atol=1e-3)
    model.eval()
    without = model(**KeyedBatch.of(slice(6)).inputs).logits
    assert not torch.allclose(without, whole, atol=1e-3)


def test_sdpa_and_eager_drop_the_same():
    found = []
    for attention in ("sdpa", "eager"):
        model = tiny("gpt2", attention)
        found.append(logits(model, dropout.install(model, 5, CPU), KeyedBatch.of(slice(6))))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(each, marks=pytest.mark.full) for each in ("opt", "bert"))])
def test_a_compiled_model_drops_the_same(family):
    found = []
    for compiles in (False, True):
        model = tiny(family)
        used = dropout.install(model, 5, CPU)
        if compiles:
            torch._dynamo.reset()
            for layer in next(each for each in model.modules() if isinstance(each, nn.ModuleList)):
                layer.forward = torch.compile(layer.forward)
        values = logits(model, used, KeyedBatch.of(slice(6)))
        values.sum().backward()
        found.append((values, [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_row_of_two_sequences_has_a_mask_for_each():
    used = dropout.DropoutKeys(0, CPU, SimpleNamespace())
    place = used.add("here")
    tokens = torch.zeros(4, 3)
    used.current = used._of(SimpleNamespace(inputs={"input_ids": tokens}, step=1, places=torch.tensor([1, 3])))
    expected = keys_of(0, 1, np.array([2, 3, 6, 7]), np.array(used._sites, dtype=np.uint64))
    assert torch.equal(used.current[0, :-1], expected[0])
    assert torch.equal(place.drop(torch.ones(4, 3), 0.5) != 0, keep_mask(expected[0], 3, 0.5))


def test_noise_of_another_kind_is_refused():
    class Noisy(nn.Module):
        config = SimpleNamespace(model_type="noisy", to_dict=lambda: {"router_jitter_noise": 0.5, "other_noise": 0.0})

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=input_ids + torch.rand(1))

    used = dropout.install(Noisy(), 5, CPU)
    with pytest.raises(ConfigurationError, match=r"model\.config: a noisy draws .*router_jitter_noise: 0\.5\).* to 0"):
        logits(Noisy(), used, KeyedBatch.of(slice(6)))


def test_rows_that_are_not_first_are_refused():
    """XLNet's layers have tokens first, so that the masks of its rows depended on the micro-batch."""
    config = {"vocab_size": 100, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("xlnet", **config))
    expected = r"model\.config: a xlnet .* first axis, .*\(dropout: 0\.1, summary_last_dropout: 0\.1\).* to 0"
    with pytest.raises(ConfigurationError, match=expected):
        dropout.install(model, 5, CPU)
    model.config.update({"dropout": 0.0, "summary_last_dropout": 0.0})
    dropout.install(model, 5, CPU)


def test_values_without_rows_are_refused_by_name():
    used = dropout.DropoutKeys(0, CPU, SimpleNamespace(model_type="toy"))
    place = used.add("encoder.table_dropout")
    used.current = keys_of(0, 1, np.arange(4), site(9))  # of 3 rows
    expected = r"model\.config: encoder\.table_dropout of this toy .* \(4, 5\), .* the 3 rows, .* to 0"
    with pytest.raises(ConfigurationError, match=expected):
        place.drop(torch.ones(4, 5), 0.5)


def test_noise_in_place_is_refused():
    with pytest.raises(ConfigurationError, match=r"model\.config\.input_jitter_noise: found 0\.1, .*set it to 0"):
        dropout.install(tiny("phimoe", input_jitter_noise=0.1), 5, CPU)


def test_a_router_without_noise_chooses_as_transformers_does():
    """PhiMoE draws even where one expert is left to choose; the draw decides nothing."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(round_trip_config("phimoe")).train()
    model = copy.deepcopy(plain)
    used = dropout.install(model, 5, CPU)
    assert torch.equal(logits(model, used, KeyedBatch.of(slice(6))), plain(**KeyedBatch.of(slice(6)).inputs).logits)


def test_routers_draw_experts_as_often_as_transformers_does():
    """16,384 tokens alike: how often each expert is the first or the second, and the mean of the factors."""
    torch.manual_seed(0)
    config = round_trip_config("phimoe")
    config.router_jitter_noise = 0.3
    router = AutoModelForCausalLM.from_config(config).train().model.layers[0].mlp.router
    hidden = torch.randn(config.hidden_size).expand(16384, -1)
    used = dropout.DropoutKeys(0, CPU, SimpleNamespace())
    places = [used.add(str(call)) for call in range(6)]
    used.current = keys_of(0, 1, np.arange(5), np.array(used._sites, dtype=np.uint64))
    with routers.KeyedNoise(places):
        ours = router(hidden)
    theirs = router(hidden)
    (weights, chosen), (expected_weights, expected) = ours[1:], theirs[1:]
    for rank in (0, 1):
        counts, reference = (torch.bincount(each[:, rank], minlength=16) for each in (chosen, expected))
        assert (counts - reference).abs().max() < 5 * (2 * 16384 / 4) ** 0.5 and (reference > 500).sum() > 1
    torch.testing.assert_close(weights.mean(0), expected_weights.mean(0), rtol=0.03, atol=0)


def test_batches_carry_the_places_of_their_rows():
    rows = DocumentRows(random_stream(23, longest=12), 6, PAD)
    for world, micro in [(1, 8), (1, 3), (3, 2), (2, 4)]:
        batch = Batch(global_batch_size=8, micro_batch_size=micro, sequence_length=6)
        shards = [StepBatches(rows, 3, batch, (rank, world), 9).at(4) for rank in range(world)]
        sizes = batch.micro_batches(world)
        trained = [
            micro_batch.places.tolist()
            for shard, shares in zip(shards, sizes, strict=True)
            for micro_batch, size in zip(shard, shares, strict=True)
            if size
        ]
        assert sum(trained, []) == list(range(8))
        assert {micro_batch.step for shard in shards for micro_batch in shard} == {4}
