"""How often torch compiled again, by its own account, and where compile is refused. See also test_step_options.py."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_families import tiny_config
from transformers import AutoModelForCausalLM

from samecurve.config.schema import Memory
from samecurve.engines import loss_implementation
from samecurve.models import compilation
from samecurve.models.compilation import SETTLED_STEPS, Recompilations
from samecurve.strategy import preflight


@pytest.mark.parametrize("num_documents", [1, 2])
def test_full_keeps_the_causal_kernel_for_rows_of_one_document(num_documents, monkeypatch):
    """With a mask, attention computes the full square."""
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="sdpa")
    model.config.use_cache = False
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is attend:
                masks.append((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")))
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compiled, backend=backend))
    kernels, memory = SimpleNamespace(kernels="torch"), Memory(activation_checkpointing="none")
    recipe = SimpleNamespace(compile="full", fp8="off", model=kernels, memory=memory)
    compilation.prepare(model, recipe, torch.device("cpu"))
    positions = torch.arange(8).remainder(8 // num_documents)[None]
    model(input_ids=torch.arange(8)[None], position_ids=positions)
    assert masks and all((mask is None, causal) == (num_documents == 1, num_documents == 1) for mask, causal in masks)


@pytest.mark.parametrize(
    ("device", "triton", "found", "headers", "compiles"),
    [
        ("cuda", True, "gcc", True, True),
        ("cuda", False, "gcc", True, False),
        ("cuda", True, None, True, False),
        ("cuda", True, "gcc", False, False),  # Debian without python3-dev
        ("cpu", True, "gcc", True, False),
    ],
)
def test_the_loss_is_compiled_where_a_gpu_has_a_compiler(device, triton, found, headers, compiles, monkeypatch):
    monkeypatch.setattr(compilation, "has_triton", lambda: triton)
    monkeypatch.setattr(compilation, "has_python_headers", lambda: headers)
    monkeypatch.setattr(compilation.shutil, "which", lambda name, path: found)
    given = []
    monkeypatch.setattr(loss_implementation, "head_implementation", lambda *args: "chunked")
    monkeypatch.setattr(
        loss_implementation.chunked_cross_entropy, "install_chunked_head", lambda *args: given.append(args[-1])
    )
    loss = SimpleNamespace(implementation="auto")
    recipe = SimpleNamespace(compile="off", precision="bf16", loss=loss)
    task = SimpleNamespace(by_token=True, by_log_probability=False)
    loss_implementation.install_loss(None, None, task, recipe, torch.device(device))
    assert given == [compiles]


@pytest.mark.parametrize(
    ("kind", "liger", "accelerator", "tools", "found"),
    [
        ("regional", False, False, "", ["compile: regional needs a C++ compiler"]),
        ("regional", False, True, "g++", ["compile: regional needs a C compiler"]),
        ("regional", True, True, "clang", []),
        ("off", False, False, "", []),
        ("off", True, False, "", []),
        ("off", True, True, "", ["model.kernels: liger needs a C", "loss.implementation: liger needs a C"]),
        ("full", False, False, "g++", []),
    ],
)
def test_a_compiler_is_needed_and_on_a_gpu_it_is_tritons(kind, liger, accelerator, tools, found, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_python_headers", lambda: True)
    for tool in tools.split():
        (tmp_path / tool).touch(mode=0o755)
    kernels, loss = ("liger", "liger") if liger else ("torch", "auto")
    recipe = SimpleNamespace(
        compile=kind, model=SimpleNamespace(kernels=kernels), loss=SimpleNamespace(implementation=loss)
    )
    problems = list(preflight.compiler_problems(recipe, accelerator, {"PATH": str(tmp_path)}))
    assert [problem.startswith(text) for problem, text in zip(problems, found, strict=True)] == [True] * len(found)
    assert all(f"apt-get install {'gcc' if accelerator else 'g++'}," in text for text in problems)
    monkeypatch.setattr(preflight, "has_python_headers", lambda: False)
    if accelerator and tools and kind == "regional":
        problems = list(preflight.compiler_problems(recipe, accelerator, {"PATH": str(tmp_path)}))
        assert "compile: regional needs Python's headers" in problems[0] or tools == "g++"


def graphs(num_layers: int, kind: str) -> int:
    """How many of a model's training step torch compiles."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=num_layers)).train()
    recipe = SimpleNamespace(
        compile=kind,
        fp8="off",
        model=SimpleNamespace(kernels="torch"),
        memory=SimpleNamespace(activation_checkpointing="none"),
    )
    compilation.prepare(model, recipe, torch.device("cpu"))
    model(input_ids=torch.zeros(2, 16, dtype=torch.long), use_cache=False).logits.sum().backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_regional_compiles_as_much_for_many_layers_as_for_few(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert graphs(6, "regional") == graphs(2, "regional") == 1


def test_what_torch_compiles_again_is_counted_with_its_reason():
    torch._dynamo.reset()
    compilation._reasons()  # those of other tests
    lines: list[str] = []
    counter = Recompilations(True, lines.append)
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for step in range(1, SETTLED_STEPS + 4):
        double(torch.zeros(3 + (step > 2) + (step > SETTLED_STEPS) + (step > SETTLED_STEPS + 1)))
        record = counter.record(step)
        assert record == {"recompilations": (step > 2) + (step > SETTLED_STEPS) + (step > SETTLED_STEPS + 1)}
    assert len(lines) == 1
    assert lines[0].startswith(f"step {SETTLED_STEPS + 1}: torch.compile recompiled (recompilation 2): ")
    assert "size mismatch" in lines[0] and "\n" not in lines[0]


def test_the_first_evaluation_is_counted_but_not_told(monkeypatch):
    lines: list[str] = []
    counter = Recompilations(True, lines.append)
    reasons = {20: ["0/0: GLOBAL_STATE changed: grad_mode"], 30: ["0/1: GLOBAL_STATE changed: grad_mode"]}
    for step in range(1, 31):
        monkeypatch.setattr(compilation, "_reasons", lambda step=step: reasons.get(step, []))
        record = counter.record(step)
        assert bool(lines) == (step == 30)
    assert record == {"recompilations": 2}


def test_nothing_is_recorded_where_nothing_is_compiled():
    assert Recompilations(False, print).record(1) == {}


def test_those_of_earlier_sessions_count(monkeypatch):
    monkeypatch.setattr(compilation, "_reasons", lambda: ["0/1: size mismatch"])
    assert Recompilations(True, print, earlier=40).record(21) == {"recompilations": 41}
