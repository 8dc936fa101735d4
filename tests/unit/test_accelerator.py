"""samecurve.Accelerator in one process, beside Accelerate's own class and plain PyTorch."""

from __future__ import annotations

import os
from unittest.mock import Mock

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, DataLoaderConfiguration, DeepSpeedPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaModel

import samecurve
from samecurve.accelerator import accelerator as module
from samecurve.accelerator import cpu_bridge, deepspeed_introspection
from samecurve.errors import ConfigurationError, TopologyError

ROWS = torch.arange(44.0).reshape(11, 4).sin()
LABELS = torch.tensor(
    [0, -100, -100, 2, 1, -100, -100, 0, 2, 1, 0]
)  # micro-batches of 3 rows have 1, 2, 2 and 2 labels


@pytest.fixture(autouse=True)
def fresh():
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def rows() -> DataLoader:
    parts: list = [{"rows": row, "labels": label} for row, label in zip(ROWS, LABELS, strict=True)]
    return DataLoader(parts, batch_size=3)


def gradient(kind: type, reduction: str | None = None) -> tuple[torch.Tensor, float]:
    """Of one step over the whole epoch in four micro-batches, with its norm before clipping."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=4)
    prepared, loader = accelerator.prepare(model(), rows())
    for batch in loader:
        with accelerator.accumulate(prepared):
            logits = prepared(batch["rows"])
            arguments = {} if reduction is None else {"reduction": reduction}
            accelerator.backward(cross_entropy(logits, batch["labels"], reduction=reduction or "mean"), **arguments)
    norm = accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
    return prepared.weight.grad, norm.item()


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_a_step_is_one_mean_over_its_labels(reduction):
    alone = model()
    cross_entropy(alone(ROWS), LABELS).backward()
    made, norm = gradient(samecurve.Accelerator, reduction)
    torch.testing.assert_close(made, alone.weight.grad)
    assert norm == pytest.approx(nn.utils.get_total_norm([part.grad for part in alone.parameters()]).item())


def test_accelerates_own_step_is_a_mean_of_means():
    alone = model()
    cross_entropy(alone(ROWS), LABELS).backward()
    made, _ = gradient(accelerate.Accelerator)
    assert (made - alone.weight.grad).abs().max() > 1e-2


def test_a_count_that_the_script_knows():
    accelerator = samecurve.Accelerator(cpu=True)
    one = accelerator.prepare(model())
    accelerator.backward(one(ROWS).sum(), reduction="sum", num_items=22)
    torch.testing.assert_close(one.weight.grad, ROWS.sum(0).expand(3, 4) / 22)


@pytest.mark.parametrize(("norm", "limit"), [(1.0, 0.5), (1.0, 2.0), (float("inf"), 0.5)])
def test_gradients_are_clipped_as_torch_does(norm, limit):
    accelerator = samecurve.Accelerator(cpu=True)
    one, other = model(), model()
    for part in (*one.parameters(), *other.parameters()):
        part.grad = part.detach().clone() * norm
    expected = nn.utils.clip_grad_norm_(other.parameters(), limit)
    assert accelerator.clip_grad_norm_(one.parameters(), limit).item() == pytest.approx(expected.item(), nan_ok=True)
    if expected.isfinite():
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_model_that_casts_itself_is_not_wrapped():
    handlers = [AutocastKwargs(enabled=False)]
    accelerator = samecurve.Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    one = accelerator.prepare(model())
    assert accelerator.mixed_precision == "bf16" and one(ROWS).dtype == torch.float32
    assert not hasattr(one, "_original_forward")


@pytest.mark.parametrize("of_step", [{}, {"num_items": 7}])
def test_a_training_loop_that_is_left_keeps_its_place(of_step):
    """Also where the script has counted the step, and nothing is asked of the loader. The last batch is not trained."""
    accelerator = samecurve.Accelerator(cpu=True)
    prepared, loader = accelerator.prepare(model(), rows())
    for index, batch in enumerate(loader):
        if index == 2:
            break
        loss = cross_entropy(prepared(batch["rows"]), batch["labels"], reduction="sum")
        accelerator.backward(loss, reduction="sum", **of_step)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["unfinished"]) == (0, 2, 1)


def test_a_script_of_several_hosts_finds_its_interface(monkeypatch):
    chosen: list[bool] = []
    monkeypatch.setattr(module.network, "choose_interface", lambda: chosen.append(True))
    samecurve.Accelerator(cpu=True)
    assert chosen == [True]


def test_a_process_without_a_gpu_of_its_own_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    cpu_bridge.share_gpus()
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(TopologyError, match="LOCAL_RANK: 3, but this process sees 1 of the host's GPUs"):
        cpu_bridge.share_gpus()
    monkeypatch.setenv(cpu_bridge.SHARE_GPUS, "1")
    cpu_bridge.share_gpus()
    assert os.environ["LOCAL_RANK"] == "0"


def test_automatic_values_of_deepspeed_need_no_transformers_model():
    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": 5}
    automatic = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**automatic, "zero_optimization": zero})
    deepspeed_introspection.complete_config(plugin, model(), (rows(),), num_processes=4)
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 1  # 3 rows on 4 processes
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 5,
        "stage3_gather_16bit_weights_on_model_save": True,  # of get_state_dict and save_model
    }
    assert plugin.deepspeed_config["gradient_clipping"] == 0.0  # Accelerate would clip to 1.0


@pytest.mark.parametrize("shape", [(6, 3), (5, 3, 4), (2, 3, 4, 4)])
def test_batch_norm_over_processes_on_a_cpu(shape, monkeypatch):
    """Two processes with the same rows: each normalizes as BatchNorm does over both."""
    monkeypatch.setattr(cpu_bridge, "all_reduce", lambda values, group: 2 * values)
    monkeypatch.setattr(cpu_bridge, "dist", Mock(group=Mock(WORLD=None)))
    mine, theirs = nn.SyncBatchNorm(3), (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3)
    cpu_bridge.install_sync_batch_norm(mine, torch.device("cpu"))
    assert not isinstance(mine, nn.SyncBatchNorm)  # which DDP would refuse
    torch.manual_seed(0)
    values, weight = torch.randn(shape, requires_grad=True), torch.randn(shape)
    twice = torch.cat([values.detach()] * 2).requires_grad_()
    result, expected = mine(values), theirs(twice)
    torch.testing.assert_close(result, expected[: shape[0]])
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    (result * weight).sum().backward()
    (expected * torch.cat([weight] * 2)).sum().backward()
    torch.testing.assert_close(values.grad, twice.grad[: shape[0]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mine.eval()(values), theirs.eval()(values))


class OwnBatchNorm(nn.BatchNorm2d):
    pass


def on_gloo() -> nn.Module:
    cpu_bridge.install_sync_batch_norm(layer := nn.SyncBatchNorm(4), torch.device("cpu"))
    return layer


def llama(dropout: float) -> nn.Module:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, attention_dropout=dropout))


SYNC, ZERO = "convert_sync_batchnorm", "p=0 makes curves equal"
LAYERS = [
    (lambda: nn.BatchNorm1d(4), SYNC),
    (lambda: OwnBatchNorm(4), SYNC),
    (lambda: nn.LazyBatchNorm2d(affine=False), SYNC),
    (lambda: nn.SyncBatchNorm(4), ""),
    (on_gloo, ""),
    (lambda: nn.Dropout(0.1), ZERO),
    (lambda: nn.Dropout(0.0), ""),
    (lambda: nn.Dropout2d(0.1), ZERO),
    (lambda: nn.AlphaDropout(0.1), ZERO),
    (lambda: nn.LSTM(4, 4, 2, dropout=0.1), ZERO),
    (lambda: nn.LSTM(4, 4, 2), ""),
    (lambda: nn.MultiheadAttention(4, 2, dropout=0.1), ZERO),
    (nn.RReLU, ZERO),
    (lambda: llama(0.1), ZERO),  # it calls functional.dropout
    (lambda: llama(0.0), ""),
]


@pytest.mark.parametrize(("layer", "said"), LAYERS)
def test_layers_that_depend_on_the_processes_are_named(layer, said):
    model = nn.Sequential(nn.Linear(4, 4), layer())
    warning = module._unequal_layers(model)
    assert said in warning and bool(said) == bool(warning)
    # a model of from_pretrained is in eval mode when it is prepared; its loop trains it
    assert module._unequal_layers(model.eval()) == warning
    assert not module._unequal_layers(model.requires_grad_(False))
    # a part that stays in eval mode
    model.train()[1].eval()
    assert not module._unequal_layers(model)


def test_a_data_set_of_tuples_counts_rows():
    accelerator = samecurve.Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, loader = accelerator.prepare(model(), DataLoader(TensorDataset(ROWS, LABELS.abs() % 3), batch_size=8))
    for values, labels in loader:
        with accelerator.accumulate(one):
            accelerator.backward(cross_entropy(one(values), labels))
    alone = model()
    cross_entropy(alone(ROWS), LABELS.abs() % 3).backward()
    torch.testing.assert_close(one.weight.grad, alone.weight.grad)


def test_arguments_by_place_are_accelerates():
    accelerator = samecurve.Accelerator(True, False, "bf16", 3, True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    with pytest.raises(TypeError, match="mixed_prescision"):
        samecurve.Accelerator(mixed_prescision="bf16")


def test_loaders_are_exact_whatever_their_configuration():
    """Accelerate's examples give one for other reasons, in which split_batches is off."""
    accelerator = samecurve.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    loader = accelerator.prepare(rows())
    assert loader.total_batch_size == 3 and loader.state_dict()["batches"] == 0 and accelerator.non_blocking


def test_cpu_may_be_said_under_deepspeed(monkeypatch):
    """As Accelerate's examples have it for their option --cpu."""
    monkeypatch.setattr(module.launch_env, "set_world_of_one", lambda: None)
    monkeypatch.setattr(cpu_bridge, "needed", lambda: True)
    monkeypatch.setattr(cpu_bridge, "prepare", lambda **_: None)
    assert "cpu" not in module._for_script({"cpu": True, "deepspeed_plugin": Mock()})


def test_a_count_of_the_script_itself_divides_as_accelerate_does():
    gradients = []
    for kind in (samecurve.Accelerator, accelerate.Accelerator):
        accelerator = kind(cpu=True, gradient_accumulation_steps=2)
        one, loader = accelerator.prepare(model(), DataLoader(TensorDataset(ROWS[:8]), batch_size=4))
        for (values,) in loader:
            accelerator.backward(one(values).mean())
        gradients.append(one.weight.grad)
    torch.testing.assert_close(*gradients)


class Counted(nn.Module):
    """Divides a sum by the units of the whole step, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = model()

    def forward(self, rows, labels, num_items_in_batch=None):
        return cross_entropy(self.layer(rows), labels, reduction="sum") / num_items_in_batch


def test_a_loss_over_num_items_in_batch_is_divided_once():
    """The script multiplies by the steps of accumulation, as Accelerate's example does, because Accelerate divides."""
    alone = model()
    cross_entropy(alone(ROWS), LABELS).backward()
    accelerator = samecurve.Accelerator(cpu=True, gradient_accumulation_steps=4)
    one, loader = accelerator.prepare(Counted(), rows())
    for batch in loader:
        with accelerator.accumulate(one):
            accelerator.backward(one(**batch, num_items_in_batch=int((LABELS != -100).sum())) * 4)
    torch.testing.assert_close(one.layer.weight.grad, alone.weight.grad)


def test_gradients_of_a_loop_that_was_left_are_dropped():
    accelerator = samecurve.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD((one := model()).parameters(), lr=0.1)
    one, optimizer, loader = accelerator.prepare(one, optimizer, DataLoader(TensorDataset(ROWS), batch_size=2))
    for (values,) in loader:
        with accelerator.accumulate(one):
            accelerator.backward(one(values).mean())
        break
    assert one.weight.grad is None and accelerator.step == 0


def test_a_sum_needs_a_count():
    accelerator = samecurve.Accelerator(cpu=True)
    one = accelerator.prepare(model())
    with pytest.raises(ConfigurationError, match="give num_items"):
        accelerator.backward(one(ROWS).sum(), reduction="sum")


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ConfigurationError, match="use bf16"):
        samecurve.Accelerator(cpu=True, mixed_precision="fp16")
