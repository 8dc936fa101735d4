"""Event-by-event simulation of one step: what each stage computes and sends, on links of a latency and a bandwidth.

A message or collective takes alpha + bytes / beta, the latency and the bus bandwidth of the level that its ranks cross.
Replicas are alike, so that one is simulated, and a second one beside it where a node is slow; a collective begins when
both are ready. Computation and a collective beside it slow each other down, because both use the same processors and
memory: each loses the share of the time that the stack's `overlap` does not hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samecurve.planner import data_parallel_time, events, kernels, step_time, timetables
from samecurve.planner.events import Lane, Task
from samecurve.planner.job import Job
from samecurve.planner.profiles import BY_COST, profile
from samecurve.planner.stages import Stage, stages
from samecurve.planner.timetables import Pass
from samecurve.strategy.pipeline_schedules import SCHEDULES

PARTS = 8  # of a pass, between which collectives can begin: that many groups of layers
# What other stacks' schedules are simulated as; zero-bubble's own ones do not fold the stages.
SAME_ORDER = {"interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zb-1p": "ZBVZeroBubble", "zb-2p": "ZBVZeroBubble"}
BACKWARD = {"B": 1.0, "I": 0.5, "W": 0.5}  # share of a backward pass


@dataclass(frozen=True)
class Costs:
    """Seconds of one rank of a pipeline.

    Attributes:
        forward, backward: of a micro-batch, with the collectives inside its layers.
        gather: of the weights for one pass, under ZeRO-3; 0 otherwise.
        reduce: of all gradients.
        reduces_each: whether that is done for each micro-batch, not once.
        update: of the optimizer, and the host's time.
        gather_updated: of the weights behind the update, under ZeRO-1 and 2.
        parts: that a pass is divided into.
        held_up: share of the time side by side that computation and a collective both lose.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    reduces_each: bool
    update: float
    gather_updated: float
    parts: int
    held_up: float


@dataclass(frozen=True)
class Simulated:
    """A simulated step: tasks by lane, and the seconds that it took."""

    lanes: Mapping[Lane, Sequence[Task]]

    @property
    def seconds(self) -> float:
        return max(tasks[-1].end for tasks in self.lanes.values())

    def idle_share(self, lane: Lane) -> float:
        return 1 - sum(task.seconds for task in self.lanes[lane]) / self.seconds


def simulate(job: Job, slow_factor: float = 1.0) -> Simulated:
    """Simulate a step in which the first node takes `slow_factor` times as long."""
    # a single replica is itself the slow one
    replicas = {"": 1.0} if job.layout.dp > 1 or slow_factor == 1 else {}
    if slow_factor != 1:
        replicas["slow"] = slow_factor
    ranks = [stage for stage in stages(job, job.stack in BY_COST) for _ in range(stage.ranks)]
    orders = [_order(job, rank) for rank in range(len(ranks))]
    tasks: list[Task] = []
    ends: dict[tuple[str, Pass], tuple[Task, Task]] = {}  # first and last part of a pass in a replica
    for rank, stage in enumerate(ranks):
        on_first_node = rank * job.layout.stride("pp") < job.gpus_per_node
        factors = {replica: factor if on_first_node else 1.0 for replica, factor in replicas.items()}
        tasks += _tasks(rank, orders[rank], _costs(job, stage), factors, ends)
    _connect(job, ends)
    return Simulated(events.run(tasks))


def _schedule(job: Job) -> str:
    name = SAME_ORDER.get(job.layout.schedule, job.layout.schedule)
    return name if name in SCHEDULES else "1F1B"


def _order(job: Job, rank: int) -> list[Pass]:
    """List a rank's passes; without a pipeline, each micro-batch goes forward and backward before the next one."""
    if job.layout.pp == 1:
        return [Pass(0, kind, number) for number in range(job.grad_accum) for kind in "FB"]
    entries = timetables.order(_schedule(job), rank, job.layout.pp, job.grad_accum)
    return [work for entry in entries for work in entry]


def _costs(job: Job, stage: Stage) -> Costs:
    constants, count = profile(job.stack), job.grad_accum
    time = step_time.stage_time(job, stage, constants)
    one = kernels.layer(job, constants)
    first = 1 / 3 if job.checkpointing == "full" else 1 / 2  # of the collectives inside a layer
    exchanged = time.tensor_parallel + time.context_parallel + time.expert_parallel
    forward = one.forward / one.total * time.compute + first * exchanged
    sharded = job.layout.zero == 3
    gather, reduced = data_parallel_time.data_collectives(job, stage, constants)
    chunks = SCHEDULES[_schedule(job)].stages_per_rank if job.layout.pp > 1 else 1
    return Costs(
        forward / count / chunks,
        (time.compute + exchanged - forward) / count / chunks,
        gather if sharded else 0,
        reduced,
        sharded or data_parallel_time.reduces_each_micro_batch(job),
        time.optimizer + time.offload + time.host,
        0 if sharded else gather,
        max(1, min(PARTS, round(stage.layers / chunks))),
        1 - data_parallel_time.hidden_share(job, constants),
    )


def _tasks(
    rank: int,
    order: Sequence[Pass],
    costs: Costs,
    replicas: Mapping[str, float],
    ends: dict[tuple[str, Pass], tuple[Task, Task]],
) -> list[Task]:
    """List what one rank of the pipeline does in all replicas, and note the ends of its passes."""
    found: list[Task] = []
    computed: dict[str, list[Task]] = {replica: [] for replica in replicas}
    behind: list[Task] = []  # gradients of the part before, whose turn comes after the next weights
    reduced: list[Task] = []
    for work in order:
        whole = costs.forward if work.kind == "F" else costs.backward * BACKWARD[work.kind]
        reduce = costs.reduce if work.kind in "BW" and (costs.reduces_each or work is order[-1]) else 0
        parts = costs.parts if costs.gather or reduce else 1
        lost = costs.held_up * min(whole, costs.gather + reduce)  # of both, while they run side by side
        longer = 1 + lost / (costs.gather + reduce) if lost else 1
        for part in range(parts):
            # weights come one part ahead of their computation, as memory.py counts them
            two_before = [tasks[-2] for tasks in computed.values() if len(tasks) > 1]
            gathers = _collective("G", longer * costs.gather / parts, rank, replicas, two_before)
            found += [*gathers, *behind]
            for index, (replica, factor) in enumerate(replicas.items()):
                seconds = (factor * whole + lost) / parts
                needs = [(gathers[index], 0.0)] if gathers else []
                task = Task(Lane(replica, rank, "compute"), work.kind, seconds, needs, str(work.micro_batch))
                computed[replica].append(task)
                ends[replica, work] = (ends[replica, work][0] if part else task, task)
            now = [tasks[-1] for tasks in computed.values()]
            found += now
            behind = _collective("R", longer * reduce / parts, rank, replicas, now)
            reduced = behind or reduced
    updates = [
        Task(Lane(replica, rank, "compute"), "U", costs.update, [(reduced[index], 0.0)] if reduced else [])
        for index, replica in enumerate(replicas)
    ]
    return [*found, *behind, *updates, *_collective("G", costs.gather_updated, rank, replicas, updates)]


def _collective(kind: str, seconds: float, rank: int, replicas: Iterable[str], needs: Sequence[Task]) -> list[Task]:
    """Build a collective: a task of each replica's network that waits for all of them; none if it takes no time."""
    lanes = [Lane(replica, rank, "network") for replica in replicas] if seconds else []
    return [Task(lane, kind, seconds, [(each, 0.0) for each in needs]) for lane in lanes]


def _connect(job: Job, ends: Mapping[tuple[str, Pass], tuple[Task, Task]]) -> None:
    """Let each stage wait for the messages of its neighbours."""
    if job.layout.pp == 1:
        return
    learnt = job.calibration.time_factor("pipeline_sends", job.library) if job.calibration else 1.0
    send = learnt * step_time.send_seconds(job, profile(job.stack))
    last_stage = SCHEDULES[_schedule(job)].num_stages(job.layout.pp) - 1
    outputs = {
        (replica, *timetables.output(work)): last for (replica, work), (_, last) in ends.items() if work.kind != "W"
    }
    for (replica, work), (first, _) in ends.items():
        needed = timetables.needed(work, last_stage)
        if needed:
            before = outputs[(replica, *needed)]
            first.needs.append((before, 0.0 if before.lane == first.lane else send))
