"""Event-by-event simulation of one step: what each stage computes and sends, on links of a latency and a bandwidth.

A message or collective takes alpha + bytes / beta, the latency and the bus bandwidth of the level that its ranks cross.
Replicas are alike, so that one is simulated, and a second one beside it where a node is slow; a collective begins when
both are ready. Computation and a collective beside it slow each other down, because both use the same processors and
memory: each loses the share of the time that the stack's `overlap` does not hide. A message between stages travels
beside the computation of both, which step_time.py counts as exposed: of deep pipelines with many small messages, the
simulated step is the shorter one, by up to 30 % with 32 stages over 256 GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samecurve.planner import data_parallel_time, events, kernels, step_time
from samecurve.planner.events import Lane, Task
from samecurve.planner.job import Job
from samecurve.planner.profiles import BY_COST, profile
from samecurve.planner.stages import Stage, stages
from samecurve.strategy import timetables
from samecurve.strategy.pipeline_schedules import SCHEDULES
from samecurve.strategy.timetables import Pass

PARTS = 16  # of a pass, between which collectives can begin: at most that many groups of layers
# What other stacks' schedules are simulated as; zero-bubble's own ones do not fold the stages.
SAME_ORDER = {"interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zb-1p": "ZBVZeroBubble", "zb-2p": "ZBVZeroBubble"}
BACKWARD = {"B": 1.0, "I": 0.5, "W": 0.5}  # share of a backward pass


@dataclass(frozen=True)
class Costs:
    """Seconds of one rank of a pipeline.

    Attributes:
        forward, backward: of a pass of a micro-batch, with the collectives inside its layers.
        gather_first: of the weights in front of the step's first pass, where they stay until its last one.
        gather_forward, gather_backward: of the weights for one pass, where they do not; 0 without ZeRO-3.
        reduce: of the gradients, after each backward pass or after the last one.
        reduces_each: which of the two.
        update: of the optimizer, and the host's time.
        gather_updated: of the weights behind the update, under ZeRO-1 and 2.
        parts: that a pass is divided into.
        held_up: share of the time side by side that computation and a collective both lose; at 1 they take turns.
    """

    forward: float
    backward: float
    gather_first: float
    gather_forward: float
    gather_backward: float
    reduce: float
    reduces_each: bool
    update: float
    gather_updated: float
    parts: int
    held_up: float

    def of(self, work: Pass, is_last: bool) -> tuple[float, float, float]:
        """Return the seconds of a pass of the step: to gather its weights, to compute, to reduce its gradients."""
        if work.kind == "F":
            return self.gather_forward, self.forward, 0
        gather = 0 if work.kind == "W" else self.gather_backward  # I and its W follow one another
        reduces = work.kind in "BW" and (self.reduces_each or is_last)
        return gather, self.backward * BACKWARD[work.kind], self.reduce if reduces else 0


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
    first = 1 / 3 if job.repeats_layers else 1 / 2  # of the collectives inside a layer
    exchanged = time.tensor_parallel + time.context_parallel + time.expert_parallel
    forward = one.forward / one.total * time.compute + first * exchanged
    sharded, once = job.layout.zero == 3, job.sharding.gathers_once
    gathers, reduces = data_parallel_time.transfers(job, stage, constants)
    gather, reduced = (sum(each.seconds for each in found) for found in (gathers, reduces))
    again = data_parallel_time.gathered_again(job, stage, gathers, constants)
    chunks = SCHEDULES[_schedule(job)].stages_per_rank if job.layout.pp > 1 else 1
    each_pass = sharded and not once
    reduces_each = not job.sharding.reduces_once and (sharded or data_parallel_time.reduces_each_micro_batch(job))
    return Costs(
        forward=forward / count / chunks,
        backward=(time.compute + exchanged - forward) / count / chunks,
        gather_first=gather if once else 0,
        gather_forward=gather / chunks if each_pass else 0,
        gather_backward=again.seconds / chunks if again and each_pass else 0,
        reduce=reduced / chunks if reduces_each else reduced,
        reduces_each=reduces_each,
        update=time.optimizer + time.offload + time.host,
        gather_updated=0 if sharded or once else gather,
        parts=max(1, min(PARTS, round(stage.layers / chunks))),
        held_up=1 - data_parallel_time.hidden_share(job, constants),
    )


def _tasks(
    rank: int,
    order: Sequence[Pass],
    costs: Costs,
    replicas: Mapping[str, float],
    ends: dict[tuple[str, Pass], tuple[Task, Task]],
) -> list[Task]:
    """List what one rank of the pipeline does in all replicas, and note the ends of its passes."""
    computed: dict[str, list[Task]] = {replica: [] for replica in replicas}
    waited = _collective("G", costs.gather_first, rank, replicas, [])  # what the next pass begins behind
    found, behind = [*waited], []  # gradients of the part before, whose turn comes after the next weights
    for work in order:
        gather, whole, reduce = costs.of(work, is_last=work is order[-1])
        overlaps = gather + reduce > 0 and costs.held_up < 1
        parts = costs.parts if overlaps else 1
        lost = costs.held_up * min(whole, gather + reduce) if overlaps else 0  # of both, while they run side by side
        longer = 1 + lost / (gather + reduce) if lost else 1
        # weights come one part ahead of their computation, as memory.py counts them
        ahead = 2 if overlaps else 1
        for part in range(parts):
            before = [tasks[-ahead] for tasks in computed.values() if len(tasks) >= ahead]
            gathers = _collective("G", longer * gather / parts, rank, replicas, before)
            found += [*gathers, *behind]
            for index, (replica, factor) in enumerate(replicas.items()):
                seconds = (factor * whole + lost) / parts
                needs = [(each[index], 0.0) for each in (gathers, [] if part else waited) if each]
                task = Task(Lane(replica, rank, "compute"), work.kind, seconds, needs, str(work.micro_batch))
                computed[replica].append(task)
                ends[replica, work] = (ends[replica, work][0] if part else task, task)
            now = [tasks[-1] for tasks in computed.values()]
            found += now
            behind = _collective("R", longer * reduce / parts, rank, replicas, now)
        waited = behind  # as FSDP2 and DeepSpeed end a backward pass
    updates = [
        Task(Lane(replica, rank, "compute"), "U", costs.update, [(waited[index], 0.0)] if waited else [])
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
