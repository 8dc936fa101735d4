"""Liger's kernels: equal to PyTorch's under Triton's interpreter, and refused with the reason where they cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from report_cases import TORCHRUN, Plan, check_report, findings, message, missing, write
from test_console import facts
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config import rules_training
from samecurve.errors import ConfigurationError
from samecurve.metrics.console import header_lines
from samecurve.models import liger
from samecurve.specs.model_families import families

ROOT, PROBE = Path(__file__).resolve().parents[2], Path(__file__).with_name("kernels_probe.py")
MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
needs_liger = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# of 2 layers; Qwen3 has a norm of queries and one of keys in each, and Gemma's activation is a GELU
REPLACED = {
    "llama": ["5 LigerRMSNorm", "2 LigerSwiGLUMLP", "apply_rotary_pos_emb"],
    "qwen3": ["9 LigerRMSNorm", "2 LigerSwiGLUMLP", "apply_rotary_pos_emb"],
    "gemma": ["2 LigerGEGLUMLP", "5 LigerRMSNorm", "apply_rotary_pos_emb"],
}
REPLACED["llama adapted"] = REPLACED["llama"]


def probed(*families: str) -> dict:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    around = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "timeout": 900}
    run = subprocess.run([sys.executable, str(PROBE), *families], **around)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("FOUND ", 1)[1])


@pytest.fixture(scope="module")
def found() -> dict:
    return probed()


@needs_liger
@pytest.mark.parametrize("name", [*REPLACED, "full", "attention", "loss, all", "loss, some", "loss, none"])
def test_loss_and_gradients_are_those_of_pytorch(found, name):
    """Measured in fp32: 9e-8 for the loss, 8e-7 for a gradient, 6e-6 for one of an adapter."""
    assert found[name]["loss"] < 1e-6 and found[name]["gradients"] < 1e-5
    assert (found[name]["value"] == 0) == (name == "loss, none")
    assert found[name].get("replaced") == REPLACED.get(name)


@needs_liger
@pytest.mark.full
def test_every_family_of_the_list_has_pytorchs_loss_and_gradients():
    assert families("liger") <= families("packed")
    found = probed(*sorted(families("liger")))
    assert found.keys() == families("liger")
    for family, measured in found.items():
        assert measured["loss"] < 1e-6 and measured["gradients"] < 1e-5 and measured["replaced"], family


@needs_liger
def test_another_activation_than_ligers_is_refused(found):
    """Its own check is in a constructor that nobody calls here."""
    common = "model.kernels: found liger", "model.layers.0.mlp uses", "use torch"
    assert not missing(found["gelu"], (*common, "LigerSwiGLUMLP", "GELUActivation"))
    assert not missing(found["silu"], (*common, "LigerReLUSquared", "SiLUActivation"))


@needs_liger
def test_what_selective_save_of_products_is_rotated_twice(found):
    """Why the rule on model.kernels refuses it; with equal gradients here the rule may go."""
    assert found["matmul"]["loss"] < 1e-6 and found["matmul"]["gradients"] > 0.1


REFUSED = [
    (
        ["model.kernels=liger", "memory.activation_checkpointing=selective"],
        (
            "model.kernels",
            "liger",
            "memory.selective_save: matmul",
            "attention",
            "memory.activation_checkpointing",
            "torch",
        ),
    ),
    (
        ["loss.implementation=liger", "precision=fp16"],
        ("loss.implementation", "liger", "fp16", "auto"),
    ),
    (
        ["optimizer.implementation=foreach", "optimizer.name=lion"],
        ("optimizer.implementation", "foreach", "adamw", "optimizer.name", "lion", "remove"),
    ),
]


@pytest.mark.parametrize(("argv", "row"), REFUSED, ids=[argv[0] for argv, _ in REFUSED])
def test_refused_with_the_reason(argv, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    write(tmp_path, {})
    report, code = message(tmp_path, ["r.yaml", *argv, "--strategy", "configs/ddp.yaml"], TORCHRUN)
    check_report(report, [("command line", *row)])
    assert code == 2


def test_deepspeed_takes_its_own_update_of_an_offloaded_optimizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    write(tmp_path, {"ds_configs/offload.json": json.dumps(block)})
    argv = ["r.yaml", "optimizer.implementation=for_loop", "--strategy", "ds_configs/offload.json"]
    report, code = message(tmp_path, argv, TORCHRUN)
    check_report(report, [("command line", "optimizer.implementation", "for_loop", "CPU Adam", "remove")])
    assert code == 2


@pytest.mark.parametrize("installed", [True, False])
def test_the_package_has_to_be_there(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if installed or name != "liger_kernel" else None)
    write(tmp_path, {})
    keys = {"loss.implementation": "auto", "model.kernels": "torch"}
    argv = ["r.yaml", *(f"{key}=liger" for key in keys), "--strategy", "configs/ddp.yaml"]
    found = message(tmp_path, argv, TORCHRUN)
    if installed:
        assert isinstance(found, Plan)
        assert (found.recipe.model.kernels, found.recipe.loss.implementation) == ("liger", "liger")
        return
    report, code = found
    fixes = ("liger", "pip install liger-kernel")
    check_report(report, [("command line", key, *fixes, instead) for key, instead in keys.items()])
    assert code == 2


def test_distilling_has_another_loss():
    from samecurve.config import rules_tasks

    values = {"loss.implementation": "liger", "task": "distill", "precision": "bf16"}
    [(key, text)] = findings(rules_tasks.RULES, values)
    assert key == "loss.implementation" and "task distill also needs the teacher's logits" in text
    assert findings(rules_tasks.RULES, {**values, "loss.implementation": "chunked"}) == []


def test_attention_alone_may_be_kept(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    values = {
        "model.kernels": "liger",
        "loss.implementation": "auto",
        "memory.activation_checkpointing": "selective",
        "memory.selective_save": "attention",
    }
    assert findings(rules_training.MEMORY_RULES, values) == []


def recipe(kind: str, loss: str) -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(kernels=kind), loss=SimpleNamespace(implementation=loss))


def test_a_device_that_triton_does_not_compile_for_is_refused():
    text = "but its Triton kernels run on a GPU only and the device is"
    with pytest.raises(ConfigurationError) as error:
        liger.check_device(recipe("liger", "auto"), torch.device("cpu"))
    assert str(error.value) == f"model.kernels: found liger, {text} cpu; use torch"
    with pytest.raises(ConfigurationError, match=f"loss.implementation: found liger, {text} mps; use auto"):
        liger.check_device(recipe("torch", "liger"), torch.device("mps"))
    liger.check_device(recipe("liger", "liger"), torch.device("cuda:0"))
    liger.check_device(recipe("torch", "chunked"), torch.device("cpu"))


def tiny(family: str = "llama") -> torch.nn.Module:
    config = AutoConfig.for_model(family, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_family_that_was_not_compared_is_refused(monkeypatch):
    monkeypatch.setattr(liger, "families", lambda fact: frozenset(("qwen2", "llama")))
    monkeypatch.setattr(liger, "import_module", lambda name: None)
    with pytest.raises(ConfigurationError) as error:
        liger.check_family("liger", "gpt2")
    assert not missing(str(error.value), ("model.kernels: found liger", "llama, qwen2", "gpt2", "use torch"))
    liger.check_family("liger", "llama")
    liger.check_family("torch", "gpt2")
    liger.check_family("liger", "gpt2", uses := [])
    assert not missing(uses[0], ("Liger's kernels in a gpt2", "model.kernels=torch"))


def test_a_family_that_fails_is_refused_if_unproven():
    with pytest.raises(ConfigurationError, match="not for mixtral; use torch$"):
        liger.check_family("liger", "mixtral", [])


@pytest.mark.parametrize("fails", [True, False], ids=["raises", "does nothing"])
def test_what_liger_leaves_alone_is_refused(fails, monkeypatch):
    def apply(model, **losses):
        assert losses == {"cross_entropy": False, "fused_linear_cross_entropy": False}
        if fails:
            raise TypeError("Unsupported gemma3 model type.")

    package = SimpleNamespace(_apply_liger_kernel_to_instance=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(liger, "import_module", lambda name: None)
    why = r" \(TypeError: Unsupported gemma3 model type.\)" if fails else ""
    with pytest.raises(
        ConfigurationError, match=f"liger, which replaces nothing of a LlamaForCausalLM{why}; use torch"
    ):
        liger.replace(tiny(), "liger")
    liger.replace(tiny(), "torch")


def test_a_package_that_does_not_fit_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigurationError, match="model.kernels: found liger, but liger-kernel cannot be imported"):
        liger.check_family("liger", "llama")


def test_the_header_says_what_is_ligers():
    assert liger.replaced(tiny()) == []
    found = facts(engine={"kernels": ("5 LigerRMSNorm",), "loss_implementation": "liger"})
    assert dict(header_lines(found))["kernels"] == "liger: 5 LigerRMSNorm, output head and cross-entropy together"
    assert "kernels" not in dict(header_lines(facts(engine={"loss_implementation": "chunked"})))
