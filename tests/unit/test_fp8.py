"""Products of 8-bit numbers: which modules compute them, what they are by hand, and where they are refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from report_cases import TORCHRUN, Plan, check_report, findings, message, missing, write
from test_activation_checkpointing import FAMILIES, LAYERS, build, forward, gradients
from test_console import facts

from samecurve.config import rules_model, rules_training
from samecurve.errors import ConfigurationError
from samecurve.metrics import console
from samecurve.models import fp8

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ROUNDING = 4e-3  # of results to bf16, 2 ** -9 each, relative L2; that of the operands is 8 times as coarse and more
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def recipe(kind: str, packing: bool = True, micro_batch_size: int = 1, sequence_length: int = 16) -> SimpleNamespace:
    batch = SimpleNamespace(micro_batch_size=micro_batch_size, sequence_length=sequence_length)
    return SimpleNamespace(fp8=kind, batch=batch, data=SimpleNamespace(packing=packing))


def model(kind: str, family: str = "llama") -> torch.nn.Module:
    made = build(family)
    fp8.convert(made, recipe(kind), CPU)
    return made


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found.detach().float() - reference).norm() / reference.norm())


@needs_torchao
@pytest.mark.parametrize(("family", "suffix"), [("llama", ""), ("llama adapted", ".base_layer")])
def test_the_layers_linear_modules_and_no_others(family, suffix):
    plain, found = build(family), model("rowwise", family)
    names = [name for name, module in found.named_modules() if type(module).__name__ == "Float8Linear"]
    parents = [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP)]
    assert names == [f"model.layers.{index}.{name}{suffix}" for index in range(LAYERS) for name in parents]
    assert fp8.count(plain, "rowwise") == len(names) and fp8.count(plain, "off") == 0
    before, after = dict(plain.named_parameters()), dict(found.named_parameters())
    assert list(before) == list(after) and plain.state_dict().keys() == found.state_dict().keys()
    assert all(type(after[name]) is torch.nn.Parameter and torch.equal(before[name], after[name]) for name in before)
    assert [p.requires_grad for p in before.values()] == [p.requires_grad for p in after.values()]


@needs_torchao
def test_sides_that_are_no_multiples_of_16_are_left_out(monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", ("llama", {**FAMILIES["llama"][1], "intermediate_size": 40}, "sdpa"))
    assert fp8.count(build(), "rowwise") == LAYERS * len(ATTENTION)


def test_a_family_without_such_modules_is_refused():
    with pytest.raises(ConfigurationError, match="layers of GPT2LMHeadModel have no torch.nn.Linear .* use off"):
        fp8.convert(build("gpt2"), recipe("tensorwise"), CPU)


def rounded(values: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """To 8 bits and back. dim: that shares a scale, which then is a power of two; None: all of it."""
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.float()
    scale = scale if dim is None else torch.exp2(torch.floor(torch.log2(scale)))
    return (values.float() * scale).to(dtype).float() / scale


def by_hand(kind: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradient of the input, gradient of the weight) of x w^T, with g the gradient of the output."""
    if kind == "tensorwise":
        x, w, g = rounded(x, E4M3, None), rounded(w, E4M3, None), rounded(g, E5M2, None)
        return x @ w.T, g @ w, g.T @ x
    output = rounded(x, E4M3, 1) @ rounded(w, E4M3, 1).T
    if kind == "rowwise":
        return output, rounded(g, E4M3, 1) @ rounded(w, E4M3, 0), rounded(g, E4M3, 0).T @ rounded(x, E4M3, 0)
    # one scale for the weight, a power of two as the others
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(E4M3).max / w.abs().max().float())))
    return output, rounded(g, E4M3, 1) @ ((w.float() * scale).to(E4M3).float() / scale), g.T.float() @ x.float()


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_each_product_is_the_one_worked_out_by_hand(kind):
    layer = model(kind).model.layers[0].mlp.gate_proj
    torch.manual_seed(0)
    x = (torch.randn(64, 32) * torch.rand(64, 1) * 3).bfloat16().requires_grad_()
    g = torch.randn(64, 64).bfloat16() * torch.rand(64, 1).bfloat16()
    output = layer(x)
    output.backward(g)
    plain = x.detach().float() @ layer.weight.detach().T
    w = layer.weight.detach().bfloat16()
    found = (output, x.grad, layer.weight.grad)
    for value, reference in zip(found, by_hand(kind, x.detach(), w, g), strict=True):
        assert relative(value, reference) < ROUNDING
    assert output.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    assert 0.02 < relative(output, plain) < 0.05
    # as it comes out of a shard that was gathered in bf16
    with torch.no_grad():
        layer.weight.copy_(w)
        assert torch.equal(layer(x.float()), output)


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_by_rows_a_token_is_its_own_whatever_else_is_in_the_micro_batch(kind):
    layer = model(kind).model.layers[0].mlp.gate_proj
    torch.manual_seed(0)
    larger = torch.tensor([1.0, 5.3]).repeat_interleave(16)[:, None].bfloat16()
    x = torch.randn(32, 32, dtype=torch.bfloat16) * larger

    def gradient(*parts: torch.Tensor) -> torch.Tensor:
        layer.weight.grad = None
        for part in parts:
            layer(part).square().sum().backward()
        return layer.weight.grad

    assert torch.equal(layer(x)[:16], layer(x[:16])) == (kind != "tensorwise")
    if kind != "tensorwise":
        assert relative(gradient(x[:16], x[16:]), gradient(x)) < ROUNDING


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_near_those_of_bf16(kind):
    """Measured: 0.13 at most from fp32's. Those of bf16, whose rounding is 16 times finer, are up to 0.009 away."""
    found = {}
    for name, made in (("bf16", build()), ("fp8", model(kind))):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(made)
        loss.backward()
        found[name] = loss.item(), gradients(made)
    assert found["fp8"][0] == pytest.approx(found["bf16"][0], rel=1e-3)
    for name, gradient in found["bf16"][1].items():
        assert 0 < relative(found["fp8"][1][name], gradient) < 0.2, name


@needs_torchao
def test_an_adapters_own_matrices_are_multiplied_as_before():
    torch.manual_seed(0)
    x, found = torch.randn(16, 32), []
    for made in (build("llama adapted"), model("rowwise", "llama adapted")):
        layer = made.eval().model.layers[0].mlp.gate_proj
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x)
        output.square().sum().backward()
        assert layer.base_layer.weight.grad is None
        found.append((output.detach(), layer.lora_B["default"].weight.grad))
    for plain, rounded_ in zip(*found, strict=True):
        assert 0 < relative(rounded_, plain.float()) < 0.05
    inner = model("rowwise", "llama adapted").model.layers[0].mlp.gate_proj.lora_A["default"]
    assert type(inner) is torch.nn.Linear


@pytest.mark.parametrize(
    ("fields", "pads"),
    [
        *(({}, False), ({"packing": False}, True), ({"micro_batch_size": 3, "sequence_length": 8}, True)),
        ({"micro_batch_size": 2, "sequence_length": 8}, True),  # a step's last micro-batch may have one row
    ],
)
def test_tokens_that_are_no_multiple_of_16_are_padded(fields, pads):
    assert fp8.pads_inner_dimension(recipe("tensorwise", **fields)) is pads


def test_a_gpu_that_has_no_such_products_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    text = "fp8: found rowwise, which needs a GPU of compute capability 8.9 or more, but NVIDIA A100 has 8.0; use off"
    with pytest.raises(ConfigurationError) as error:
        fp8.check_device("rowwise", torch.device("cuda:0"))
    assert str(error.value) == text
    with pytest.raises(ConfigurationError, match="needs an NVIDIA GPU, but the device is mps"):
        fp8.check_device("rowwise", torch.device("mps"))
    fp8.check_device("off", torch.device("cuda:0"))
    fp8.check_device("rowwise", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_device("rowwise", torch.device("cuda:0"))


@pytest.mark.parametrize(("kind", "installed"), [("rowwise", False), ("rowwise", True), ("off", False)])
def test_torchao_has_to_be_there(kind, installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if installed or name != "torchao" else None)
    write(tmp_path, {})
    found = message(tmp_path, ["r.yaml", f"fp8={kind}", "precision=bf16", "--strategy", "configs/ddp.yaml"], TORCHRUN)
    if kind == "off" or installed:
        assert isinstance(found, Plan) and found.recipe.fp8 == kind
        return
    report, code = found
    check_report(report, [("command line", "fp8", "rowwise", "pip install torchao", "off")])
    assert code == 2


@pytest.mark.parametrize(("kind", "package"), [("torchao_int8", "torchao"), ("8bit", "bitsandbytes"), ("4bit", "none")])
def test_quantized_weights_need_their_package(kind, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else name)
    found = findings(rules_model.RULES, {"adapter.quantization": kind, "adapter.dora": False})
    expected = [("adapter.quantization", f"found {kind}, which needs the package {package}")]
    assert [(key, text.partition(";")[0]) for key, text in found] == (expected if package != "none" else [])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "bf16", "adapter.quantization": "4bit"}, ["rowwise", "adapter.quantization", "off"]),
        ({"precision": "fp32", "adapter.quantization": None}, ["rowwise", "precision", "fp32", "bf16", "off"]),
    ],
)
def test_what_has_products_of_its_own(values, words):
    found = findings(rules_training.MEMORY_RULES, {"fp8": "rowwise", **values})
    (text,) = (text for _, text in found if "torchao" not in text)
    assert missing(text, words) == []


@pytest.mark.parametrize(
    ("device", "compile", "advises"),
    [("NVIDIA H100", "off", True), ("NVIDIA H100", "regional", False), ("cpu", "off", False)],
)
def test_the_header_advises_to_compile_on_a_gpu(device, compile, advises):
    line = console.fp8_line(facts({"fp8": "rowwise", "compile": compile}, device=device, num_fp8_modules=7))
    assert ("set compile: regional" in line) == advises
    assert line.startswith("rowwise: the products of 7 linear modules")
