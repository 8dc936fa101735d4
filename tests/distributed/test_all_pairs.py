"""Every strategy on every number of processes goes on from the checkpoints of all of them, uneven shards included.

Under each, train.py runs once and keeps its checkpoint after 5 steps; then one start under each loads them all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Run, append_result, largest_relative_difference, launch_command
from test_equal_curves import CONTEXT, ENGINES, SCHEDULES, Case, libaio_is_installed, one_stage

STOP = 5
AFTER = 5  # steps of each pair; test_resume.py trains some of them to the end
LOSS, NORM = 1e-5, 1e-4
WORLDS = {"single": [1], "hsdp": [4], "tp": [2], "fsdp_tp": [2, 4], "pipeline": [1, 2, 4]}
WORLDS |= dict.fromkeys(CONTEXT, [2, 4]) | dict.fromkeys(SCHEDULES, [2])
WORLDS |= {"pipeline_1f1b": [2, 4], "pipeline_fsdp": [4], "zero3_hpz": [4], "pp_fsdp_tp": [8], "fsdp_tp_cp": [4, 8]}
# 3 processes divide neither the rows of a weight (FSDP) nor its number of values (ZeRO-3)
UNEVEN = ("ddp", "fsdp", "zero1", "zero3")
CASES = [
    Case(name, world, 1)
    for name in ENGINES
    for world in WORLDS.get(name, [1, 2, 3, 4] if name in UNEVEN else [1, 2, 4])
]
NO_LORA = ("pipeline", "zero3_nvme", "tp", "fsdp_tp", "fsdp_tp_cp", *SCHEDULES)
LORA_CASES = [Case(name, WORLDS.get(name, [2])[-1], 1) for name in ENGINES if name not in NO_LORA]
LORA_CASES += [Case("pipeline", 2, 1), Case("fsdp", 3, 1), Case("zero3", 3, 1)]
GLOBAL_BATCH = 12


def name_of(case: Case) -> str:
    return f"{case.strategy}-{case.world}"


def arguments(case: Case, workspace, lora: bool) -> tuple[Path | None, list[str]]:
    micro_batch = GLOBAL_BATCH // case.readers // case.stages
    micro_batch //= 2 if case.strategy == "pipeline_dualpipev" else 1
    more = [f"batch.global_batch_size={GLOBAL_BATCH}", f"batch.micro_batch_size={micro_batch}"]
    more += workspace.lora if lora else ()
    if case.strategy == "single":
        return None, more
    alone = case.strategy == "pipeline" and case.world == 1
    return one_stage(workspace) if alone else workspace.strategy(case.strategy), more


def finished(case: Case, workspace, lora: bool) -> Run:
    strategy, more = arguments(case, workspace, lora)
    run = workspace.run(strategy, case.world, *more)
    assert run.returncode == 0, run.output
    assert (run.facts["engine"], run.facts["world_size"]) == (ENGINES[case.strategy], case.world)
    assert (run.facts["num_trained_parameters"] < run.facts["num_parameters"]) == lora
    return run


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_goes_on_from_all_of_them(case, workspace, tmp_path):
    goes_on_from_all(CASES, case, workspace, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", LORA_CASES, ids=name_of)
def test_adapters_go_on_from_all_of_them(case, workspace, tmp_path):
    goes_on_from_all(LORA_CASES, case, workspace, tmp_path, lora=True)


def goes_on_from_all(cases: list[Case], case: Case, workspace, tmp_path, lora: bool = False) -> None:
    cases = [each for each in cases if each.strategy != "zero3_nvme" or libaio_is_installed()]
    if case not in cases:
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    golden = finished(Case("single", 1, 1), workspace, lora)
    wanted, results = tmp_path / "wanted.json", tmp_path / "results.jsonl"
    sources = {name_of(each): str(finished(each, workspace, lora).checkpoint(STOP)) for each in cases}
    wanted.write_text(json.dumps({"sources": sources, "steps": AFTER, "results": str(results)}))

    strategy, more = arguments(case, workspace, lora)
    script = __file__.replace("test_all_pairs.py", "pairs_probe.py")
    command = launch_command("fork", strategy, case.world, tmp_path, script)
    command += [str(wanted), str(workspace.recipe), f"output_dir={tmp_path / 'run'}", *more]
    run = workspace.execute(command + (["--strategy", str(strategy)] if strategy else []), tmp_path / "run")
    assert run.returncode == 0, run.output

    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["source"] for line in lines] == [*sources]
    losses, norms = (golden.column(name)[STOP : STOP + AFTER] for name in ("loss", "grad_norm"))
    found = {
        "kind": "pair",
        "strategy": case.strategy + (" LoRA" if lora else ""),
        "world": case.world,
        "sources": len(lines),
        "unequal": sum(bool(line["unequal"]) for line in lines),
        "loss": max(largest_relative_difference(line["losses"], losses) for line in lines),
        "norm": max(largest_relative_difference(line["norms"], norms) for line in lines),
    }
    append_result(found)
    assert {(line["engine"], line["world_size"], line["start_step"]) for line in lines} == {
        (ENGINES[case.strategy], case.world, STOP)
    }
    assert not found["unequal"], {line["source"]: line["unequal"] for line in lines if line["unequal"]}
    assert found["loss"] < LOSS and found["norm"] < NORM, found
