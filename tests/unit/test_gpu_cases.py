"""The GPU benchmark without a GPU: that every case is a run that samecurve accepts, and what becomes of its numbers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import attention_table, page, results, runs
from benchmarks.gpu.cases import (
    DECIDING,
    GROUPS,
    HERE,
    MEASURED,
    OPTIONS_ON,
    PACKED,
    WARM_UP,
    Case,
    _digest,
    _digest_of_files,
    cases,
    chosen,
)
from samecurve.config import loader
from samecurve.errors import ConfigurationError
from samecurve.models.flops import Peak, stated, token_flops
from samecurve.strategy.resolve import resolve_plan

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {"1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248}  # as published
CASES = cases(num_devices=4)
REFUSED = {"1b:attention=flash_attention_2": "set that to 1"}  # a row of the table that says why


def shape(size: str):
    config = dict(loader.load_recipe(str(HERE / f"llama_{size}.yaml"), ["steps=10"]).model.config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def test_names_tell_cases_apart_and_point_at_cases():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) > 40
    assert {case.against for case in CASES} <= {"", *names}
    assert {case.group for case in CASES} == set(GROUPS)
    assert not {case.group for case in cases(num_devices=1)} & {"devices"}
    order = [case.name for case in CASES]
    assert all(order.index(case.against) < order.index(case.name) for case in CASES if case.against)
    assert [case.name for case in chosen(CASES, ["1b", "ceilings"])] == ["ceilings", "1b"]
    assert {case.recipe for case in chosen(CASES, ["llama_3b"])} == {"llama_3b.yaml"}
    with pytest.raises(SystemExit, match="--only: found 2b"):
        chosen(CASES, ["2b"])


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """With what stands for the model folder of the 8B shape."""
    found = runs.Places(tmp_path_factory.mktemp("bench_gpu"), toy=False)
    for name in ("llama_1b", "llama_3b", "llama_8b", "llama_toy"):
        (found.folder / name).mkdir()
        (found.folder / name / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 32}')
        (found.folder / name / "model.safetensors").touch()
    (found.folder / "text.txt").write_text("text")
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.program != "matmul"], ids=lambda case: case.name)
def test_samecurve_accepts_every_case_also_at_the_toy_size(case, places, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # optional packages
    [toy] = [other for other in cases(num_devices=4, toy=True) if other.name == case.name]
    for each in (case, toy):
        world = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": str(each.num_processes)}
        strategy = [] if each.strategy == "single" else ["--strategy", f"configs/{each.strategy}.yaml"]
        given = [str(HERE / each.recipe), *runs.settings(each, places), *strategy]
        if each.name in REFUSED:
            with pytest.raises(ConfigurationError, match=REFUSED[each.name]):
                resolve_plan(given, world)
            continue
        plan = resolve_plan(given, world)
        assert (plan.strategy.name, plan.recipe.steps) == (each.strategy, each.num_steps)
        if each.profiled:
            assert plan.recipe.profile.steps == (WARM_UP + MEASURED + 2, each.num_steps)


@pytest.mark.parametrize("size", PARAMETERS)
def test_shapes_are_those_that_were_published(size):
    assert shape(size).num_parameters() == PARAMETERS[size]


def test_mfu_is_the_published_one_by_the_published_convention():
    """10,471 tokens/s of the 8B shape with 4,096 tokens per row were 57.8 % of 989 TFLOP/s: N with the embedding."""
    model = shape("8b")
    flops = stated(token_flops(model, 4096, recompute=1.0), Peak(989, "data sheet"))
    by_hand = 6 * PARAMETERS["8b"] + 12 * 32 * 4096 * 4096
    row = {"tokens_per_second": 10_471, "world_size": 1, "num_parameters": model.num_parameters(), "trains_all": True}
    assert page.all_parameters(row | {"flops": flops}) == pytest.approx(by_hand * 10_471 / 989e12)
    assert round(page.all_parameters(row | {"flops": flops}), 3) == page.PUBLISHED_MFU
    assert page.all_parameters(row | {"flops": flops, "trains_all": False}) is None


def machine_with(device: str, toy: bool = False, **rates: float) -> dict:
    """Rates of the cases that decide the attention for packed documents; 0: it failed."""
    done = {name: {"state": "done", "tokens_per_second": rate, "date": "2027"} for name, rate in rates.items()}
    rows = {PACKED[name]: done[name] if rate else {"state": "failed"} for name, rate in rates.items()}
    facts = {"device": device, "toy": toy, "versions": {"torch": "2.11.0", "transformers": "5.17.0", "peft": "1"}}
    return {"facts": facts, "rows": rows}


def test_the_table_of_attention_has_the_fastest_of_each_device():
    results = {
        "a": machine_with("A", sdpa=100.0, varlen=130.0),
        "b": machine_with("B", sdpa=100.0, varlen=101.0),  # noise
        "c": machine_with("C", sdpa=100.0, varlen=0.0),
        "d": machine_with("D", varlen=10.0),
        "e": machine_with("E", toy=True, sdpa=100.0, varlen=200.0),
    }
    found = attention_table.table(results)
    assert {device: row["attention"] for device, row in found.items()} == {"A": "varlen", "B": "sdpa"}
    assert found["A"]["tokens_per_second"] == {"sdpa": 100.0, "varlen": 130.0}
    assert found["A"]["versions"] == {"torch": "2.11.0", "transformers": "5.17.0"}


def test_what_decides_a_default_comes_first():
    names = [case.name for case in CASES]
    first = names[: len(DECIDING) + 1]
    assert first[0] == "ceilings" and set(first[1:]) == set(DECIDING)
    assert set(PACKED.values()) <= set(DECIDING)


RUN = {"engine": "LlamaForCausalLM", "world_size": 1, "num_parameters": 10, "num_trained_parameters": 10}
RUN["flops"] = {"model_per_token": 60.0, "causal_per_token": 50.0, "hardware_per_token": 80.0, "peak_tflops": 1e-9}


def metrics(num_steps: int = WARM_UP + MEASURED, seconds: float = 2.0) -> list[dict]:
    slow = [{"tokens": 1, "step_seconds": 100.0, "mfu": 0.0, "hfu": 0.0, "peak_memory_gib": 1.0, "loss": 7.0}] * WARM_UP
    step = {"tokens": 10, "step_seconds": seconds, "mfu": 0.5, "hfu": 0.6, "peak_memory_gib": 3.0, "loss": 6.0}
    profiled = {**step, "step_seconds": 50.0, "peak_memory_gib": 9.0}
    return [*slow, *[step] * (num_steps - WARM_UP), *[profiled] * 3]


def done(**changes) -> dict:
    return {
        "state": "done",
        "seconds": 9.0,
        "date": "2026-11-21T00:00:00",
        **runs.numbers(metrics(), RUN, 0.25),
        **changes,
    }


def test_only_the_measured_steps_count():
    found = runs.numbers(metrics(), RUN)
    assert (found["tokens_per_second"], found["peak_memory_gib"], found["mfu"]) == (5.0, 3.0, 0.5)
    assert (found["losses"][0], found["step_seconds"], found["trains_all"]) == (7.0, [2.0] * MEASURED, True)
    assert runs.numbers([{**step, "mfu": None} for step in metrics()])["mfu"] is None


def facts() -> dict:
    versions = {"torch": "2.11.0", "datasets": None}
    return {"num_devices": 1, "device": "H", "memory_gib": 139.7, "cores": 16, "versions": versions, "toy": False}


def test_the_page_has_every_row_and_what_is_missing():
    names = "1b", "1b-trainer", "8b", "8b-8bit", OPTIONS_ON, "1b:compile=regional"
    among = [case for case in CASES if case.name in names]
    steps = [{key: value for key, value in step.items() if key not in ("mfu", "hfu")} for step in metrics(seconds=4.0)]
    peer = {"state": "done", "date": "2026-11-22", **runs.numbers(steps)}
    oom = {"state": "out of memory", "date": "2026-11-22", "reason": "CUDA out of memory | tried"}
    rows = {"1b": done(), "1b-trainer": peer, "8b-8bit": oom, OPTIONS_ON: done()}
    rows["1b:compile=regional"] = done(tokens_per_second=6.0, losses=[7.0, 6.06] * 5)
    text = page.page(
        {"1 x H": {"facts": facts(), "rows": rows}, "2 x H": {"facts": facts(), "rows": {}}}, lambda _: among
    )
    assert "1 x H, 140 GiB each, driver none, 16 cores; torch 2.11.0; commit not known; " in text
    assert "; 2026-11-21 to 2026-11-22.\n" in text
    # 5 tokens/s of 60 FLOPs over 1e3 FLOP/s; 6 N + 20 for attention would be 80
    assert "| 1b | 5 |  |  | 50.0% | 40.0% | 60.0% | 3.0 | 25.0% | 7.0000 |  |" in text
    assert "| 1b-trainer | 2 | 1b | 0.50 | 15.0% | 20.0% | 20.0% | 3.0 |  | 7.0000 |  |" in text
    assert "| 8b-8bit | out of memory: CUDA out of memory / tried |" in text
    assert "| compile=regional | 6 | 1.20 | 50.0% | 60.0% | 3.0 | 1.00 |" in text
    assert "one H200. The goals here are 60% for 8B, 60% for 3B, 55% for 1.2B, by the same, for" in text
    assert "Not run yet: 8b." in text and "2 x H" not in text
    bare = page.page({"1 x H": {"facts": facts(), "rows": {"1b-trainer": peer}}}, lambda _: among)
    assert "| 1b-trainer | 2 | 1b |  |  |  |  | 3.0 |  | 7.0000 |" in bare


def test_each_row_says_at_which_commit_it_was_measured():
    names = "1b", "8b", OPTIONS_ON, "1b:compile=regional", "1b:compile=full"
    rows = {name: done(commit=f"c{index}") for index, name in enumerate(names)}
    for name in ("8b", "1b:compile=full"):
        rows[name] = {"state": "failed", "reason": "no", "date": "2026-11-22", "commit": rows[name]["commit"]}
    among = [case for case in CASES if case.name in names]
    text = page.page({"m": {"facts": facts(), "rows": rows}}, lambda _: among)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    found = [(line[0], line[-1]) for line in cells]
    options = [("as it is", "c2"), ("compile=regional", "c3"), ("compile=full", "c4")]
    assert {("1b", "c0"), ("8b", "c1"), (OPTIONS_ON, "c2"), *options} <= set(found), text
    assert len({len(line) for line in cells}) == 2  # of the two tables
    assert "commit c0, c1, c2, c3, c4; " in text


def test_each_machine_has_its_own_cases():
    """What several GPUs measured stays when one of them goes on alone."""
    rows = {"8b-zero3": done(), "8b": done()}
    several = {"facts": {**facts(), "num_devices": 8}, "rows": rows}
    text = page.page({"8 x H": several, "1 x H": {"facts": facts(), "rows": {"8b": done()}}})
    assert text.count("| 8b-zero3 | 5 |") == 1 and text.count("| 8b | 5 |") == 2


def test_versions_are_those_that_the_rows_were_measured_with():
    rows = {"8b": done(), "1b": done(versions={"torch": "2.11.0", "datasets": "5.2"})}
    assert "; torch 2.11.0, datasets 5.2; " in page.page({"1 x H": {"facts": facts(), "rows": rows}})


def test_what_failed_is_measured_again_with_other_packages(tmp_path):
    case = chosen(CASES, ["8b-8bit"])[0]
    before = {**facts(), "driver": None}
    kept = results.Kept(tmp_path / "found.json", tmp_path / "gpu.md", before)
    row = {"definition": case.definition, "date": "2026-11-22", "reason": "no"}
    for state, found, again in (("failed", True, False), ("out of memory", True, True)):
        kept.add(case, {**row, "state": state})
        after = {**before, "versions": {**before["versions"], "bitsandbytes": "0.50"}}
        later = results.Kept(tmp_path / "found.json", tmp_path / "gpu.md", after)
        assert (kept.is_there(case), later.is_there(case)) == (found, again)


def test_an_option_without_its_base_is_still_told():
    among = [case for case in CASES if case.name == "1b:compile=regional"]
    text = page.page({"m": {"facts": facts(), "rows": {among[0].name: done()}}}, lambda _: among)
    assert "| compile=regional | 5 |" in text


def stopped(code: str, tmp_path: Path, limit: float = 60.0) -> dict:
    log = tmp_path / "run.log"
    found = runs.execute([sys.executable, "-c", code], log, {}, limit)
    return runs.failure(found, log, tmp_path / "run", limit)


def test_what_ends_a_run_is_its_row(tmp_path):
    memory = "raise RuntimeError('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')"
    found = stopped(memory, tmp_path)
    assert found["state"] == "out of memory" and "Tried to allocate 2 GiB" in found["reason"]
    assert stopped("import os; os.kill(os.getpid(), 9)", tmp_path)["state"] == "out of memory"
    report = "print('ConfigurationError (exit code 2)\\n1 problem\\n  r.yaml:1: steps: found 0'); exit(2)"
    assert stopped(report, tmp_path) == {"state": "failed", "reason": "r.yaml:1: steps: found 0 (code 2, run.log)"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"reason": "loss is not finite"}')
    assert stopped("exit(5)", tmp_path)["reason"].startswith("loss is not finite (code 5")


def test_a_run_beyond_its_limit_ends_with_all_its_processes(tmp_path):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"  # as torchrun does
    code = f"import subprocess, sys, time; {start}; time.sleep(60)"
    found = stopped(code, tmp_path, limit=1.0)
    assert (found["state"], found["reason"]) == ("time limit", "not through after 1 s")
    time.sleep(2.5)
    assert not (tmp_path / "alive").exists()


def test_the_share_outside_of_kernels_is_a_devices(tmp_path):
    (tmp_path / "profile").mkdir()
    summary = {"on_device": True, "shares": {"idle": 0.1, "data_wait": 0.02, "matmul": 0.88}}
    for on_device, expected in ((True, pytest.approx(0.12)), (False, None)):
        (tmp_path / "profile" / "summary.json").write_text(json.dumps(summary | {"on_device": on_device}))
        assert runs.profile(tmp_path) == expected


def test_what_is_measured_is_kept_until_the_case_is_another(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_gpu

    monkeypatch.setattr(bench_gpu, "machine", lambda toy: {**facts(), "driver": "580", "toy": toy})
    measured = []
    monkeypatch.setattr(
        runs, "measure", lambda case, *_: measured.append(case.name) or done(definition=case.definition)
    )
    monkeypatch.chdir(tmp_path)
    options = ["--toy", "--folder", str(tmp_path / "runs"), "--results", "found.json", "--only", "1b", "3b"]
    for _ in range(2):
        assert bench_gpu.main(options) == 0
        monkeypatch.chdir(tmp_path)
    assert measured == ["1b", "3b"] and "2 cases, of which 2 are there already" in capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["1 x H, torch 2.11.0, transformers None, toy size"]["rows"]
    assert rows["1b"]["driver"] == "580" and rows["1b"]["definition"]["resolved"]
    assert "| 1b | 5 |" in (tmp_path / "runs" / "gpu.md").read_text()

    rows["1b"]["definition"]["data"] = "another"
    name = "1 x H, torch 2.11.0, transformers None, toy size"
    (tmp_path / "found.json").write_text(json.dumps({name: {"facts": facts(), "rows": rows}}))
    assert bench_gpu.main(options) == 0
    assert measured == ["1b", "3b", "1b"]


def test_another_default_of_a_recipe_is_another_case(tmp_path, monkeypatch):
    """All cases are based on shared.yaml; a comment there changes nothing."""
    copied = tmp_path / "benchmarks" / "gpu"
    shutil.copytree(HERE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("benchmarks.gpu.cases.HERE", copied)
    [case] = chosen(CASES, ["1b"])
    base = copied / "shared.yaml"
    text = base.read_text()

    def definition(changed: str) -> dict:
        base.write_text(changed)
        _digest.cache_clear()
        return case.definition

    found = definition(text)
    assert definition(f"# another comment\n{text}") == found
    assert definition(f"{text}\nseed: 1\n") != found
    _digest.cache_clear()


def test_another_strategy_file_is_another_case(tmp_path, monkeypatch):
    several = {case.name: case for case in cases(num_devices=2)}
    before = {name: several[name].definition for name in ("8b", "8b-zero3", "8b-fsdp")}
    for folder in ("configs", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with open(tmp_path / "ds_configs" / "zero3.json", "a") as stream:
        stream.write("\n")
    monkeypatch.setattr("benchmarks.gpu.cases.ROOT", tmp_path)
    _digest_of_files.cache_clear()
    changed = {name for name, definition in before.items() if several[name].definition != definition}
    _digest_of_files.cache_clear()
    assert changed == {"8b-zero3"}


def test_why_the_gpus_are_not_known_is_told(monkeypatch):
    monkeypatch.setattr(results, "PROBE", "raise OSError('libcudart.so.13: no such file')")
    with pytest.raises(SystemExit, match="(?s)error: PyTorch could not list the GPUs.*libcudart.so.13: no such file"):
        results.machine(toy=False)


def test_threads_are_for_the_cores_that_a_run_may_use(places, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    [case] = chosen(CASES, ["8b-fsdp"])
    found = [runs.environment(replace(case, num_processes=count), places)["OMP_NUM_THREADS"] for count in (1, 4, 8)]
    assert found == ["6", "1", "1"]


def test_a_case_that_the_minutes_cut_off_is_no_row(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_gpu

    late = {"state": "time limit", "reason": "not through", "seconds": 1.0}
    monkeypatch.setattr(runs, "measure", lambda case, places, limit: dict(late))
    case = replace(CASES[0], name="case")
    added: list[Case] = []

    class Kept:
        def add(self, case, row):
            added.append(case)

        def longest(self, case):
            return 40.0

    bench_gpu.measure_cases([case], Kept(), None, limit=100.0, seconds=60.0)
    assert not added and "cut off by --minutes" in capsys.readouterr().out
    bench_gpu.measure_cases([case], Kept(), None, limit=50.0, seconds=60.0)
    assert added == [case]
    bench_gpu.measure_cases([case], Kept(), None, limit=50.0, seconds=1.0)
    assert added == [case] and "1 cases are left" in capsys.readouterr().out
    bench_gpu.measure_cases(
        [case], Kept(), None, limit=30.0, seconds=35.0
    )  # less than others took, but that may be enough
    assert added == [case, case]


def test_a_slow_case_has_a_limit_of_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_gpu

    limits = []
    monkeypatch.setattr(runs, "measure", lambda case, places, limit: limits.append(limit) or {"state": "done"})
    monkeypatch.setattr(bench_gpu, "_told", lambda row: "")
    kept = SimpleNamespace(add=lambda case, row: None, longest=lambda case: 40.0)
    bench_gpu.measure_cases(chosen(CASES, ["8b-offload", "3b-offload"]), kept, None, limit=300.0, seconds=1e6)
    assert limits == [600.0, 300.0]


def test_a_case_is_not_begun_that_the_minutes_would_cut_off(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_gpu

    kept = results.Kept(tmp_path / "found.json", tmp_path / "gpu.md", {**facts(), "driver": None})
    large, other, small = (chosen(CASES, [name])[0] for name in ("8b", "8b-compiled", "1b"))
    kept.add(large, done(definition=large.definition, seconds=80.0))
    assert (kept.longest(other), kept.longest(small)) == (80.0, results.SHORTEST_SECONDS)
    begun = []
    monkeypatch.setattr(runs, "measure", lambda case, *_: begun.append(case.name) or done(definition=case.definition))
    bench_gpu.measure_cases([other, small], kept, None, limit=300.0, seconds=60.0)
    assert begun == ["1b"]
