"""Adapters on quantized weights against transformers' own quantized model, peft and a loop of torch alone."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from harness import Run, largest_relative_difference, launch_command, long, relative_l2
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from test_equal_curves import CONTEXT
from test_lora import RATE, STEPS, STOP, WARMUP, arguments, base  # noqa: F401 - base is a fixture
from test_lora import world as world_of
from test_plain_loop import batches, mean_losses, train
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from samecurve.models.lora import initial_matrices
from samecurve.models.quantized import QuantizedLinear

pytest.importorskip("bitsandbytes")
STRATEGIES = ["ddp", "hsdp", "zero1", "zero2", "zero2_offload", "zero3_offload", "zero3_hpz", *CONTEXT]
# 7 matrices of 4 layers
QUANTIZED = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)


def world(name: str) -> int:
    return 4 if name == "zero3_hpz" else world_of(name)


@pytest.mark.parametrize("kind", ["4bit", "8bit", "torchao_int8"])
def test_a_layer_is_that_of_its_library_and_keeps_integers(kind):
    import bitsandbytes as bnb

    linear, kept = torch.nn.Linear(128, 192).requires_grad_(False), []
    ours = QuantizedLinear(linear, kind, torch.float32)
    ours.weight = torch.nn.Parameter(ours.quantize(linear.weight), requires_grad=False)
    if kind == "4bit":
        theirs = bnb.nn.Linear4bit(128, 192, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False)
    elif kind == "8bit":
        theirs = bnb.nn.Linear8bitLt(128, 192, has_fp16_weights=False, threshold=6.0).requires_grad_(False)
    else:
        theirs = torch.nn.Linear(128, 192).requires_grad_(False)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.to("cpu")
    if kind == "torchao_int8":
        quantize_(theirs, Int8WeightOnlyConfig())
    inputs = [torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: (kept.append(saved.dtype), saved)[1], lambda saved: saved
    ):
        outputs = ours(inputs[0])
    expected = theirs(inputs[1])
    for each in (outputs, expected):
        each.square().sum().backward()
    ours_grad, theirs_grad = (each.grad for each in inputs)
    assert ours_grad is not None and theirs_grad is not None
    # torchao multiplies by the scales after the product
    tolerance = 1e-6 if kind == "torchao_int8" else 0
    assert relative_l2({"": outputs}, {"": expected}) <= tolerance
    assert relative_l2({"": ours_grad}, {"": theirs_grad}) <= tolerance
    assert kept == [ours.weight.dtype] and not ours.weight.is_floating_point()


@functools.cache
def plain_loop(workspace, base: Path, kind: str):  # noqa: F811
    """(losses, gradient norms, adapter) of a loop that a reader of the QLoRA documentation would write, in fp32.

    On a CPU bitsandbytes dequantizes int8 weights for training, and does not round activations.
    """
    nf4 = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }
    config, stored = {
        "4bit": (BitsAndBytesConfig(load_in_4bit=True, **nf4), torch.uint8),
        "8bit": (BitsAndBytesConfig(load_in_8bit=True), torch.int8),
        "torchao_int8": (TorchAoConfig(Int8WeightOnlyConfig()), torch.int8),
    }[kind]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config).train()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert getattr(weight, "qdata", weight).dtype == stored
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, values in initial_matrices({name: p.shape for name, p in trained.items()}, seed=3):
            trained[name].copy_(values)
    losses, norms = train(model, mean_losses(model, batches(workspace, base)), STEPS, RATE, WARMUP)
    return losses, norms, {key: value.detach() for key, value in get_peft_model_state_dict(model).items()}


def run_qlora(workspace, base, name: str, kind: str = "4bit", *more: str, start: Run | None = None) -> Run:  # noqa: F811
    strategy = None if name == "single" else name
    adapter = f"adapter={{name: lora, rank: 4, alpha: 16, quantization: {kind}}}"
    settings = arguments(base, name, adapter, *more)
    if start is None:
        run = workspace.run(strategy, world(name), *settings)
    else:
        run = workspace.resume(start, STOP, strategy, world(name), *settings)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == name and run.facts["adapter"]["quantization"] == kind
    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fsdp", "4bit"),
        ("fsdp", "torchao_int8"),
        *long(
            *((name, "torchao_int8") for name in ("single", "ddp", "zero3")),
            ("zero3", "4bit"),
            ("zero3", "8bit"),
            ("single", "4bit"),
            ("single", "8bit"),
            ("fsdp", "8bit"),
            *((name, "4bit") for name in STRATEGIES),
        ),
    ],
)
def test_follows_the_plain_loop(name, kind, workspace, base):  # noqa: F811
    run = run_qlora(workspace, base, name, kind)
    losses, norms, weights = plain_loop(workspace, base, kind)
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    assert relative_l2(load_file(run.directory / "model" / "adapter_model.safetensors"), weights) < 1e-4
    with safe_open(next(run.checkpoint(STEPS).glob("rank_*.safetensors")), framework="pt") as file:
        assert all(".lora_" in key for key in file.keys() if not key.startswith("rng/"))


@pytest.mark.parametrize(
    ("origin", "name"), [("fsdp", "zero3"), *long(("zero3", "single"), ("single", "fsdp"), ("ddp", "single"))]
)
def test_goes_on_under_another_strategy(origin, name, workspace, base):  # noqa: F811
    golden = run_qlora(workspace, base, origin)
    run = run_qlora(workspace, base, name, start=golden)
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < 1e-5
    assert run.column("step") == list(range(1, STEPS + 1))


@functools.cache
def probed(workspace, base: Path, name: str, kind: str, precision: str) -> list[dict]:  # noqa: F811
    """What quantized_probe.py writes, by rank."""
    directory = workspace.folder / f"probed_{name}_{kind}_{precision}"
    path, ranks = None if name == "single" else workspace.strategy(name), world(name)
    program = str(Path(__file__).with_name("quantized_probe.py"))
    adapter = f"adapter={{name: lora, rank: 4, alpha: 16, quantization: {kind}}}"
    settings = arguments(base, name, adapter, "steps=3", f"precision={precision}", "evaluate.every_steps=0")
    command = [*launch_command("fork", path, ranks, workspace.folder, program), str(workspace.recipe)]
    command += [f"output_dir={directory}", *settings, "export.enabled=false"]
    run = workspace.execute([*command, *(["--strategy", str(path)] if path else [])], directory)
    assert run.returncode == 0, run.output
    return [json.loads((directory / f"quantized_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [
        ("fsdp", "4bit", "bf16"),
        *long(("zero3", "4bit", "bf16")),
        *long(*((name, kind, "fp32") for name in ("fsdp", "zero3") for kind in ("4bit", "8bit"))),
        *long(
            ("fsdp", "torchao_int8", "bf16"),
            ("fsdp", "8bit", "bf16"),
            ("zero3", "8bit", "bf16"),
            ("zero2", "4bit", "bf16"),
            ("hsdp", "4bit", "bf16"),
        ),
    ],
)
def test_ranks_share_the_bytes_and_multiply_with_the_same_weights(name, kind, precision, workspace, base):  # noqa: F811
    (alone,) = probed(workspace, base, "single", kind, precision)
    whole = QUANTIZED // 2 if kind == "4bit" else QUANTIZED
    assert len(alone["hashes"]) == 28 and alone["bytes"] == whole
    shards = {"zero2": 1}.get(name, 2)
    # keys and values of 4 layers are below stage3_param_persistence_threshold: whole, beside their parts
    small = 4 * 2 * 256 if (name, kind) == ("zero3", "4bit") else 0
    for rank in probed(workspace, base, name, kind, precision):
        assert rank["hashes"] == alone["hashes"]
        assert rank["bytes"] == math.ceil(whole / shards) + small
