"""Adapters on 4-bit weights against transformers' own quantized model, peft and a loop of torch alone."""

from __future__ import annotations

import pytest
import torch
from harness import largest_relative_difference, long, relative_l2
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from test_lora import RATE, STEPS, STOP, WARMUP, arguments, base, world  # noqa: F401 - base is a fixture
from test_plain_loop import batches, train
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from samecurve.models.lora import initial_matrices

pytest.importorskip("bitsandbytes")
FOUR_BITS = "adapter={name: lora, rank: 4, alpha: 16, quantization: 4bit}"


@pytest.fixture(scope="module")
def plain(workspace, base):  # noqa: F811
    """(losses, gradient norms, adapter) of a loop that a reader of the QLoRA documentation would write, in fp32."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=nf4).train()
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, values in initial_matrices({name: p.shape for name, p in trained.items()}, seed=3):
            trained[name].copy_(values)
    losses, norms = train(model, batches(workspace, base), STEPS, RATE, WARMUP)
    return losses, norms, {key: value.detach() for key, value in get_peft_model_state_dict(model).items()}


def run_qlora(workspace, base, name: str, start=None):  # noqa: F811
    strategy = None if name == "single" else name
    # on a CPU bitsandbytes 0.50 evaluates only layers whose inputs are multiples of 64, and the toy's are 32 wide
    more = arguments(base, name, FOUR_BITS, "evaluate.every_steps=0")
    if start is not None:
        return workspace.resume(start, STOP, strategy, world(name), *more)
    return workspace.run(strategy, world(name), *more)


@pytest.mark.parametrize("name", ["ddp", *long("single")])
def test_follows_the_plain_loop(name, workspace, base, plain):  # noqa: F811
    run = run_qlora(workspace, base, name)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == name and run.facts["adapter"]["quantization"] == "4bit"
    # 7 matrices of 4 layers, two weights in a byte
    halved = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) // 2
    assert run.facts["num_parameters_per_rank"] == run.facts["num_parameters"] - halved
    losses, norms, weights = plain
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    assert relative_l2(load_file(run.directory / "model" / "adapter_model.safetensors"), weights) < 1e-4


def test_goes_on_under_the_other_strategy(workspace, base):  # noqa: F811
    golden = run_qlora(workspace, base, "ddp")
    run = run_qlora(workspace, base, "single", golden)
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < 1e-5
    assert run.column("step") == list(range(1, STEPS + 1))
