"""What a process holds beside its tensors: `bench memory` itself, and what the planner makes of its result."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_calibration import BENCH, PROCESS, RECIPE, bench, job_of, recorded

from samecurve.bench import jobs, memory, memory_probe
from samecurve.cli.commands import main
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.planner import calibrate, calibration, cluster, forecast, plan_text, step_time
from samecurve.planner import memory as planned
from samecurve.planner.calibration import ALONE, Calibration
from samecurve.planner.cluster import built_in
from samecurve.planner.hardware import PROCESS_GIB
from samecurve.specs.gpus import GIB
from samecurve.strategy.plan import Strategy

pytestmark = pytest.mark.usefixtures("planner_cache")
GPU = torch.device("cuda", 1)
CONTEXT, KERNELS, COMMUNICATORS = memory_probe.CONTEXT, memory_probe.KERNELS, calibrate.COMMUNICATORS
OF_CPU = {"torch": {"Python": 0.25, "gloo": 0.25}, "deepspeed": {"Python": 0.25, "engine": 0.5}}
OF_GPU = {"torch": {CONTEXT: 0.5, KERNELS: 0.25, COMMUNICATORS: 1.0}}


def result(folder: Path, parts: dict, **facts: object) -> Path:
    return bench(folder, {"benchmark": "memory", **BENCH, "processes": 2, "parts_gib": parts, **facts})


def on_h100(folder: Path, parts: dict) -> Path:
    return result(folder, parts, device="NVIDIA H100 80GB HBM3", device_type="cuda")


# the measurement


class FakeGpu:
    """A GPU of 80 GiB. `used` of any process and `reserved` by torch's allocator in this one are in GiB."""

    def __init__(self, monkeypatch, used: float, reserved: float = 0.0):
        self.used, self.reserved = used, reserved
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 - self.used) * GIB, 80 * GIB))
        monkeypatch.setattr(memory_probe, "train_step", lambda device: self.hold(0.25, 3.0))
        monkeypatch.setattr(memory_probe, "connect", lambda backend, device: self.hold(1.0, 0.5))

    def hold(self, beside: float, tensors: float) -> None:
        self.used, self.reserved = self.used + beside + tensors, self.reserved + tensors


def test_what_each_step_adds():
    held = iter([GIB, 1.5 * GIB, 1.25 * GIB])
    assert memory_probe.added(["a", "b", "c"], lambda: next(held)) == {"a": 1, "b": 0.5, "c": -0.25}


def test_tensors_do_not_count(monkeypatch):
    """Of 9 GiB in use, torch's allocator has 8."""
    FakeGpu(monkeypatch, used=9, reserved=8)
    assert memory_probe.gpu_bytes(GPU) == GIB


def test_the_resident_memory_grows_with_what_is_written():
    before = memory_probe.resident_bytes()
    kept = torch.ones(2**24)
    assert memory_probe.resident_bytes() - before == pytest.approx(kept.numel() * 4, rel=0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_the_steps_on_a_gpu(world, monkeypatch):
    FakeGpu(monkeypatch, used=0.5)
    found = memory_probe.added(memory_probe.on_gpu(GPU, world), lambda: memory_probe.gpu_bytes(GPU))
    assert found == {CONTEXT: 0.5, KERNELS: 0.25} | ({COMMUNICATORS: 1.0} if world > 1 else {})


@pytest.mark.parametrize(("used", "code"), [(0.5, 0), (20, 2)])
def test_a_gpu_has_to_be_idle(used, code, monkeypatch, tmp_path):
    FakeGpu(monkeypatch, used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert memory_probe.main("torch", tmp_path) == code
    found = json.loads((tmp_path / "3.json").read_text())
    if code:
        assert found["problem"].startswith("bench memory: GPU 1 holds 20.00 GiB before anything is computed")
    else:
        assert sum(found["parts_gib"].values()) == 1.75


@pytest.fixture
def probes(monkeypatch):
    """(what each process writes, exit code) stand for the processes."""

    def pretend(*written: dict, code: int = 0) -> None:
        @contextmanager
        def processes(arguments, stream, world_size):
            stream.write("first line\nthe reason\n")
            for rank, each in enumerate(written):
                Path(arguments[-1], f"{rank}.json").write_text(json.dumps(each))
            yield SimpleNamespace(wait=lambda: code)

        monkeypatch.setattr(memory.jobs, "processes", processes)

    return pretend


def test_the_fullest_process_counts(probes):
    probes({"parts_gib": {"a": 1, "b": 1}}, {"parts_gib": {"a": 0.5, "b": 2}})
    assert memory.measure("torch", 2) == {"a": 0.5, "b": 2}


def test_a_process_that_fails_is_an_error(probes):
    probes({"parts_gib": {"a": 1}}, {"problem": "GPU 1 is busy"}, code=1)
    with pytest.raises(ConfigurationError, match="^GPU 1 is busy$"):
        memory.measure("torch", 2)
    probes({"parts_gib": {"a": 1}}, code=1)
    with pytest.raises(SamecurveError, match="torch failed with exit code 1:\nfirst line\nthe reason"):
        memory.measure("torch", 2)
    probes({"parts_gib": {"a": 1}})
    with pytest.raises(SamecurveError, match="exit code 0"):
        memory.measure("torch", 2)


def test_the_table(capsys):
    memory.report(OF_CPU, 2, 0)
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "GiB that each step adds to the resident memory of a process, 2 processes"
    assert told[2].split() == ["after", "torch", "deepspeed"]
    assert told[3].split() == ["Python", "0.250", "0.250"]
    assert told[-1].split() == ["together", "0.500", "0.750"]
    memory.report({"torch": {CONTEXT: 0.5}}, 1, 1)
    told = capsys.readouterr().out
    assert "memory of a GPU, 1 process\n" in told and "the GPU must be idle otherwise" in told
    assert "communicators: not measured, because they take two GPUs" in told


def test_how_many_processes(monkeypatch, capsys):
    monkeypatch.setattr(memory, "measure", None)  # none is started, even if let through
    monkeypatch.setattr(jobs, "num_cores", lambda: 2)
    assert [jobs.count_processes(*each) for each in ((None, 0), (None, 8), (3, 0), (1, 8))] == [2, 8, 3, 1]
    for asked, gpus, why in ((9, 8, "at most 8 .*, one per GPU"), (17, 0, "at most 16 .*, 8 per core")):
        with pytest.raises(ConfigurationError, match=f"--num_processes: found {asked}, but {why}"):
            jobs.count_processes(asked, gpus)
    assert main(["bench", "memory", "--num_processes", "0"]) == ConfigurationError.exit_code
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "memory"]) == ConfigurationError.exit_code
    assert "leave out the launcher" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures GPUs")
@pytest.mark.parametrize("library", ["torch", pytest.param("deepspeed", marks=pytest.mark.full)])
def test_two_processes_on_a_cpu(library, tmp_path, monkeypatch, capsys):
    """As runs do, a process has a few tenths of a GiB; DeepSpeed's first step alone has 40 MiB more than FSDP's."""
    if library == "deepspeed":
        pytest.importorskip("deepspeed")
    monkeypatch.setattr(memory, "LIBRARIES", (library,))
    file = tmp_path / "memory.json"
    assert main(["bench", "memory", "--json", str(file)]) == 0
    (parts,) = json.loads(file.read_text())["parts_gib"].values()
    assert list(parts)[-2:] == ["gloo", "a first step"] and len(parts) == 5
    assert 0.25 < sum(parts.values()) < 1 and min(parts.values()) > -0.01
    assert (parts["the engine's modules"] + parts["a first step"] > 0.045) == (library == "deepspeed")
    read = calibrate.read_bench(file)
    assert read and read.learnt.process_gib[library] == pytest.approx(sum(parts.values()))
    assert f"{sum(parts.values()):.3f}" in capsys.readouterr().out


# what the planner makes of it


def test_a_memory_result_alone_replaces_what_a_process_is_assumed_to_hold(tmp_path, planner_cache, capsys):
    """DeepSpeed's pipeline is in the same package as its ZeRO."""
    path, out = result(tmp_path, OF_CPU), tmp_path / "plan.json"
    assert main(["plan", "--calibrate", str(path)]) == 0
    text = "torch 0.50 GiB, deepspeed 0.75 GiB, deepspeed pipeline 0.75 GiB"
    assert f"{path}: {text} beside tensors, assumed 0.60 GiB" in capsys.readouterr().out
    learnt = calibration.read(planner_cache / "cpu.json")
    assert learnt and learnt.process_gib == {"torch": 0.5, "deepspeed": 0.75, "deepspeed pipeline": 0.75}
    for name, gib in (("ddp", 0.5), ("zero2", 0.75)):
        job = job_of(name)
        after = replace(job, calibration=learnt)
        assert calibrate.shown_gib(after) - calibrate.shown_gib(job) == pytest.approx(gib - PROCESS_GIB)
        assert step_time.breakdown(after) == step_time.breakdown(job)
    options = ["--cluster", "cpux2", "--strategy", "configs/fsdp.yaml", "--json", str(out)]
    assert main(["plan", RECIPE, "precision=fp32", *options]) == 0
    shown = capsys.readouterr().out
    assert "only the memory beside tensors calibrated on 1 result of bench, 20" in shown
    assert " ".join(next(each for each in shown.splitlines() if each.startswith("reserved")).split()) == (
        "reserved 0.50 0.50 0.50 context and libraries (calibration)"
    )
    assert "memory beside tensors (calibration)" in shown and "factors of a calibration" not in shown


def held(job) -> dict[str, tuple[float, str]]:
    (only,) = planned.anatomy(job)
    return {line.name: (line.forward / GIB, line.source) for line in planned.overhead(only)[1:]}


def test_a_gpu_has_communicators_where_there_are_others(tmp_path):
    read = calibrate.read_bench(on_h100(tmp_path, OF_GPU))
    assert read and read.learnt == Calibration("H100", process_gib={ALONE: 0.75, "": 1.75})
    assert read.note == "one process 0.75 GiB, others 1.75 GiB beside tensors, assumed 2.10 GiB"
    two, one = (replace(job_of("ddp", cluster), calibration=read.learnt) for cluster in ("h100x2", "h100x1"))
    one = replace(one, strategy=Strategy())
    assert held(two) == {"reserved": (1.75, "calibration")} and held(one) == {"reserved": (0.75, "calibration")}


def test_a_single_gpu_says_nothing_about_communicators(tmp_path):
    read = calibrate.read_bench(on_h100(tmp_path, {"torch": {CONTEXT: 0.5, KERNELS: 0.25}}))
    assert read and read.learnt.process_gib == {ALONE: 0.75} and read.note.endswith("assumed 0.90 GiB")
    two = replace(job_of("ddp", "h100x2"), calibration=read.learnt)
    one = replace(two, strategy=Strategy())
    assert held(two).keys() == {"context", "NCCL"}
    machines = replace(built_in("h100x2"), calibration=read.learnt)
    assert "memory beside tensors (calibration)" in plan_text.inputs_line(machines, one)
    assert "memory beside tensors (assumed)" in plan_text.inputs_line(machines, two)


def test_a_runs_own_measurement_wins(tmp_path):
    """The bench has no data loader and few allocations; of libraries that no run had, it knows more than the runs."""
    benches = [calibrate.read_bench(result(tmp_path, OF_CPU))]
    runs = {name: calibrate.read_run(recorded(tmp_path, name)) for name in ("ddp", "zero2")}
    learnt = calibrate.learn([runs["ddp"]], benches)
    assert learnt.process_gib["torch"] == pytest.approx(PROCESS["torch"])
    assert learnt.process("deepspeed", 2) == 0.75 and learnt.process("another", 2) == learnt.process_gib["torch"]
    # ZeRO-2, left out, is predicted with what bench says of DeepSpeed
    job = replace(runs["zero2"].job, calibration=Calibration("cpu", process_gib={"": 0.75}))
    (_, left_out) = calibrate.errors_left_out([*runs.values()], benches)[1]
    assert calibrate.shown_gib(job) == pytest.approx(runs["zero2"].memory_gib * math.exp(-left_out))


def test_results_of_several_machines_are_averaged(tmp_path):
    parts = [{"torch": {"all": gib}} for gib in (0.4, 0.6)]
    folders = [tmp_path / str(nth) for nth in range(2)]
    for folder in folders:
        folder.mkdir()
    benches = [calibrate.read_bench(result(folder, each)) for folder, each in zip(folders, parts, strict=True)]
    assert calibrate.learn([], benches).process_gib == {"torch": pytest.approx(0.5)}


@pytest.mark.parametrize("parts", [{}, {"torch": {"all": -0.1}}, {"torch": {"all": "much"}}, {"torch": 3}])
def test_damaged_parts_are_refused(parts, tmp_path, capsys):
    path = result(tmp_path, parts)
    assert main(["plan", "--calibrate", str(path)]) == 2
    assert f"--calibrate {path}: not what bench writes" in capsys.readouterr().err


def test_a_cluster_files_own_number_comes_first(tmp_path):
    """It also counts what others hold; what a plan emits is no such statement."""
    learnt, path = Calibration("H100", process_gib={"": 1.75}), tmp_path / "cluster.yaml"
    path.write_text("gpu: H100-80GB\nnodes: 1\ngpus_per_node: 2\nreserved_gib: 5\n")
    job = replace(job_of("ddp", "h100x2"), calibration=learnt)
    own = cluster.read_cluster(str(path)).file.reserved_gib
    assert held(replace(job, reserved_gib=own)) == {"reserved": (5, "cluster file")}
    assert held(job_of("ddp"))["reserved"] == (PROCESS_GIB, "assumed")
    path.write_text(cluster.cluster_text(built_in("cpux2")))
    assert "reserved_gib" not in path.read_text() and cluster.read_cluster(str(path)).file.reserved_gib is None


def test_a_run_keeps_its_measured_peak_beside_a_memory_result(planner_cache):
    """Factors of step times are relative to the assumed rate of products, which a memory result does not change."""
    device = forecast.Device("cpu", 16, 0.3, 2)
    assert forecast._machines(device, 2).card.fp32_tflops == 0.3
    for learnt, rate in ((Calibration("cpu", process_gib={"": 0.5}), 0.3), (Calibration("cpu", time={"host": 2}), 0.1)):
        calibration.write(learnt, planner_cache / "cpu.json")
        assert forecast._machines(device, 2).card.fp32_tflops == rate
