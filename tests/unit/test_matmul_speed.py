import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from report_cases import missing
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.models import matmul_speed
from samecurve.models.flops import Peak, device_peak
from samecurve.models.matmul_speed import PRODUCTS, Shape, precision_warning, training_seconds

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2}
# by hand: 128 tokens, 128 -> 128 are 2 x 128^3 FLOPs for each of three products: 12.58 MFLOP together
PART = "128 tokens, 128 -> 128"


def recipe(precision="bf16", optimizer="adamw", fp8="off"):
    batch = SimpleNamespace(micro_batch_size=4, sequence_length=128)
    return SimpleNamespace(
        precision=precision, batch=batch, optimizer=SimpleNamespace(name=optimizer), fp8=fp8, output_dir="run"
    )


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=5000))


@pytest.fixture
def machine(monkeypatch):
    """A machine that needs so many milliseconds for the three products of any shape, by precision."""

    def make(**milliseconds):
        asked = []

        def training_seconds(device, precisions, shape):
            asked[:] = [*precisions], shape
            return Shape(128, 128, 128), {each: milliseconds[each] / 1000 for each in precisions}

        monkeypatch.setattr(matmul_speed, "training_seconds", training_seconds)
        return asked

    return make


def test_a_slow_precision_is_told_with_the_key(machine, model):
    asked = machine(fp32=0.1, bf16=5.0)
    rates = "50 times faster", "2.52 GFLOP/s in bf16", "126 GFLOP/s in fp32", PART
    fixes = "`precision: fp32`", "precision=fp32"
    assert not missing(precision_warning(recipe(), model, CPU), rates + fixes)
    # 4 rows of 128 tokens, and the largest matrix of a layer: the vocabulary's are left out
    assert asked == [["fp32", "bf16"], Shape(512, 128, 384)]


def test_little_is_not_worth_a_line(machine, model):
    machine(fp32=1.0, bf16=1.4)
    assert precision_warning(recipe(), model, CPU) == ""
    machine(fp32=1.0, bf16=0.2)
    assert precision_warning(recipe(), model, CPU) == ""


def test_the_fastest_other_precision_is_named(machine, model):
    machine(fp32=1.0, bf16=0.25, fp16=40.0)
    assert "add precision=bf16 to the command" in precision_warning(recipe("fp16"), model, CPU)
    machine(fp32=1.0, bf16=3.0, fp16=40.0)
    assert "add precision=fp32 to the command" in precision_warning(recipe("fp16"), model, CPU)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [({"optimizer": "adamw_bf16"}, "optimizer.name=adamw"), ({"fp8": "rowwise"}, "fp8=off")],
)
def test_what_bf16_alone_allows_changes_with_it(changes, keys, machine, model):
    machine(fp32=1.0, bf16=20.0)
    assert f"add precision=fp32 {keys} to the command" in precision_warning(recipe(**changes), model, CPU)


def test_fp32_and_gpus_with_bf16_are_not_measured(machine, model, monkeypatch):
    asked = machine()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert (
        precision_warning(recipe("fp32"), model, CPU)
        == precision_warning(recipe(), model, CUDA)
        == precision_warning(recipe("fp16"), model, CUDA)
    )
    assert asked == []


def test_a_gpu_that_emulates_bf16_is_told(machine, model, monkeypatch):
    """Turing and Volta: torch and Accelerate take bf16 there without a word."""
    machine(fp32=1.0, bf16=4.0, fp16=0.2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    found = precision_warning(recipe(), model, CUDA)
    assert found.startswith("bf16 is slow on this GPU: fp16 multiplies matrices 20 times faster")
    assert precision_warning(recipe("fp16"), model, CUDA) == ""


def test_measuring_leaves_threads_and_random_numbers_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        part, seconds = training_seconds(CPU, ["fp32", "bf16"], Shape(8, 16, 24))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert part == Shape(8, 16, 24) and set(seconds) == {"fp32", "bf16"} and all(each > 0 for each in seconds.values())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("took", [1e-6, 1.0])
def test_matrices_grow_while_there_is_time(took, monkeypatch):
    monkeypatch.setattr(matmul_speed, "seconds_of_call", lambda run, device: took)
    part, seconds = training_seconds(CPU, ["fp32"], Shape(300, 100, 200), seconds=1.0)
    assert part == (Shape(300, 100, 200) if took < 1 else Shape(128, 100, 128))
    assert seconds == {"fp32": pytest.approx(3 * took)}


def test_the_best_product_is_the_peak(monkeypatch):
    """By hand: bf16's forward of 128^3 in 1 ms, all else in 1 s: 2 x 128^3 / 0.001 s."""
    monkeypatch.setattr(
        matmul_speed,
        "_fastest",
        lambda runs, device: {key: 1e-3 if key == ("bf16", "forward") else 1.0 for key in runs},
    )
    tflops, precision = matmul_speed.peak(CPU, ("fp32", "bf16"), seconds=0.0)
    assert (tflops, precision) == (pytest.approx(2 * 128**3 / 1e-3 / 1e12), "bf16")


def test_operands_are_random_and_leave_the_default_generator_alone():
    """With constants a GPU draws less power, so that the peak would be one that training cannot reach."""
    before = torch.get_rng_state()
    runs = matmul_speed.matmul_runs(CPU, torch.float32, matmul_speed.Shape(64, 64, 64))
    assert runs["forward"]().std() > 1
    assert torch.equal(torch.get_rng_state(), before)


CODE = """
import json, torch
from types import SimpleNamespace
from samecurve.models import flops, matmul_speed
from samecurve.specs.precision import torch_dtype

device = torch.device("cpu")
shape = matmul_speed.Shape(256, 256, 512)
rates = {}
for precision in ("fp32", "bf16"):
    for name, run in matmul_speed.matmul_runs(device, torch_dtype(precision), shape).items():
        seconds = min(matmul_speed.seconds_of_call(run, device) for _ in range(4))
        rates[f"{precision} {name}"] = shape.flops / seconds / 1e12
peaks = {precision: flops.device_peak(device, precision).tflops for precision in ("fp32", "bf16", "fp16")}
model = torch.nn.Linear(128, 384)
model.get_input_embeddings = model.get_output_embeddings = lambda: None
told = {}
for precision in ("bf16", "fp16"):
    batch = SimpleNamespace(micro_batch_size=4, sequence_length=128)
    recipe = SimpleNamespace(precision=precision, batch=batch, optimizer=SimpleNamespace(name="adamw"), fp8="off")
    told[precision] = matmul_speed.precision_warning(recipe, model, device)
print(json.dumps({"rates": rates, "peaks": peaks, "told": told}))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's limit is of x86 instructions")
def test_on_a_cpu_without_bf16():
    """Oracle: the products of a training step themselves. None is faster than the peak, so no step has mfu above 1."""
    around = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=around, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rates"]) == 2 * len(PRODUCTS) and len(found["peaks"]) == 3
    for precision, tflops in found["peaks"].items():
        # with room for a busy machine's noise; measured with bf16 squares alone the peak was 80 times too low
        assert max(found["rates"].values()) < 3 * tflops, (precision, found)
    assert all(line.endswith("add precision=fp32 to the command") for line in found["told"].values()), found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_peak_is_the_devices_whatever_the_recipes_precision(precision, monkeypatch):
    monkeypatch.setattr(matmul_speed, "peak", lambda device, precisions: (float(len({*precisions})), "fp32"))
    assert device_peak(CPU, precision) == Peak(3.0, "measured with fp32 matrix multiplications, the fastest here")
