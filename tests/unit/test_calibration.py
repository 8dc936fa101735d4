"""Predicted beside measured: what a run says about itself, and what `plan --calibrate` learns from runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from samecurve.cli.commands import main
from samecurve.metrics.console import announced, compare_with_prediction, of_session
from samecurve.planner import calibrate, calibration, forecast, inputs, links, step_time, strategies
from samecurve.planner.answers import answer, predict
from samecurve.planner.calibrate import FinishedRun
from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import built_in
from samecurve.planner.hardware import gpu, profile
from samecurve.planner.job import from_json, to_json
from samecurve.planner.links import DEFAULT_NODE_GBIT
from samecurve.planner.strategies import read
from samecurve.strategy.plan import Plan
from samecurve.training import settle

pytestmark = pytest.mark.usefixtures("planner_cache")
RECIPE = "recipes/quickstart.yaml"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "zero3")
# A machine unlike the assumed one: factors of its parts, and resident memory beside the tensors.
TRUE = {"compute": 2.2, "communication": 3.0, "host": 1.6}
PROCESS = {"torch": 0.62, "deepspeed": 0.66}
SLOW = {"torch": 1.0, "deepspeed": 1.25}


GOALS = ((0, 0.15), (1, 0.05))  # of step time, of memory


def job_of(strategy: str, cluster: str = "cpux2", overrides: tuple[str, ...] = ()):
    wanted = inputs.read(RECIPE, ["precision=fp32", *overrides])
    described, problems = strategies.describe(wanted, read(f"configs/{strategy}.yaml"), {}, 2)
    assert not problems
    return strategies.job(wanted, described, built_in(cluster))


def recorded(folder: Path, strategy: str, cluster: str = "cpux2", factor: float = 1.0, **facts) -> Path:
    """A finished run on the machine above; its first step, which compiles and connects, is slow."""
    job = job_of(strategy, cluster)
    library = job.library
    machine = Calibration("cpu", time=TRUE, stack_time=SLOW, process_gib=PROCESS if cluster == "cpux2" else {})
    true = replace(job, calibration=machine)
    seconds, gib = factor * step_time.breakdown(true).total, calibrate.shown_gib(true)
    path = folder / f"{strategy}-{library}"
    path.mkdir()
    steps = [{"step": n, "step_seconds": seconds * (50 if n == 1 else 1), "peak_memory_gib": gib} for n in range(1, 8)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps))
    known = {"strategy": strategy, "device": "cpu", "start_step": 0, "versions": {"torch": "2.13.0"}}
    known |= {"predicted": {"job": to_json(job)}, "hardware": {"processor": "some processor"}}
    (path / "run.json").write_text(json.dumps(known | facts))
    return path


def test_a_job_is_read_again_as_it_was():
    job = job_of("zero3")
    again = from_json(json.loads(json.dumps(to_json(job))))
    assert to_json(again) == to_json(job) and replace(again, strategy=job.strategy) == job


def test_two_runs_teach_the_other_strategies(tmp_path):
    """The arithmetic: on a machine that differs by the factors alone, step times within 15 %, memory within 5 %."""
    runs = {name: calibrate.read_run(recorded(tmp_path, name)) for name in STRATEGIES}
    learnt = calibrate.learn([runs["ddp"], runs["zero2"]])
    true = replace(runs["ddp"].job, calibration=Calibration("cpu", time=TRUE))
    assert runs["ddp"].seconds == pytest.approx(step_time.breakdown(true).total)  # without the slow first step
    before, after = (calibrate.errors([*runs.values()], each) for each in (None, learnt))
    assert max(abs(time) for time, _ in before) > 0.5
    assert max(abs(math.expm1(-time)) for time, _ in after) < 0.15
    assert max(abs(held) for _, held in after) < math.log(1.05) < max(abs(held) for _, held in before)


# Median step in s and peak memory in GiB, in fp32 by two CPU processes (AMD EPYC, 2026-11-26): 40 steps of the
# quickstart, and 14 of a model of 28 million parameters, whose tensors and products count for more.
LARGE = (
    "model.config.hidden_size=512",
    "model.config.intermediate_size=1408",
    "model.config.num_hidden_layers=8",
    "model.config.num_attention_heads=8",
    "model.config.num_key_value_heads=8",
    "model.config.max_position_embeddings=512",
    "tokenizer.vocabulary_size=4096",
    "batch.sequence_length=512",
    "batch.global_batch_size=4",
    "batch.micro_batch_size=2",
)
MEASURED = {
    "ddp": (0.141, 0.566),
    "zero1": (0.155, 0.670),
    "zero2": (0.178, 0.663),
    "fsdp": (0.232, 0.602),
    "zero3": (0.217, 0.700),
    "pipeline": (0.186, 0.613),
    "tp": (0.374, 0.540),
}
MEASURED_LARGE = {
    "ddp": (2.460, 1.560),
    "zero1": (2.833, 1.669),
    "zero2": (2.957, 1.649),
    "fsdp": (2.687, 1.370),
    "zero3": (2.866, 1.955),
    "pipeline": (3.587, 1.415),
    "tp": (2.952, 1.182),
}


@pytest.mark.parametrize(
    ("measured", "overrides", "missed_goals", "worst"),
    [
        (MEASURED, (), [set(), {"fsdp"}], (0.15, 0.093)),
        (MEASURED_LARGE, LARGE, [set(), set()], (0.1, 0.05)),
    ],
    ids=["quickstart", "large"],
)
def test_two_real_runs_teach_most_others(measured, overrides, missed_goals, worst):
    """The goal of 15 % and 5 % is missed by one memory. Learnt are DDP and ZeRO-2."""
    runs = {name: FinishedRun(Path(name), job_of(name, overrides=overrides), *measured[name], {}) for name in measured}
    learnt = calibrate.learn([runs.pop("ddp"), runs.pop("zero2")])
    found = dict(zip(runs, calibrate.errors([*runs.values()], learnt), strict=True))
    missed = [{name for name, each in found.items() if abs(math.expm1(-each[part])) > goal} for part, goal in GOALS]
    assert missed == missed_goals, {
        name: [round(math.expm1(-part), 3) for part in each] for name, each in found.items()
    }
    for part, limit in enumerate(worst):
        assert max(abs(math.expm1(-each[part])) for each in found.values()) < limit


def test_what_is_left_out_is_predicted_from_the_others_alone(tmp_path):
    """A run that is three times slower than the others say has a left-out error of a factor of three."""
    runs = [calibrate.read_run(recorded(tmp_path, name)) for name in ("ddp", "fsdp")]
    odd = calibrate.read_run(recorded(tmp_path, "tp", factor=3.0))
    (left_out, _) = calibrate.errors_left_out([*runs, odd])[-1]
    assert left_out == pytest.approx(math.log(3), abs=0.3)
    assert calibrate.errors_left_out(runs[:1]) == []
    narrow, wide = (calibrate.learn(each).time_interval for each in (runs, [*runs, odd]))
    assert narrow and wide and narrow[1] < wide[1]
    assert calibrate.learn(runs[:1]).time_interval is None


def test_the_command_writes_what_later_plans_read(tmp_path, planner_cache, capsys):
    folders = [str(recorded(tmp_path, name)) for name in ("ddp", "zero2")]
    assert main(["plan", "--calibrate", *folders]) == 0
    shown = capsys.readouterr().out
    assert "left out" in shown and f"written: {planner_cache / 'cpu.json'}" in shown
    out = ["--json", f"{tmp_path}/plan.json"]
    assert main(["plan", RECIPE, "precision=fp32", "--cluster", "cpux2", "--strategy", "configs/fsdp.yaml", *out]) == 0
    shown = capsys.readouterr().out
    answered, _, _, *notes = shown.splitlines()
    assert "calibrated on 2 runs, 20" in answered and "none measured here" not in shown
    assert notes[0].startswith("warning: ") and "measured on some processor, this is " in notes[0]
    planned = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["step_seconds"]
    learnt = calibration.read(planner_cache / "cpu.json")
    assert planned == pytest.approx(predict(replace(job_of("fsdp"), calibration=learnt)).seconds)
    assert main(["plan", RECIPE, "--cluster", "h100x2", "--rows", "1"]) == 0
    assert "none measured here" in capsys.readouterr().out


def test_what_a_plan_learns_follows_the_answer(tmp_path, capsys):
    runs = [str(recorded(tmp_path, name)) for name in ("ddp", "zero2")]
    assert main(["plan", RECIPE, "precision=fp32", "--cluster", "cpux2", "--calibrate", *runs]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "calibrated on 2 runs" in shown[0] and shown[1].endswith("tokens per step")
    assert shown.index("predicted against measured:") < shown.index("learnt:")


def test_what_was_learnt_elsewhere_is_not_applied(tmp_path, planner_cache, capsys):
    """Neither a file of a CPU nor its runs say anything about GPUs, which an earlier calibration of theirs does."""
    out, path = tmp_path / "plan.json", tmp_path / "mine.json"
    path.write_text('{"kind": "cpu", "time": {"compute": 3}}')
    plain = ["plan", RECIPE, "--cluster", "h100x2", "--strategy", "configs/ddp.yaml", "--json", str(out)]

    def planned(*more: str) -> float:
        assert main([*plain, *more]) == 0
        return json.loads(out.read_text())["plans"][0]["step_seconds"]

    before = planned()
    assert "none measured here" in capsys.readouterr().out
    assert planned("--calibrate", str(path)) == before
    shown = capsys.readouterr().out.splitlines()
    assert "none measured here" in shown[0]
    assert shown[3] == f"warning: {path}: measured on cpu, not on H100: its factors are not used"
    assert planned("--calibrate", str(recorded(tmp_path, "ddp"))) == before
    calibration.write(Calibration("H100", time=dict.fromkeys(calibration.GROUPS, 2.0)), planner_cache / "H100.json")
    assert planned("--calibrate", str(path)) == pytest.approx(2 * before)


def test_a_gpu_has_one_name_and_keeps_other_hardware_apart(tmp_path, planner_cache):
    """torch calls it NVIDIA H100 80GB HBM3, a cluster H100-80GB."""
    runs = [calibrate.read_run(recorded(tmp_path, name, "h100x2")) for name in ("ddp", "zero2")]
    named = replace(runs[0], job=replace(runs[0].job, gpu_kind="NVIDIA H100 80GB HBM3"))
    learnt = calibrate.learn([named, runs[1]])
    assert learnt.kind == "H100" and learnt.memory and not learnt.process_gib
    cpu = replace(runs[0], job=job_of("ddp"))
    with pytest.raises(calibrate.ConfigurationError, match="different hardware: H100, cpu"):
        calibrate.learn([named, cpu])


def test_answers_of_a_table_use_what_was_learnt_on_such_gpus(tmp_path):
    from samecurve.planner import answers

    rows = answers.read_runs(Path("benchmarks/planner/runs.csv"))[:40]
    learnt = Calibration("H100", time=dict.fromkeys(calibration.GROUPS, 2.0))
    for row in rows:
        ratio = answer(row, learnt)["step_seconds"] / answer(row)["step_seconds"]
        assert ratio == pytest.approx(2 if "H100" in row["gpu"] else 1), row["gpu"]


BENCH = {"device": "some processor", "threads": 2, "versions": {"torch": "2.13.0"}, "date": "2026-11-24"}
MATMUL = {"benchmark": "matmul", **BENCH, "tflops": {"fp32": {"512": 0.03, "2048": 0.1}, "bf16": {"512": 9.0}}}
# 16 GiB summed by two processes at 2.6 GB/s of bus bandwidth, where 1.3 is assumed: half the seconds.
LONG_CALL = {"name": "all_reduce", "num_bytes": 2**34, "seconds": 2**34 / 2.6e9, "bus_gb_per_second": 2.6}
SMALL = [{**LONG_CALL, "num_bytes": size, "seconds": 9.0} for size in (4, 4096)]
GATHERED = {**LONG_CALL, "name": "broadcast", "seconds": 9.0}


def collectives_of(*timings: dict) -> dict:
    return {"benchmark": "collectives", **BENCH, "processes": 2, "machines": 1, "timings": [*timings, GATHERED]}


def bench(folder: Path, content: dict) -> Path:
    path = folder / f"{content['benchmark']}.json"
    path.write_text(json.dumps(content))
    return path


def test_bench_replaces_the_assumed_rates(tmp_path, planner_cache, capsys):
    """A core multiplies 0.1 / 2 TFLOP/s where 0.1 are assumed; the links are about twice as fast."""
    paths = [
        bench(tmp_path, MATMUL),
        bench(tmp_path, collectives_of(*SMALL, LONG_CALL, {**LONG_CALL, "num_bytes": 2**34 + 1})),
    ]
    assert main(["plan", "--calibrate", *map(str, paths)]) == 0
    shown = capsys.readouterr().out
    assert "fp32 products 0.05 TFLOP/s, assumed 0.1" in shown and "bus bandwidth up to 2.6 GB/s over the host" in shown
    learnt = calibration.read(planner_cache / "cpu.json")
    assert learnt and learnt.time["compute"] == pytest.approx(2)
    assert learnt.time["communication"] == pytest.approx(0.5, rel=0.05)
    assert "calibrated on 2 results of bench, 20" in learnt.describe()
    faster, slower = (step_time.breakdown(replace(job_of("ddp"), calibration=each)) for each in (None, learnt))
    assert slower.compute == pytest.approx(2 * faster.compute) and slower.host == faster.host


def test_links_as_the_planner_has_them_teach_nothing_new(tmp_path, planner_cache, capsys):
    """Between processes of a host an all-gather takes as long as an all-reduce of the same tensor."""
    over = links.link(links.levels_of(gpu("cpu"), 2, DEFAULT_NODE_GBIT), 2, 2, 1, 1.0, 0.0)
    seconds = links.collective_seconds(links.all_reduce_volume(2**34, 2), 2, over)
    names = ("all_reduce", "all_gather", "reduce_scatter")
    timings = [{**LONG_CALL, "name": name, "num_bytes": 2**34, "seconds": seconds} for name in names]
    assert main(["plan", "--calibrate", str(bench(tmp_path, collectives_of(*timings)))]) == 0
    learnt = calibration.read(planner_cache / "cpu.json")
    assert learnt and learnt.time["communication"] == pytest.approx(1.0)


def test_a_network_as_a_plan_has_it_teaches_nothing_new(tmp_path, planner_cache):
    """Of a kind of GPU over several machines: with the same nominal rate, and the same share of it."""
    machines, constants = built_in("h100x8").scaled(16), profile("fsdp2")
    step = constants.ring_step_us * 1e-6
    over = links.link(machines.levels, 8, 16, 1, constants.network_share, step)
    seconds = links.collective_seconds(links.all_reduce_volume(2**34, 16), 16, over)
    content = collectives_of({**LONG_CALL, "num_bytes": 2**34, "seconds": seconds})
    content |= {"device_type": "cuda", "device": "NVIDIA H100 80GB HBM3", "processes": 16, "machines": 2}
    result = calibrate.read_bench(bench(tmp_path, content))
    assert result and result.learnt.time["communication"] == pytest.approx(1.0)


def test_bench_helps_a_run_to_tell_the_parts_of_a_step_apart(tmp_path):
    """One run alone cannot say whether computation or communication is slow; bench has measured both."""
    run, other = (calibrate.read_run(recorded(tmp_path, name)) for name in ("ddp", "fsdp"))
    link = LONG_CALL["seconds"] * 2 * TRUE["communication"]
    rates = {"fp32": {"2048": 2 * 0.1 / TRUE["compute"]}}
    paths = [
        bench(tmp_path, {**MATMUL, "tflops": rates}),
        bench(tmp_path, collectives_of({**LONG_CALL, "seconds": link})),
    ]
    benches = [calibrate.read_bench(path) for path in paths]
    alone, helped = calibrate.learn([run]), calibrate.learn([run], benches)
    errors = [abs(calibrate.errors([other], each)[0][0]) for each in (alone, helped)]
    assert errors[1] < 0.05 and errors[1] < errors[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"benchmark": "dataloader", **BENCH}, "planner uses; give results of bench matmul, collectives or memory"),
        (collectives_of(*SMALL[:0]), "not what bench writes"),
        (
            {**MATMUL, "device": "NVIDIA H100 PCIe", "device_type": "cuda", "tflops": {"bf16": {"2048": 500}}},
            "H100-PCIe, cpu",
        ),
    ],
)
def test_results_of_bench_that_teach_nothing_say_why(content, message, tmp_path, capsys):
    paths = [bench(tmp_path, content), recorded(tmp_path, "ddp")]
    assert main(["plan", "--calibrate", *map(str, paths)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predicted": {"reason": "adapter.name: found lora"}}, "no prediction to learn from: adapter.name"),
        ({"start_step": 4}, "3 steps since the last start; 4 are needed"),
        ({"predicted": {"job": {"shape": {}}}}, "run.json is of another version"),
    ],
)
def test_a_run_that_teaches_nothing_says_why(change, message, tmp_path, capsys):
    assert main(["plan", "--calibrate", str(recorded(tmp_path, "ddp", **change))]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_and_a_damaged_file(tmp_path, planner_cache, capsys):
    assert main(["plan", "--calibrate", str(tmp_path / "none")]) == 2
    assert "none: no such file or folder; give the output_dir of a run" in capsys.readouterr().err
    assert main(["plan", "--calibrate", str(tmp_path)]) == 2
    assert "no run here (run.json)" in capsys.readouterr().err
    planner_cache.mkdir(parents=True)
    (planner_cache / "cpu.json").write_text('{"kind": "cpu", "time": {"compute": -1}}')
    assert main(["plan", RECIPE, "--cluster", "cpux2"]) == 2
    shown = capsys.readouterr().err
    assert (
        "cpu.json: time.compute: found -1, expected a factor from 1e-09 to 1e+09; correct or remove the file" in shown
    )


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("time_interval", 3, "time_interval: found 3"),
        ("memory_interval", [0.1, "x"], 'memory_interval[1]: found "x"'),
        ("memory_interval", [0.1, 0.2], "memory_interval: found [0.1, 0.2]"),
        ("process_gib", {"torch": "x"}, 'process_gib.torch: found "x"'),
        ("time", {"computing": 2}, "time.computing: found 2"),
        ("stack_time", 3, "stack_time: found 3"),
        ("memory", {"torch": True}, "memory.torch: found true"),
        ("origin", {"runs": 3}, "origin.runs: found 3"),
        ("kind", 3, "kind: found 3"),
        ("kind", "", "kind: missing"),
        ("colour", 1, "colour: found 1"),
    ],
)
def test_a_damaged_value_is_named(key, value, found, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"kind": "cpu", key: value}))
    assert main(["plan", RECIPE, "--cluster", "cpux2", "--calibrate", str(path)]) == 2
    shown = capsys.readouterr().err
    assert f"{path}: " in shown and f"{found}, expected " in shown


@pytest.mark.parametrize("text", ["3", "[1]", "{", "\xff"])
def test_a_file_that_is_no_calibration(text, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["plan", "--calibrate", str(path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"{path}: ") and "; it is no calibration that this version reads; " in shown


def test_what_is_wrong_beside_a_calibration_file_is_named(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text('{"kind": "cpu"}')
    nothing = tmp_path / "nothing"
    assert main(["plan", "--calibrate", str(path), str(nothing)]) == 2
    assert f"--calibrate {nothing}: no such file or folder" in capsys.readouterr().err
    assert main(["plan", "--calibrate", str(path), str(recorded(tmp_path, "ddp"))]) == 2
    assert f"--calibrate {path}: a calibration file cannot be combined" in capsys.readouterr().err


PREDICTED = {
    "step_seconds": 0.4,
    "step_seconds_interval": [0.3, 0.6],
    "peak_memory_gib": 2.0,
    "peak_memory_gib_interval": [1.8, 2.2],
    "basis": "constants fitted",
}


def test_texts_beside_each_other():
    records = [{"step": n, "step_seconds": s, "peak_memory_gib": 2.5} for n, s in ((3, 9.0), (4, 0.5), (5, 0.5))]
    assert compare_with_prediction(PREDICTED, records) == {
        "step": "0.5 s; predicted 0.4 s (0.3 to 0.6), 20% too low",
        "peak memory, rank 0": "2.5 GiB; predicted 2 GiB (1.8 to 2.2), 20% too low, outside the interval",
    }
    assert of_session({"predicted": PREDICTED}, records)["step"].startswith("0.5 s; predicted 0.4 s")
    assert of_session({}, records) == {}
    assert dict(announced(PREDICTED))["predicted"].startswith("step 0.4 s (0.3 to 0.6), peak memory, rank 0 2 GiB")
    for unknown in ({}, {"reason": "a GPU"}, {**PREDICTED, "assumed": True}):
        assert announced(unknown) == [] and of_session({"predicted": unknown}, records) == {}


def test_a_run_predicts_in_a_process_of_its_own(tmp_path, monkeypatch):
    """The process prints what the planner says of the same run; one that fails leaves its reason in run.json."""
    wanted = inputs.read(RECIPE, ["precision=fp32"])
    described, _ = strategies.describe(wanted, read("configs/ddp.yaml"), {}, 2)
    assert wanted.source.recipe and wanted.source.recipe.model.config
    plan = Plan(wanted.source.recipe, described, RECIPE, ())
    fields = {**wanted.source.recipe.model.config, "vocab_size": 2048}
    monkeypatch.setattr(settle, "device_memory_bytes", lambda *_: 16 * 2**30)
    monkeypatch.setattr(settle.factory, "device_name", lambda _: "cpu")
    context = cast(Any, SimpleNamespace(plan=plan, accelerator=SimpleNamespace(device=None)))
    expected = forecast.forecast(plan, fields, forecast.Device("cpu", 16, 0.2, 2))
    (tmp_path / "samecurve.py").write_text("raise SystemExit('of the working directory')")
    (tmp_path / "runpy.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    assert settle.predict(context, fields, 0.2) == json.loads(json.dumps(expected)) and expected["step_seconds"] > 0
    fails = "the planner's process failed"
    assert settle.predict(context, {**fields, "x": lambda: 1}, 0.2)["reason"].startswith(f"{fails}: Can't ")
    reason = settle.predict(context, cast(Any, 3), 0.2)["reason"]
    assert re.fullmatch(rf"{fails} with exit code 1: \w+Error: .+", reason), reason
    monkeypatch.setattr(settle.sys, "executable", "/nowhere/python")
    assert settle.predict(context, fields, 0.2)["reason"].startswith(f"{fails}: ")


def test_a_gpu_without_rates_says_so():
    wanted = inputs.read(RECIPE, [])
    described, _ = strategies.describe(wanted, read("configs/ddp.yaml"), {}, 2)
    assert wanted.source.recipe and wanted.source.recipe.model.config
    plan = Plan(wanted.source.recipe, described, RECIPE, ())
    device = forecast.Device("Radeon 42", 16, None, 2)
    fields = {**wanted.source.recipe.model.config, "vocab_size": 2048}
    assert forecast.forecast(plan, fields, device) == {"reason": "no rates of a GPU called Radeon 42 are known"}
