"""Pipelines by PyTorch's schedules, on packed documents of uneven length, against one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import yaml
from harness import LLAMA, Run, largest_relative_difference, long, relative_l2
from schedule_traces import replayed_idle, traced

from samecurve.strategy.timetables import idle_slots

LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4
SETTINGS = ("steps=6", "checkpoint.every_steps=0", "data.packing=true")
WEIGHTS_FILE = "model/model.safetensors"
PROFILE = ("profile.steps=[3,5]", "profile.ranks=[0,1]")
ENGINES = {
    "pipeline_1f1b": "Schedule1F1B",
    "pipeline_gpipe": "ScheduleGPipe",
    "pipeline_interleaved": "ScheduleInterleaved1F1B",
    "pipeline_zbv": "ScheduleZBVZeroBubble",
    "pipeline_dualpipev": "ScheduleDualPipeV",
}


def short_run(workspace, strategy: str | Path | None, world: int, *overrides: str) -> Run:
    run = workspace.run(strategy, world, *SETTINGS, *overrides)
    assert run.returncode == 0, run.output
    return run


UNTIED_OR_TIED = {tied: f"model.config={json.dumps({**LLAMA, 'tie_word_embeddings': tied})}" for tied in (True, False)}


@pytest.fixture(scope="module")
def one_process_tree(workspace) -> tuple[Run, dict]:
    """One process, and every schedule but that of the run below, one after the other in the same two processes."""
    shape = UNTIED_OR_TIED[True]
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", shape)
    files = [workspace.strategy(name) for name in ENGINES if name != "pipeline_1f1b"]
    overrides = *SETTINGS, "batch.micro_batch_size=2", shape
    environment = {"STRATEGIES": ",".join(map(str, files)), "REFERENCE": str(expected.directory / WEIGHTS_FILE)}
    return expected, workspace.probe("schedules_probe.py", files[0], 2, *overrides, **environment)


@pytest.mark.parametrize("strategy", [name for name in ENGINES if name != "pipeline_1f1b"])
def test_every_schedule_follows_one_process_every_day(strategy, one_process_tree):
    expected, found = one_process_tree[0], one_process_tree[1][strategy]
    assert (found["engine"], found["stages"], found["accumulation"]) == (ENGINES[strategy], 2, 4)
    assert largest_relative_difference(found["loss"], expected.column("loss")) < LOSS
    assert largest_relative_difference(found["grad_norm"], expected.column("grad_norm")) < NORM
    assert found["weights"] < WEIGHTS


def cases() -> list:
    every = [(strategy, tied) for strategy in ENGINES for tied in (True, False)]
    return [("pipeline_1f1b", True), *long(*(case for case in every if case != ("pipeline_1f1b", True)))]


@pytest.mark.parametrize(("strategy", "tied"), cases())
def test_schedules_follow_one_process(strategy, tied, workspace):
    """Four micro-batches: gradients that are divided by their number, or tied ones counted twice, are seen."""
    config = UNTIED_OR_TIED[tied]
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", config)
    run = short_run(workspace, strategy, 2, "batch.micro_batch_size=2", config, *PROFILE)
    assert (run.facts["engine"], run.facts["pipeline_stages"]) == (ENGINES[strategy], 2)
    assert (run.facts["gradient_accumulation_steps"], run.facts["loss_implementation"]) == (4, "chunked")
    compare(run, expected)
    check_waiting(run)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("pipeline_fsdp", 4), ("pp_fsdp_tp", 8)])
def test_compiled_layers_of_sharded_stages_follow_one_process(strategy, world, workspace):
    """test_step_options.py compiles those of whole stages."""
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8")
    run = short_run(workspace, strategy, world, "batch.micro_batch_size=1", "compile=regional")
    compare(run, expected)
    assert sum(run.column("recompilations")) > 0


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["pipeline_1f1b", "pipeline_zbv", "pipeline_fsdp"])
def test_whole_logits_follow_one_process(strategy, workspace):
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8")
    world = 4 if strategy == "pipeline_fsdp" else 2
    run = short_run(
        workspace, strategy, world, f"batch.micro_batch_size={4 // (world // 2)}", "loss.implementation=full"
    )
    assert run.facts["loss_implementation"] == "full"
    compare(run, expected)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "tied"), [*product(ENGINES, (True, False))])
def test_four_ranks_follow_one_process(strategy, tied, workspace):
    """Two ranks have neither the embedding nor the head, or all have two of eight stages. Eight micro-batches."""
    config = f"model.config={json.dumps({**LLAMA, 'num_hidden_layers': 8, 'tie_word_embeddings': tied})}"
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", config)
    run = short_run(workspace, workspace.parallel(strategy, pp_size=4), 4, "batch.micro_batch_size=1", config)
    facts = run.facts
    assert (facts["engine"], facts["pipeline_stages"], facts["data_parallel_size"]) == (ENGINES[strategy], 4, 1)
    assert facts["gradient_accumulation_steps"] == 8
    # with the embedding, and with the last norm and the head
    one_each = strategy not in ("pipeline_1f1b", "pipeline_gpipe")
    assert facts["layers_per_stage"] == ([2, 1, 1, 1, 1, 1, 1, 3] if one_each else [3, 2, 2, 4])
    compare(run, expected)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("pipeline_1f1b", "full"),
        *long(*((name, "full") for name in ENGINES if name != "pipeline_1f1b")),
        *long(*product(("pipeline_1f1b", "pipeline_gpipe", "pipeline_interleaved"), ("selective", "every_n_layers"))),
        *long(("pipeline_fsdp", "full"), ("pp_fsdp_tp", "full")),
    ],
)
def test_recomputed_layers_follow_one_process(strategy, kind, workspace):
    """Zero-bubble schedules pass backward twice over each layer."""
    world = {"pipeline_fsdp": 4, "pp_fsdp_tp": 8}.get(strategy, 2)
    recompute = f"memory.activation_checkpointing={kind}"
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8")
    run = short_run(workspace, strategy, world, f"batch.micro_batch_size={2 if world == 2 else 1}", recompute)
    assert run.facts["engine"] == ENGINES.get(strategy, "Schedule1F1B")
    compare(run, expected)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["pipeline_1f1b", "pipeline_interleaved"])
def test_attention_without_a_mask_follows_one_process(strategy, workspace):
    """Each stage makes its own tables of documents."""
    varlen = "model.attention=varlen"
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", varlen)
    run = short_run(workspace, strategy, 2, "batch.micro_batch_size=2", varlen)
    assert (run.facts["engine"], run.facts["attention"]) == (ENGINES[strategy], "varlen")
    compare(run, expected)


def sharded_stages(workspace, name: str) -> Path:
    """The strategy file `name` with FSDP2 inside of its stages."""
    path = workspace.folder / "sharded_stages" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    content = yaml.safe_load(workspace.strategy(name).read_text())
    shards = yaml.safe_load(workspace.strategy("pipeline_fsdp").read_text())
    path.write_text(yaml.safe_dump(shards | {"parallelism_config": content["parallelism_config"]}))
    return path


def compare(run: Run, expected: Run) -> None:
    assert run.column("tokens") == expected.column("tokens")
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < NORM
    assert relative_l2(run.weights, expected.weights) < WEIGHTS
    found, reference = run.metrics[-1], expected.metrics[-1]
    assert abs(found["eval_loss"] / reference["eval_loss"] - 1) < LOSS


def check_waiting(run: Run) -> None:
    """Both ranks say how long they waited; they did the schedule's work, each part once, and nothing else."""
    profile = run.directory / "profile"
    for rank, name in enumerate(("summary", "summary_rank1")):
        found = json.loads((profile / f"{name}.json").read_text())["waiting"]
        assert (found["rank"], found["ranks"]) == (rank, 2)
        assert found["passes"] == found["planned_passes"]
        stages = 2 if run.facts["strategy"] in ("pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev") else 1
        assert found["passes"]["F"] == 3 * 4 * stages  # steps, micro-batches
        assert 0 < found["busy_seconds"] < found["seconds"]
        assert found["idle"] == pytest.approx(1 - found["busy_seconds"] / found["seconds"])
        idle = idle_slots(run.facts["engine"].removeprefix("Schedule"), 2, 4, stages)
        predicted = idle / (4 + idle)  # of four micro-batches
        assert found["predicted_idle"] == pytest.approx(predicted)
        assert f"{found['idle']:.1%}" in (profile / f"{name}.txt").read_text()
    assert replayed_idle(traced(run)) == pytest.approx([predicted] * 2)


@pytest.mark.full
def test_better_schedules_wait_less(workspace):
    """By what the ranks did, in the order of their traces."""
    idle = {}
    for strategy in ENGINES:
        run = short_run(workspace, strategy, 2, "batch.micro_batch_size=2", UNTIED_OR_TIED[True], *PROFILE)
        idle[strategy] = replayed_idle(traced(run))[0]
    assert sorted(ENGINES, key=lambda each: (idle[each], each)) == [
        "pipeline_zbv",
        "pipeline_dualpipev",
        "pipeline_interleaved",
        "pipeline_1f1b",
        "pipeline_gpipe",
    ]
    assert idle["pipeline_1f1b"] == idle["pipeline_gpipe"] == pytest.approx(1 / 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "tied"),
    [*product([*ENGINES, "pipeline_fsdp"], (True, False)), ("pipeline_zbv of shards", False)],
)
def test_pipelines_that_read_different_rows_follow_one_process(strategy, tied, workspace):
    """Two pipelines of two ranks: replicas, or shards of the stages. Checkpoints and evaluation go through both."""
    name, _, sharded = strategy.partition(" of ")
    file = sharded_stages(workspace, name) if sharded else name
    config = UNTIED_OR_TIED[tied]
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", config)
    run = short_run(workspace, file, 4, "batch.micro_batch_size=1", config)
    engine = ENGINES.get(name, "Schedule1F1B")
    assert (run.facts["engine"], run.facts["pipeline_stages"], run.facts["data_parallel_size"]) == (engine, 2, 2)
    assert run.facts["gradient_accumulation_steps"] == 4
    assert run.facts["sharded"] == (bool(sharded) or name == "pipeline_fsdp")
    if run.facts["sharded"]:  # of its stages, with a tied embedding on both ends
        assert run.facts["num_parameters_per_rank"] < 0.35 * run.facts["num_parameters"]
    compare(run, expected)


# untied and tied weights; qwen3 has norms of each head, whose gradient is a sum over the ranks of a stage
CUT = {
    "llama": {"tie_word_embeddings": True},
    "llama untied": {"tie_word_embeddings": False},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}


def cut_stages(workspace, schedule: str) -> Path:
    """A strategy file with two stages, each cut over two ranks, without FSDP."""
    path = workspace.folder / "cut_stages" / schedule / "pp_tp.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_load(workspace.strategy("pp_fsdp_tp").read_text())
    content["parallelism_config"]["parallelism_config_pp_schedule"] = schedule
    del content["fsdp_config"]
    path.write_text(yaml.safe_dump(content | {"distributed_type": "MULTI_GPU", "num_processes": 4}))
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        *product(["1F1B", "GPipe", "Interleaved1F1B"], ["llama", "llama untied"]),
        *(("1F1B", model) for model in ("mistral", "qwen2", "qwen3")),
        *(("pp_fsdp_tp", model) for model in ("llama", "llama untied", "qwen3")),
    ],
)
def test_stages_that_are_cut_follow_one_process(strategy, model, workspace):
    """Two stages of two ranks, or of two shards of two, on four micro-batches of packed rows."""
    shards = 2 if strategy == "pp_fsdp_tp" else 1
    config = f"model.config={json.dumps({**LLAMA, **CUT[model]})}"
    expected = short_run(workspace, None, 1, "batch.micro_batch_size=8", config)
    file = strategy if shards > 1 else cut_stages(workspace, strategy)
    run = short_run(workspace, file, 4 * shards, f"batch.micro_batch_size={2 // shards}", config)
    facts = run.facts
    assert facts["engine"] == ("Schedule1F1B" if shards > 1 else f"Schedule{strategy}")
    assert (facts["pipeline_stages"], facts["tensor_parallel_size"], facts["data_parallel_size"]) == (2, 2, shards)
    assert (facts["gradient_accumulation_steps"], facts["loss_implementation"]) == (4, "chunked")
    assert facts["sharded"] == (shards > 1)
    # of a stage with the embedding, more than half of the weights
    assert facts["num_parameters_per_rank"] < 0.7 / (2 * shards) * facts["num_parameters"]
    compare(run, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "overrides", "words"),
    [
        ("pipeline_zbv", (), ("pipeline_zbv.yaml", "4 stages", "2 layers", "GPipe, 1F1B")),
    ],
)
def test_models_that_cannot_be_cut_are_refused(strategy, overrides, words, workspace):
    changes = {"num_hidden_layers": 2} | dict.fromkeys(overrides, 0.1)
    config = f"model.config={json.dumps(LLAMA | changes)}"
    run = workspace.run(strategy, 2, *SETTINGS, "batch.micro_batch_size=2", config)
    assert run.returncode != 0 and "ConfigurationError" in run.output
    for word in words:
        assert word in run.output


@pytest.mark.full
def test_a_tied_embedding_in_two_sharded_stages_of_one_rank_is_refused(workspace):
    run = workspace.run(sharded_stages(workspace, "pipeline_zbv"), 4, *SETTINGS, "batch.micro_batch_size=1")
    assert run.returncode != 0 and "ConfigurationError" in run.output
    for word in ("FSDP2 cannot share the tied embedding", "tie_word_embeddings to false", "without a V"):
        assert word in run.output
