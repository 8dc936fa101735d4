"""Run complete.py with Accelerate's Accelerator and with samecurve's, and write accelerate_script.md.

python -m benchmarks.accelerate_script.compare
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.machine import commit, description
from benchmarks.markdown import table
from benchmarks.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "accelerate_script.md"
PROCESSES = (1, 2, 4)
LIMIT_SECONDS = 120
GLOBAL_BATCH, RESUME_AT = 8, 14  # batches: the 4th of 10 of the second epoch, behind which an optimizer step ends
# flags of complete.py by the name of the row; a process reads batch_size rows unless batches are split
CLASSES = {
    "accelerate": lambda world: ["--batch_size", str(GLOBAL_BATCH // world)],
    "accelerate, `split_batches=True, use_seedable_sampler=True`": lambda world: [
        "--batch_size",
        str(GLOBAL_BATCH),
        "--split_batches",
    ],
    "samecurve": lambda world: ["--batch_size", str(GLOBAL_BATCH), "--accelerator_from", "samecurve"],
}


def run(flags: list[str], world: int, folder: Path, *more: str, again: bool = True) -> dict[str, dict[int, float]]:
    """Return grad_norm and eval_loss by optimizer step, as the tracker has them.

    A start that fails is repeated once: on a busy machine, processes over gloo may hang or abort when they end.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port", str(free_port())]
    launcher = launcher if world > 1 else []
    command = [sys.executable, *launcher, "benchmarks/accelerate_script/complete.py", *flags, *more]
    command += ["--output_dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as started:
        try:
            output, _ = started.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            started.terminate()  # torchrun ends its processes
            output = f"{started.communicate()[0]}\nnot ended after {LIMIT_SECONDS} s"
    if started.returncode:
        print(f"{' '.join(command)}\n{output}", file=sys.stderr, flush=True)
        if not again:
            sys.exit(1)
        shutil.rmtree(folder)
        return run(flags, world, folder, *more, again=False)
    (events,) = {path.parent for path in folder.rglob("events.out.tfevents.*") if path.parent.name == "logs"}
    log = EventAccumulator(str(events)).Reload()
    return {tag: {event.step: event.value for event in log.Scalars(tag)} for tag in ("grad_norm", "eval_loss")}


def largest(curve: dict[str, dict[int, float]], reference: dict[str, dict[int, float]], tag: str) -> str:
    """Largest relative difference in the steps that `curve` has."""
    differences = [abs(value / reference[tag][step] - 1) for step, value in curve[tag].items()]
    return f"{max(differences):.1e}"


def main() -> None:
    curves, resumes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index, (name, flags_of) in enumerate(CLASSES.items()):
            whole = {}
            for world in PROCESSES:
                folder = Path(scratch, f"{index}_{world}")
                every = ("--checkpointing_steps", str(RESUME_AT))
                curve = whole[world] = run(flags_of(world), world, folder, *every)
                final = max(curve["eval_loss"])
                differences = [largest(curve, whole[1], tag) for tag in ("grad_norm", "eval_loss")]
                curves.append((name, world, *differences, f"{curve['eval_loss'][final]:.7f}"))
                print(*curves[-1], sep="\t", flush=True)
            for before, after in ((1, 1), (2, 2), (2, 4), (4, 1)):
                source = ("--resume_from_checkpoint", str(Path(scratch, f"{index}_{before}", f"step_{RESUME_AT}")))
                folder = Path(scratch, f"{index}_{before}_{after}")
                curve = run(flags_of(after), after, folder, *source)
                differences = [largest(curve, whole[before], tag) for tag in ("grad_norm", "eval_loss")]
                resumes.append((name, before, after, *differences))
                print(*resumes[-1], sep="\t", flush=True)
    PAGE.write_text(page(curves, resumes))


def page(curves: list[tuple], resumes: list[tuple]) -> str:
    run_columns = ("class", "processes", "gradient norm", "evaluation loss", "last evaluation loss")
    resume_columns = ("class", "processes before", "and after", "gradient norm", "evaluation loss")
    return f"""# A script for Accelerate with one import changed

Measured on {date.today()} at {commit("benchmarks/accelerate_script.md")} by
`python -m benchmarks.accelerate_script.compare`: {description()}; gloo.

[`complete.py`](accelerate_script/complete.py), in the manner of Accelerate's `complete_nlp_example.py`, tags tokens of
79 rows with 1 to 12 labels each: batches of {GLOBAL_BATCH} rows, accumulation of 2, a linear schedule, no dropout, a
checkpoint and a TensorBoard log. The class `Accelerator` comes from `accelerate` or from `samecurve`. In the first rows
`--batch_size` is {GLOBAL_BATCH} divided by the number of processes, as for Accelerate's users. Where batches are split,
as `samecurve` does by default, it is {GLOBAL_BATCH}. Nothing else differs.

## The curve on 1, 2 and 4 processes

Largest relative difference from the same class on one process, over 15 optimizer steps and 3 evaluations.

{table(run_columns, curves)}

Accelerate averages the mean losses of micro-batches and processes; with a varying number of labels, their division
among processes changes the gradient. Without `split_batches` the rows of a step depend on the number of processes, too.

## A resume within the second epoch

From the checkpoint after batch {RESUME_AT}, with `skip_first_batches`. Largest relative difference from the run that
was not interrupted, on the number of processes before, over the 8 optimizer steps and 2 evaluations that follow.

{table(resume_columns, resumes)}
"""


if __name__ == "__main__":
    main()
