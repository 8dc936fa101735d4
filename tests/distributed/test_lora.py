"""Adapters under every strategy against a loop of peft, transformers and torch alone; their checkpoints and exports.

The base model is the export of the reference run. Its weights are frozen: every strategy meets parameters without a
gradient, without a master and without an optimizer state.
"""

from __future__ import annotations

import functools
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from harness import Run, largest_relative_difference, long, rank_hashes, relative_l2
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_equal_curves import CONTEXT
from test_equal_curves import ENGINES as EVERY_ENGINE
from test_exported_model import held_out_loss
from test_pipeline_schedules import ENGINES as SCHEDULES
from test_plain_loop import batches, mean_losses, train
from transformers import AutoModelForCausalLM

from samecurve.cli import commands
from samecurve.models.lora import initial_matrices

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, STOP = 10, 5
LOSS, NORM = 1e-5, 1e-4
VARIANTS = ["dora", "rslora"]
DORA_EXTRA = 4 * (32 + 16 + 16 + 32 + 64 + 64 + 32)  # one magnitude per output
RATE, WARMUP = 1e-2, 2
LORA = "adapter={name: lora, rank: 4, alpha: 16}"
EVERY_DAY = ["single", "fsdp", "zero3", "pipeline"]
ENGINES = {**EVERY_ENGINE, **SCHEDULES, "pipeline_fsdp": "Schedule1F1B", "pp_fsdp_tp": "Schedule1F1B"}
PLAIN = [*EVERY_DAY, "ddp", "zero2"]  # the long tests go from each to each
RARE = ["ddp", "zero2", "zero1", "hsdp", "zero2_offload", "zero3_offload", "fsdp_tp", *CONTEXT, "fsdp_tp_cp"]


@pytest.fixture(scope="module")
def base(reference) -> Path:
    return reference.directory / "model"


def arguments(base: Path, name: str, *more: str) -> tuple[str, ...]:
    # accumulation: 2, but 4 for schedules, which fill their stages
    whole_batch = ("single", "pipeline", "tp", *CONTEXT, "fsdp_tp_cp")  # read by one process, or by several together
    micro = ({"hsdp": 1} | dict.fromkeys(whole_batch, 4)).get(name, 2)
    settings = (
        f"model={{path: {base}}}",
        f"tokenizer={{path: {base}}}",
        f"steps={STEPS}",
        f"batch.micro_batch_size={micro}",
    )
    return (
        *settings,
        "evaluate.every_steps=5",
        f"optimizer.learning_rate={RATE}",
        f"schedule.warmup_steps={WARMUP}",
        LORA,
        *more,
    )


def world(name: str) -> int:
    return {"single": 1, "hsdp": 4, "fsdp_tp": 4, "fsdp_tp_cp": 4, "pipeline_fsdp": 4, "pp_fsdp_tp": 8}.get(name, 2)


def run_lora(workspace, base: Path, name: str, *more: str, extra: int = 0) -> Run:
    strategy = None if name == "single" else name
    run = workspace.run(strategy, world(name), *arguments(base, name, *more))
    assert run.returncode == 0, run.output
    assert_what_ran(run, name, extra)
    return run


def assert_what_ran(run: Run, name: str, extra: int = 0) -> None:
    facts = run.facts
    assert (facts["strategy"], facts["engine"], facts["world_size"]) == (name, ENGINES[name], world(name))
    # rank 4 on q, k, v, o (32 and 16 wide), gate, up and down (32 and 64 wide) of 4 layers
    assert facts["num_trained_parameters"] == 4 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96) + extra
    assert facts["num_parameters"] > 3 * facts["num_trained_parameters"]


@pytest.fixture(scope="module")
def plain(workspace, base):
    return plain_loop(workspace, base)


@functools.cache
def plain_loop(workspace, base: Path, **variant: bool):
    """(losses, gradient norms, adapter) of a loop that a reader of peft's documentation would write."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", **variant))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = dict(
        initial_matrices({name.removeprefix("base_model.model."): p.shape for name, p in trained.items()}, seed=3)
    )
    with torch.no_grad():  # the same draw; that it is of peft's distribution is a unit test's business
        for name, parameter in trained.items():
            if "lora_magnitude_vector" not in name:
                parameter.copy_(ours[name.removeprefix("base_model.model.")])
    losses, norms = train(model, mean_losses(model, batches(workspace, base)), STEPS, RATE, WARMUP)
    weights = {key: value.detach() for key, value in get_peft_model_state_dict(model).items()}
    return losses, norms, weights


@pytest.mark.parametrize("name", [*EVERY_DAY, *long("tp", *RARE, *SCHEDULES, "pipeline_fsdp", "pp_fsdp_tp")])
def test_follows_the_plain_loop(name, workspace, base, plain):
    assert_follows(run_lora(workspace, base, name), plain)


def assert_follows(run: Run, plain: tuple) -> None:
    losses, norms, weights = plain
    assert largest_relative_difference(run.column("loss"), losses) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), norms) < NORM
    stored = load_file(run.directory / "model" / "adapter_model.safetensors")
    assert stored.keys() == weights.keys()
    learned = [name for name in stored if ".lora_B." in name]  # they start at zero, so all of them is learned
    assert relative_l2(*({name: each[name] for name in learned} for each in (stored, weights))) < 1e-3
    assert relative_l2(stored, weights) < 1e-4


@pytest.mark.full
def test_sequences_that_are_cut(workspace, base, plain):
    """With dropout: of whole tokens in front of a layer whose columns are cut, of features where its rows are."""
    # one gradient of these masks is 2.7e-10, of which Adam would make a step of 0.2 learning rates by rounding alone
    settings = ("adapter.dropout=0.1", "optimizer.epsilon=1.0e-06")
    run = workspace.run(workspace.sequence_parallel("tp"), 2, *arguments(base, "tp", *settings))
    assert run.facts["tp_sequence_parallel"]
    alone = run_lora(workspace, base, "single", *settings)
    assert largest_relative_difference(run.column("loss"), alone.column("loss")) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), alone.column("grad_norm")) < NORM
    assert largest_relative_difference(run.column("loss"), plain[0]) > LOSS


@pytest.mark.parametrize(
    ("name", "variant"),
    long(
        *product(["single", "ddp", "fsdp", "zero2", "zero2_offload", "pipeline", *CONTEXT, *SCHEDULES], VARIANTS),
        *product(["pipeline_fsdp"], VARIANTS),
        *(("tp", "rslora"), ("fsdp_tp", "rslora"), ("pp_fsdp_tp", "rslora")),  # DoRA needs whole rows
    ),
)
def test_variants_follow_the_plain_loop(name, variant, workspace, base):
    run = run_lora(workspace, base, name, f"adapter.{variant}=true", extra=DORA_EXTRA if variant == "dora" else 0)
    assert_follows(run, plain_loop(workspace, base, **{f"use_{variant}": True}))


@pytest.mark.parametrize("variant", long("dora", "lora", "rslora"))
def test_matrices_that_zero3_shards(variant, workspace, base):
    """Those of this model are so small that DeepSpeed would keep them whole on every rank."""
    changes, options = ((), {}) if variant == "lora" else ((f"adapter.{variant}=true",), {f"use_{variant}": True})
    threshold = {"stage": 3, "stage3_param_persistence_threshold": 0}
    strategy = workspace.strategy("zero3", zero_optimization=threshold)
    run = workspace.run(strategy, 2, *arguments(base, "zero3", *changes))
    assert run.returncode == 0, run.output
    assert_what_ran(run, "zero3", DORA_EXTRA if variant == "dora" else 0)
    assert run.facts["num_parameters_per_rank"] < 0.51 * run.facts["num_parameters"]
    assert_follows(run, plain_loop(workspace, base, **options))


@pytest.mark.parametrize("name", ["pipeline", *long("single", "ddp", "fsdp", "zero1", "zero2", "zero3")])
def test_bf16_and_recomputed_activations_stay_near(name, workspace, base, plain):
    losses, norms, _ = plain
    run = run_lora(workspace, base, name, "precision=bf16", "memory.activation_checkpointing=full")
    assert run.facts["precision"] == "bf16"
    assert largest_relative_difference(run.column("loss"), losses) < 5e-3
    # the base is trained, so gradients are small sums of large terms, and rounding is a larger part of them
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-1


def going_on(workspace, source: Run, base: Path, name: str, *more: str) -> Run:
    strategy = None if name == "single" else name
    run = workspace.resume(source, STOP, strategy, world(name), *arguments(base, name, *more))
    assert run.returncode == 0, run.output
    assert_what_ran(run, name)
    assert run.column("step") == list(range(1, STEPS + 1))
    return run


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("zero3", 0), *long(*((name, 0) for name in ("pipeline", *SCHEDULES)))]
    + long(*product((*EVERY_DAY, "tp", *RARE), (0.1,))),
)
def test_the_same_strategy_goes_on_bit_for_bit(name, dropout, workspace, base):
    more = (f"adapter.dropout={dropout}",) if dropout else ()
    golden = run_lora(workspace, base, name, *more)
    run = going_on(workspace, golden, base, name, *more)
    for key in ("loss", "grad_norm"):
        assert run.column(key) == golden.column(key), key
    assert rank_hashes(run.checkpoint(STEPS)) == rank_hashes(golden.checkpoint(STEPS))


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ("fsdp", "zero3"),
        *long(("pipeline", "fsdp"), ("zero3", "single"), ("zero3", "tp"), ("tp", "fsdp"), ("fsdp_tp", "tp")),
        *long(("zero3", "pipeline_1f1b"), ("pipeline_interleaved", "fsdp"), ("pipeline_1f1b", "pipeline_zbv")),
        *long(*((origin, name) for origin in (*PLAIN, "zero2_offload") for name in PLAIN if origin != name)),
    ],
)
def test_another_strategy_goes_on_on_the_same_curve(origin, name, workspace, base):
    golden = run_lora(workspace, base, origin)
    run = going_on(workspace, golden, base, name)
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), golden.column("grad_norm")) < NORM
    assert f"strategy: {origin} -> {name}" in run.output


@pytest.mark.parametrize("name", [*EVERY_DAY, *long("ddp", "zero2")])
def test_a_checkpoint_holds_the_adapter_alone(name, workspace, base):
    run = run_lora(workspace, base, name)
    folder = run.checkpoint(STEPS)
    names, numels = set(), 0
    for path in folder.glob("rank_*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if not key.startswith("rng/")]
            names |= set(keys)
            numels += sum(file.get_slice(key).get_shape()[0] for key in keys)
    assert len(names) == 3 * 2 * 7 * 4  # weight and two moments of A and B of seven matrices of four layers
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert numels == 3 * run.facts["num_trained_parameters"]
    generators = 50_000  # bytes per rank at most
    size = sum(path.stat().st_size for path in folder.glob("rank_*"))
    assert size < 4 * numels + run.facts["world_size"] * generators + 200 * len(names) * run.facts["world_size"]


@pytest.mark.parametrize("name", ["fsdp", "zero3", "pipeline", *long("single", "ddp", "zero2")])
def test_the_export_is_pefts_and_merges(name, workspace, base, capsys, tmp_path):
    run = run_lora(workspace, base, name)
    folder = run.directory / "model"
    files = {path.name for path in folder.iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not files & {"model.safetensors", "config.json"}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    loss, tokens = held_out_loss(workspace, model)
    assert (tokens, loss) == (run.metrics[-1]["eval_tokens"], pytest.approx(run.metrics[-1]["eval_loss"], rel=1e-6))

    assert commands.main(["merge", str(run.directory), "--output", str(tmp_path / "merged")]) == 0
    assert "differ" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert held_out_loss(workspace, merged)[0] == pytest.approx(loss, rel=1e-6)
    assert commands.main(["generate", str(folder), "--prompt", "abc", "--max_new_tokens", "4"]) == 0


def test_another_base_under_the_same_name_is_refused(workspace, base, tmp_path):
    source = run_lora(workspace, base, "single")
    other = shutil.copytree(base, tmp_path / "other", ignore=shutil.ignore_patterns("SHA256SUMS"))
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    run = workspace.resume(source, STOP, None, 1, *arguments(other, "single"))
    assert run.returncode == 4 and "the weights of" in run.output, run.output
