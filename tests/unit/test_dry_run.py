"""`plan --dry_run`: one of N ranks on fake tensors beside the formulas."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import DynamicOutputShapeException

import samecurve.bench.dry_run
from samecurve.bench.step import write_changed
from samecurve.cli.commands import main

pytestmark = pytest.mark.full  # each imports torch and transformers in a process of its own

MODEL = "model.config={model_type: llama, hidden_size: 512, intermediate_size: 1408, num_attention_heads: 8, "
MODEL += "num_key_value_heads: 4, num_hidden_layers: 12, tie_word_embeddings: true}"


def dry_run(*arguments: str, model: str = MODEL) -> subprocess.CompletedProcess:
    """Runs in a process of its own, because of its process group."""
    command = [sys.executable, "-m", "samecurve", "plan", "recipes/pretrain.yaml", model, *arguments, "--dry_run"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def formulas_and_tracked(shown: str) -> dict[str, tuple[float, float]]:
    """GiB by row of the printed table."""
    found = re.findall(r"^(\w.*?) +([\d.]+) +([\d.]+)", shown, re.M)
    return {name: (float(formulas), float(tracked)) for name, formulas, tracked in found}


def assert_layers_agree(done: subprocess.CompletedProcess) -> None:
    """States exactly, activations of a layer within 1 %."""
    assert done.returncode == 0, done.stderr
    rows = formulas_and_tracked(done.stdout.partition("dry run: ")[2])
    for name in ("weights, gradients, optimizer", "activations of a layer"):
        predicted, tracked = rows[name]
        assert predicted == pytest.approx(tracked, rel=0.01, abs=0.0011) and tracked > 0, name


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_states_and_activations_are_those_of_the_formulas(strategy):
    """64 shards of FSDP, and bf16 copies: states exactly, activations of a layer within 1 %."""
    done = dry_run("--cluster", "h100x8", "--gpus", "64", "--strategy", f"configs/{strategy}.yaml", "--rank", "63")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("dry run: rank 63 of 64, 2 and 4 of 12 layers")[2]
    rows = formulas_and_tracked(shown)
    predicted, tracked = rows["weights, gradients, optimizer"]
    assert predicted == pytest.approx(tracked, abs=0.0011) and tracked > 0
    assert rows["activations of a layer"][0] == pytest.approx(rows["activations of a layer"][1], rel=0.01, abs=0.001)
    predicted, tracked = rows["peak of all tensors"]
    assert ("differs by" in shown.partition("peak of all tensors")[2]) == (abs(predicted / tracked - 1) > 0.05)


@pytest.mark.parametrize(
    ("quantization", "strategy"), [("null", "fsdp"), ("4bit", "fsdp"), ("8bit", "ddp"), ("torchao_int8", "fsdp")]
)
def test_frozen_weights_are_those_of_the_formulas(quantization, strategy, tmp_path):
    """States and activations within 1 %, the peak within 5 %."""
    config = yaml.safe_load(MODEL.partition("=")[2]) | {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = f"adapter={{name: lora, rank: 16, alpha: 16, quantization: {quantization}}}"
    settings = (adapter, "--cluster", "h100x2", "--strategy", f"configs/{strategy}.yaml")
    done = dry_run("tokenizer={}", *settings, model=f"model={{path: {tmp_path}}}")
    assert_layers_agree(done)
    assert "peak" in done.stdout and not re.search("peak of all tensors.*differs", done.stdout)


@pytest.mark.parametrize(("strategy", "gpus", "size"), [("fsdp_tp", 8, 4), ("tp", 2, 2)])
@pytest.mark.parametrize("cuts_sequence", [False, True])
def test_a_layer_cut_by_tensor_parallelism(strategy, gpus, size, cuts_sequence, tmp_path):
    """In bf16, under FSDP and under autocast: the inputs of products are divided, or gathered and kept whole."""
    switches = (f"tp_size={size}", f"tp_sequence_parallel={str(cuts_sequence).lower()}")
    keys = [f"parallelism_config.parallelism_config_{switch}" for switch in switches]
    path = write_changed(Path(f"configs/{strategy}.yaml"), keys, tmp_path)
    done = dry_run("--cluster", "h100x8", "--gpus", str(gpus), "--strategy", str(path))
    assert_layers_agree(done)


@pytest.mark.parametrize("strategy", ["fsdp_ulysses", "fsdp_cp"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layer_on_a_part_of_the_sequence(strategy, precision):
    """With the masks of SDPA, and with keys and values repeated to the queries' heads."""
    arguments = (f"precision={precision}", "--cluster", "h100x8", "--gpus", "8")
    assert_layers_agree(dry_run(*arguments, "--strategy", f"configs/{strategy}.yaml"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_tp", "fsdp_ulysses", "tp"])
def test_a_layer_that_is_recomputed(strategy, recompute, precision):
    """Its input, of 4 bytes where residuals are fp32, and with selective recomputation what its products return."""
    arguments = (f"precision={precision}", f"memory.activation_checkpointing={recompute}", "--cluster", "h100x8")
    gpus = "2" if strategy == "tp" else "8"
    if strategy in ("fsdp", "fsdp_ulysses"):  # with a small head the peak is late, when the inputs of layers are gone
        arguments += ("tokenizer.vocabulary_size=65536",)
    assert_layers_agree(dry_run(*arguments, "--gpus", gpus, "--strategy", f"configs/{strategy}.yaml"))


def assert_stages_agree(done: subprocess.CompletedProcess, *titles: str) -> None:
    """Activations of a layer within 1 %, the peak within 5 %; states beside the positions' masks and angles."""
    assert done.returncode == 0, done.stderr
    tables = done.stdout.split("dry run: ")[1:]
    assert [each.partition("\n")[0] for each in tables] == [*titles]
    for each in tables:
        rows = formulas_and_tracked(each)
        for name, share in (("weights, gradients, optimizer", 0.01), ("activations of a layer", 0.01), ("peak", 0.05)):
            predicted, tracked = next(value for key, value in rows.items() if key.startswith(name))
            beside = 0.008 if name.startswith("weights") else 0.0011  # positions' masks and angles; digits
            assert predicted == pytest.approx(tracked, rel=share, abs=beside), (name, each)


def test_a_pipeline_tracks_one_rank_of_each_class():
    """Under autocast, with as many micro-batches as the whole step keeps at once."""
    done = dry_run("--cluster", "h100x8", "--gpus", "2", "--strategy", "configs/pipeline_1f1b.yaml")
    titles = ("rank 0 of 2, 2 and 4 of 6 layers, first", "rank 1 of 2, 2 and 4 of 6 layers, last")
    assert_stages_agree(done, *(f"{each} stage, 3 of 16 micro-batches" for each in titles))


def test_a_rank_with_both_sides_of_a_v():
    """The backward pass is in halves, and one stage hands on to the other."""
    strategy = ("--strategy", "configs/pipeline_zbv.yaml", "--rank", "1")
    done = dry_run("--cluster", "h100x8", "--gpus", "2", *strategy)
    assert_stages_agree(done, "rank 1 of 2, 2 and 4 of 6 layers, middle stage, 3 of 16 micro-batches")


def test_a_stage_that_is_cut_and_sharded():
    strategy = ("--strategy", "configs/pp_fsdp_tp.yaml", "--rank", "1")
    done = dry_run("--cluster", "h100x8", "--gpus", "8", *strategy)
    assert_stages_agree(done, "rank 1 of 8, 2 and 4 of 6 layers, first stage, 3 of 8 micro-batches")


def test_experts_on_several_ranks():
    """Each rank computes 1.2 times its share of the tokens, as the formulas assume."""
    experts = "model.config={model_type: qwen3_moe, hidden_size: 512, moe_intermediate_size: 512, num_experts: 8, "
    experts += "num_experts_per_tok: 2, num_attention_heads: 8, num_key_value_heads: 4, num_hidden_layers: 8}"
    done = dry_run("--cluster", "h100x8", "--gpus", "4", "--strategy", "configs/fsdp_ep.yaml", model=experts)
    rows = formulas_and_tracked(done.stdout.partition("dry run: ")[2])
    assert len(rows) == 3, done.stderr
    for name, (predicted, tracked) in rows.items():
        assert predicted == pytest.approx(tracked, rel=0.03) and tracked > 0, name


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("zero3", "DeepSpeed (zero3) has buffers"), ("pipeline", "DeepSpeed (pipeline) has buffers")],
)
def test_what_cannot_run_on_fake_tensors_says_so(strategy, message):
    done = dry_run("--cluster", "h100x8", "--strategy", f"configs/{strategy}.yaml")
    assert done.returncode == 2 and message in done.stderr


def test_a_model_that_needs_values_of_tensors_says_so(monkeypatch, capsys):
    def needs_values(*_):
        raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)

    monkeypatch.setattr(samecurve.bench.dry_run, "track", needs_values)
    command = ["plan", "recipes/pretrain.yaml", MODEL, "--cluster", "h100x8", "--strategy", "configs/fsdp.yaml"]
    assert main([*command, "--dry_run"]) == 2
    assert "fsdp needs the values of tensors (aten.nonzero.default)" in capsys.readouterr().err
