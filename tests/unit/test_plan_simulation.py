"""`plan --simulate`: the events of a step, and what failures leave of the time."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_planner_anatomy import GPT, a_job

from samecurve.cli.commands import main
from samecurve.config.schema import Checkpoint
from samecurve.planner import cluster_file, events, goodput, inputs, search, simulation, step_time, timeline
from samecurve.planner.bubbles import bubble
from samecurve.planner.cluster import built_in
from samecurve.planner.events import Lane, Task
from samecurve.planner.goodput import Failures, Reliability
from samecurve.planner.job import Sharding
from samecurve.planner.layout import Layout
from samecurve.planner.strategy_files import read

HOUR = 3600
MODEL = "benchmarks/planner/llama_8b.json"
FAILURES = Failures(mean_between=3 * HOUR, checkpoint=120, restart=600)


def test_the_best_interval_by_hand():
    """Young: sqrt(2 x 120 x 10,800) = 1,610 s. Daly: 1,610 (1 + sqrt(1 / 180) / 3 + 1 / 1,620) - 120 = 1,531 s."""
    assert FAILURES.young == pytest.approx(1609.97, abs=0.01)
    assert FAILURES.daly == pytest.approx(1609.97 * (1 + math.sqrt(1 / 180) / 3 + 1 / 1620) - 120, abs=0.01)
    assert FAILURES.best == pytest.approx(FAILURES.daly, rel=1e-3)
    others = [FAILURES.goodput(share * FAILURES.best) for share in (0.2, 0.9, 1.1, 5)]
    assert all(FAILURES.goodput(FAILURES.best) > each for each in others)
    assert replace(FAILURES, checkpoint=7 * HOUR).daly == FAILURES.mean_between


@pytest.mark.parametrize("share", [0.3, 1, 3])
@pytest.mark.parametrize("restart", [0, 600, 2 * HOUR])
def test_simulated_failures_agree_with_the_closed_form(share, restart):
    failures = replace(FAILURES, restart=restart)
    interval = share * failures.best
    assert goodput.simulate(failures, interval, 40_000) == pytest.approx(failures.goodput(interval), rel=0.02)


def test_a_lost_job_has_no_goodput():
    assert Failures(1, 1, 1000).goodput(10) == 0


def test_llama_3_failed_every_three_hours():
    """2,048 nodes had 419 unexpected interruptions in 54 days (arXiv:2407.21783)."""
    machines = replace(built_in("h100x8"), nodes=2048)
    failures, written = timeline.expected_failures(a_job(), machines, background=False)
    assert failures.mean_between == pytest.approx(54 * 24 * HOUR / 419, rel=1e-3)
    assert failures.checkpoint == written == pytest.approx(12 * a_job().shape.parameters / 2048 / 1e9)
    behind, _ = timeline.expected_failures(a_job(), machines, background=True)
    assert behind.checkpoint == pytest.approx(written / (55 * 8)) and behind.restart == failures.restart + written


def test_tasks_wait_for_their_lane_and_for_messages():
    """b has to wait for a and its message, c for its lane."""
    one, two = Lane("", 0, "compute"), Lane("", 1, "compute")
    a = Task(one, "F", 1.0)
    b = Task(two, "F", 2.0, [(a, 0.5)])
    c = Task(two, "B", 1.0, [(a, 0.0)])
    lanes = events.run([a, b, c])
    assert [task.start for task in (a, b, c)] == [0, 1.5, 3.5] and lanes == {one: [a], two: [b, c]}
    with pytest.raises(AssertionError, match="wait for each other"):
        events.run([Task(one, "F", 1.0, [(b, 0.0)]), b])


LAYOUTS = {
    "one": Layout(1),
    "ddp": Layout(16),
    "zero1": Layout(16, zero=1, shard=16),
    "fsdp": Layout(16, zero=3, shard=16),
    "1F1B": Layout(4, pp=4, schedule="1F1B"),
    "GPipe": Layout(4, pp=4, schedule="GPipe"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("gbit", [100, 3200])
def test_a_simulated_step_takes_as_long_as_the_formulas_say(layout, gbit):
    job = a_job(GPT, layout, seq=2048, grad_accum=8, node_gbit=gbit, stack="fsdp2")
    assert simulation.simulate(job).seconds == pytest.approx(step_time.breakdown(job).total, rel=0.1)


SHIPPED = sorted(Path("configs").glob("*.yaml"))
GPUS = {"single": (1,), "tp": (2,)}  # strategies that take no other number


def test_all_strategies_are_simulated():
    assert len(SHIPPED) > 20 and {*GPUS} < {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("settings", [(), ("memory.activation_checkpointing=full", "batch.sequence_length=8192")])
def test_every_strategy_is_simulated_as_the_formulas_say(path, settings, tmp_path):
    model = json.loads(Path(MODEL).read_text())
    if "_ep" in path.stem:
        model |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    for gpus in GPUS.get(path.stem, (8, 64)):
        wanted = inputs.read(str(tmp_path / "config.json"), list(settings))
        (choice,) = search.evaluate(wanted, built_in("h100x8").scaled(gpus), [read(str(path))])
        assert choice.job, choice.reason
        formula = step_time.breakdown(choice.job).total
        assert simulation.simulate(choice.job).seconds == pytest.approx(formula, rel=0.1), gpus


def count(job, kind: str) -> Counter[str]:
    """Count the collectives of a kind in front of the pass of each micro-batch, or behind it."""
    lanes = simulation.simulate(job).lanes
    passes = [each for each in lanes[Lane("", 0, "compute")] if each.kind in "FB"]
    found: Counter[str] = Counter()
    for task in lanes[Lane("", 0, "network")]:
        if task.kind == kind:
            beside = [each for each in passes if each.start <= task.start] or passes[:1]
            found[f"{beside[-1].kind}{beside[-1].label}"] += 1
    return found


def test_sharded_stages_are_gathered_and_reduced_once():
    """FSDP2 in PyTorch's schedules: in front of the first pass of four micro-batches, and behind the last one."""
    once = Sharding(gathers_once=True, reduces_once=True, reshards=False, overlaps=False)
    layout = Layout(8, pp=2, schedule="1F1B", zero=3, shard=8)
    job = a_job(layout=layout, sharding=once, stack="fsdp2")
    assert count(job, "G") == {"F0": 1} and count(job, "R") == {"B3": 1}


def test_gradients_that_wait_are_reduced_once_and_weights_that_stay_are_gathered_once_a_micro_batch():
    job = a_job(layout=Layout(16, zero=3, shard=16), stack="fsdp2")
    assert {name[1] for name in count(job, "R")} == set("0123")
    later = replace(job, sharding=Sharding(reduces_once=True))
    assert {name[1] for name in count(later, "R")} == {"3"}
    kept = replace(job, sharding=Sharding(reshards=False))
    assert 2 * count(kept, "G").total() == count(job, "G").total()


def test_a_forward_pass_waits_for_the_gradients_of_the_pass_before():
    """FSDP2 and DeepSpeed end a backward pass when its gradients are reduced."""
    job = a_job(layout=Layout(16, zero=2, shard=16), stack="deepspeed", node_gbit=100)
    lanes = simulation.simulate(job).lanes
    reduced = [task.end for task in lanes[Lane("", 0, "network")] if task.kind == "R"]
    begins = {task.label: task.start for task in reversed(lanes[Lane("", 0, "compute")]) if task.kind == "F"}
    per_pass = len(reduced) // job.grad_accum
    assert [begins[str(number)] for number in (1, 2, 3)] == reduced[per_pass - 1 : -1 : per_pass]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_the_idle_share_of_a_pipeline_is_its_bubble(schedule, monkeypatch):
    """With stages of equal time and free messages: (p - 1) / (v m + p - 1)."""
    monkeypatch.setattr(step_time, "send_seconds", lambda *_: 0.0)
    job = a_job(replace(GPT, vocab=1), Layout(1, pp=4, schedule=schedule), grad_accum=8, stack="fsdp2")
    found = simulation.simulate(job)
    tasks = [each for each in found.lanes[Lane("", 0, "compute")] if each.kind != "U"]
    idle = 1 - sum(each.seconds for each in tasks) / tasks[-1].end
    assert idle == pytest.approx(bubble(schedule, 4, 8, 2 if "Inter" in schedule else 1), rel=0.01)


def test_a_slow_node_holds_all_replicas_up():
    job = a_job(layout=Layout(16, zero=3, shard=16), seq=8192)
    healthy, slow = (simulation.simulate(job, factor) for factor in (1.0, 1.2))
    update = healthy.lanes[Lane("", 0, "compute")][-1].seconds
    assert {lane.replica for lane in slow.lanes} == {"", "slow"}
    assert (slow.seconds - update) / (healthy.seconds - update) == pytest.approx(1.2, abs=0.05)
    piped = replace(job, layout=Layout(8, pp=2, schedule="1F1B"))
    factors = [simulation.simulate(piped, factor).lanes[Lane("slow", 1, "compute")][0].seconds for factor in (1.2, 1.5)]
    assert factors[0] == factors[1]  # the second stage is on other nodes


def test_the_command_simulates_on_a_cluster_file(tmp_path, capsys):
    path, drawn = tmp_path / "cluster.yaml", tmp_path / "step.svg"
    path.write_text("gpu: H100-80GB\nnodes: 4\ngpus_per_node: 8\nreliability: {slow_nodes: 1, slow_factor: 1.2}\n")
    machines = cluster_file.cluster(str(path))
    assert machines.reliability == Reliability(slow_nodes=1, slow_factor=1.2)
    command = ["plan", MODEL, "--cluster", str(path), "--strategy", "configs/fsdp.yaml", "checkpoint.every_steps=50"]
    assert main([*command, "--simulate", "--svg", str(drawn)]) == 0
    shown = capsys.readouterr().out.partition("Simulated step: ")[2]
    assert "A node that takes 1.2 x as long" in shown and "slow compute |" in shown
    assert "one in 1,584 h (nodes: 4, each after 6,334 h" in shown
    assert "checkpoint.every_steps=50 (recipe): goodput 100.0%" in shown
    tasks = list(ElementTree.fromstring(drawn.read_text()).iter("{http://www.w3.org/2000/svg}rect"))
    assert len(tasks) > 100 and not any(float(each.attrib["width"]) < 0 for each in tasks)
    path.write_text(cluster_file.text(machines))
    assert cluster_file.cluster(str(path)).reliability == machines.reliability
    assert main([*command, "--simulate", "--layout", "--svg", str(drawn)]) == 2
    path.write_text("gpu: H100-80GB\nnodes: 4\ngpus_per_node: 8\nreliability: {mtbf: 1}\n")
    assert main([*command, "--simulate"]) == 2
    assert "cluster.yaml:4: reliability.mtbf: unknown key" in capsys.readouterr().err


def test_columns_of_the_timeline_show_what_fills_them():
    lane = Lane("", 0, "compute")
    tasks = [Task(lane, "F", 1.0), Task(lane, "B", 2.0), Task(lane, "U", 1.0)]
    shown = timeline.text(simulation.Simulated(events.run(tasks)))
    assert shown.splitlines()[0] == f"compute |{'F' * 25}{'B' * 50}{'U' * 25}|   0% idle"


def test_no_checkpoints_are_said_to_lose_all(capsys):
    text, _ = timeline.report(a_job(layout=Layout(8)), built_in("h100x8"), Checkpoint(every_steps=0))
    assert "checkpoint.every_steps=0 (recipe): a failure loses all work" in text
