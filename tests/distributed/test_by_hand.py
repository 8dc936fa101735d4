"""The lessons of examples/by_hand/: each equal to one process, with the bytes that its first lines promise."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from functools import cache

import pytest
import torch
from harness import ROOT, Workspace, long

from samecurve.distributed.network import free_port
from samecurve.strategy import timetables

FOLDER = ROOT / "examples" / "by_hand"
SCHEDULES = ("GPipe", "1F1B", "zero bubble")
# in order of reading, with the title that each prints
LESSONS = {
    "ring_all_reduce": "ring all-reduce",
    "data_parallel": "data parallel",
    "zero1": "ZeRO-1",
    "zero3": "ZeRO-3",
    "tensor_parallel": "tensor parallel",
    "sequence_parallel": "sequence parallel",
    "pipeline": "pipeline, GPipe",
    "ring_attention": "ring attention",
    "expert_dispatch": "expert dispatch",
}
TITLES = [*LESSONS.values(), *(f"pipeline, {name}" for name in SCHEDULES[1:])]
NUMBER = 8  # bytes
SIZES = [(1, 3), (2, 6), (4, 6), (4, 12), (8, 16)]  # stages and micro-batches
WEIGHTS = 2 * 12 * 24 * NUMBER  # the MLP of data_parallel.py


@pytest.fixture(scope="module")
def lessons(workspace: Workspace):
    @cache
    def read(world: int) -> dict[str, str]:
        """What each lesson printed, by title. A lesson that is not equal to one process fails."""
        command = ["fork", str(world), str(free_port()), "tests/distributed/by_hand_probe.py", *LESSONS]
        run = workspace.execute(command, workspace.folder)
        assert run.returncode == 0, run.output
        found = re.findall(r"^(\S.*)\n((?:  .*\n)+)", run.output, re.MULTILINE)
        return dict(found)

    return read


WORLDS = [2, *long(1, 3, 4)]


@pytest.mark.parametrize("world", WORLDS)
def test_each_is_equal_to_one_process(lessons, world):
    found = lessons(world)
    assert sorted(found) == sorted(TITLES)
    for title, lines in found.items():
        ranks = re.findall(r"^  rank (\d+) holds .+; sent \d+ bytes$", lines, re.MULTILINE)
        assert ranks == [str(rank) for rank in range(world)], title
        assert float(re.search(r"deviation from one process (\S+)", lines)[1]) < 1e-12, title


@pytest.mark.parametrize("world", WORLDS)
def test_what_travels_is_what_the_formulas_say(lessons, world):
    """Per rank; K is the size of the MLP's weights, X that of one layer's tokens."""
    n, tokens = world, 24 * 12 * NUMBER
    all_reduce = 2 * (n - 1) / n
    expected = {
        "ring all-reduce": all_reduce * 960,
        "data parallel": 3 * all_reduce * WEIGHTS,  # steps
        "ZeRO-1": 3 * all_reduce * WEIGHTS,
        "ZeRO-3": 3 * 1.5 * all_reduce * WEIGHTS,
        "tensor parallel": 2 * all_reduce * tokens,
        "sequence parallel": 2 * all_reduce * tokens + 2 * all_reduce * 12 * NUMBER,  # two gradients of 12 numbers
        # k and v there and back, and n times their gradients
        "ring attention": (4 * (n - 1) + 2 * n * (n > 1)) * 24 // n * 2 * 6 * NUMBER,
    }
    for title, num_bytes in expected.items():
        assert sent_bytes(lessons(n)[title]) == [round(num_bytes)] * n, title
    assert sent_bytes(lessons(n)["expert dispatch"]) == dispatched_bytes(n)
    for name in SCHEDULES:
        neighbours = [(rank > 0) + (rank < n - 1) for rank in range(n)]
        assert sent_bytes(lessons(n)[f"pipeline, {name}"]) == [tokens * each for each in neighbours], name


def sent_bytes(lines: str) -> list[int]:
    return [int(each) for each in re.findall(r"sent (\d+) bytes", lines)]


def dispatched_bytes(n: int) -> list[int]:
    """Of each rank: dispatch and combine, both also backward, of the pairs (token, expert) whose expert is elsewhere,
    6 numbers each; before them the counts of 12 / n experts for each other rank; last the router's gradient."""
    torch.manual_seed(0)
    x, _, router = *torch.randn(2, 24, 6, dtype=torch.float64), torch.randn(6, 12, dtype=torch.float64)
    owners = (x @ router).topk(2).indices // (12 // n)
    pairs = torch.stack([part.flatten().bincount(minlength=n) for part in owners.chunk(n)])  # [from, to]
    assert pairs.sum() == 48
    travels = 2 * (pairs.sum(0) + pairs.sum(1) - 2 * pairs.diagonal())
    others = (n - 1) * 12 // n + 2 * (n - 1) * 72 // n
    return [NUMBER * (6 * int(each) + others) for each in travels]


def test_what_each_rank_holds(lessons):
    """Of 576 weights, gradients and twice as many moments, on two ranks."""
    held = {title: [int(n) for n in re.findall(r"(\d+) (?:w|g|opt)", lessons(2)[title])][:3] for title in TITLES[1:4]}
    assert held == {"data parallel": [576, 576, 1152], "ZeRO-1": [576, 576, 576], "ZeRO-3": [288, 288, 576]}
    most = {name: re.findall(r"at most (\d) of 6", lessons(2)[f"pipeline, {name}"]) for name in SCHEDULES}
    assert most == {"GPipe": ["6", "6"], "1F1B": ["2", "1"], "zero bubble": ["2", "2"]}


@pytest.fixture(scope="module")
def schedules():
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("pipeline_schedules")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_schedules_wait_as_long_as_the_papers_say(schedules, stages, m):
    for name, waits in zip(SCHEDULES, (3, 3, 1), strict=True):
        table = schedules.timetable(name, stages, m)
        assert [row.count("--") + (len(table[0]) - len(row)) for row in table] == [waits * (stages - 1)] * stages, name
        for stage, row in enumerate(table):
            work = [each for each in row if each != "--"]
            assert sorted(work) == sorted(f"{kind}{i}" for kind in "FBW" for i in range(m))
            held = [
                sum(each[0] == "F" for each in work[:k]) - sum(each[0] == "W" for each in work[:k])
                for k in range(3 * m)
            ]
            assert max(held) == {"GPipe": m, "1F1B": stages - stage, "zero bubble": stages}[name], name


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_schedules_are_those_of_the_planner(schedules, stages, m):
    """Order of work, time and inputs held, of the two that engines run, too; their zero bubble is ZB-V, not ZB-H1."""
    for name in SCHEDULES[:2]:
        for stage in range(stages):
            work = schedules.SCHEDULES[name](stage, stages, m)
            planned = [(each.kind, each.micro_batch) for (each,) in timetables.order(name, stage, stages, m)]
            # the planner's B is uncut
            assert work == [(kind, i) for whole, i in planned for kind in {"F": "F", "B": "BW"}[whole]], name
            held = [sum({"F": 1, "B": 0, "W": -1}[kind] for kind, _ in work[:k]) for k in range(3 * m)]
            assert max(held) == timetables.micro_batches_kept(name, stage, stages, m)[0], name
        table, idle = schedules.timetable(name, stages, m), timetables.idle_slots(name, stages, m)
        assert schedules.idle_share(table) == pytest.approx(idle / (m + idle)), name


def test_the_pictures_are_current():
    pictures = runpy.run_path(str(ROOT / "scripts" / "draw_by_hand.py"))["PICTURES"]
    for file, draw in pictures.items():
        assert (ROOT / file).read_text() == draw(), f"{file} is out of date: python scripts/draw_by_hand.py"


def test_lessons_stand_alone():
    """At most 80 lines each, of torch and each other only, and started by the command on the page."""
    files = sorted(FOLDER.glob("*.py"))
    assert {path.stem for path in files} == LESSONS.keys() | {"wire", "pipeline_schedules"}
    allowed = {"torch", "os", "atexit", *(path.stem for path in files)}
    for path in files:
        assert len(path.read_text().splitlines()) <= 80, path
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {module.split(".")[0] for module in modules} <= allowed, path


@pytest.mark.full
@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--nproc_per_node", "2"]])
def test_the_commands_on_the_page(start, workspace):
    command = [sys.executable, *start, "examples/by_hand/zero3.py"]
    done = subprocess.run(command, cwd=ROOT, env=workspace.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ZeRO-3\n  rank 0 holds ") and done.stdout.count("rank") == (2 if start else 1)


LIMITS = {
    # ZeRO-3's shards of gradients are FSDP2's and DeepSpeed's
    "zero3": 1e-12,
    "deepspeed": 1e-6,  # fp32
    # Megatron's functions make the layers that the engine cuts
    "tp": 1e-12,
    "tp_sequence_parallel": 1e-12,
    "ring_attention": 1e-6,  # the engine's scores are fp32
    "expert_dispatch": 1e-12,
    # what bench measures, results and bytes
    **dict.fromkeys(("ring_all_reduce", "all_reduce", "reduce_scatter", "all_gather"), 1e-12),
}


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_the_functions_of_the_engines_compute_the_same(world, workspace):
    command = ["fork", str(world), str(free_port()), "tests/distributed/by_hand_engines_probe.py"]
    run = workspace.execute(command, workspace.folder, DS_ACCELERATOR="cpu")
    check_limits(run.returncode, run.output, LIMITS)


def check_limits(returncode: int, output: str, limits: dict[str, float]) -> None:
    assert returncode == 0, output
    found = {name: float(difference) for name, difference in re.findall(r"COMPARED (\S+) (\S+)", output)}
    assert found.keys() == limits.keys()
    assert {name: found[name] for name in limits if not found[name] < limits[name]} == {}


ADAM = ("optimizer.betas=[0.9,0.999]", "optimizer.weight_decay=0", "optimizer.max_grad_norm=1000")
ROWS = ("batch.global_batch_size=24", "batch.micro_batch_size=4")


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategies", "limits"),
    [
        (("ddp",), {"DistributedDataParallel:gradients": 1e-6, "DistributedDataParallel:weights": 1e-6}),
        (
            ("pipeline_gpipe", "pipeline_1f1b", "pipeline_zbv"),
            dict.fromkeys(("ScheduleGPipe", "Schedule1F1B", "ScheduleZBVZeroBubble"), 1e-6),
        ),
        (("zero1",), {"DeepSpeedEngine:gradients": 1e-6, "DeepSpeedEngine:weights": 1e-6}),
    ],
)
def test_the_engines_take_the_same_steps(strategies, limits, workspace):
    """In fp32, on the lessons' models: with accumulation, and with the update of the recipe's optimizer."""
    command = ["fork", "2", str(free_port()), "tests/distributed/by_hand_training_probe.py", str(workspace.recipe)]
    command += [f"output_dir={workspace.folder / 'by_hand'}", *ADAM, *ROWS]
    paths = ",".join(str(workspace.strategy(name)) for name in strategies)
    run = workspace.execute(command, workspace.folder, STRATEGIES=paths)
    check_limits(run.returncode, run.output, limits)
