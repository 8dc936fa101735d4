"""Run complete.py with Accelerate's Accelerator and with samecurve's, and write accelerate_script.md.

python -m benchmarks.accelerate_script.compare
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.machine import commit, description
from benchmarks.markdown import table
from samecurve.distributed.network import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "accelerate_script.md"
PROCESSES = (1, 2, 4)
RESUMES = ((2, 2), (2, 4), (4, 1))  # processes before and after
STEPS, PATIENCE_SECONDS = 15, 10
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


def run(flags: list[str], world: int, folder: Path, *more: str) -> tuple[dict[str, dict[int, float]], bool]:
    """Return grad_norm and eval_loss by optimizer step, as the tracker has them, and whether the processes ended.

    Processes that have logged everything and hang at their end are ended, see the page.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port", str(free_port())]
    command = [sys.executable, *(launcher if world > 1 else ()), "benchmarks/accelerate_script/complete.py"]
    command += [*flags, *more, "--output_dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    curve, hangs, seconds = {}, False, 0
    with open(f"{folder}.txt", "w+") as output:
        started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        while started.poll() is None:
            time.sleep(1)
            curve = read_curve(folder)
            seconds += STEPS in curve.get("eval_loss", ())
            if seconds == PATIENCE_SECONDS:
                hangs = True
                started.terminate()  # torchrun ends its processes
        output.seek(0)
        if started.returncode and not hangs:
            sys.exit(f"{' '.join(command)}\n{output.read()}")
    return read_curve(folder), not hangs


def read_curve(folder: Path) -> dict[str, dict[int, float]]:
    events = {path.parent for path in folder.rglob("events.out.tfevents.*") if path.parent.name == "logs"}
    logs = [EventAccumulator(str(path)).Reload() for path in events]
    return {
        tag: {event.step: event.value for event in log.Scalars(tag)} for log in logs for tag in log.Tags()["scalars"]
    }


def largest(curve: dict[str, dict[int, float]], reference: dict[str, dict[int, float]], tag: str) -> str:
    """Largest relative difference in the steps that `curve` has."""
    differences = [abs(value / reference[tag][step] - 1) for step, value in curve[tag].items()]
    return f"{max(differences):.1e}"


def main() -> None:
    curves, resumes, hangs = [], [], dict.fromkeys(CLASSES, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for index, (name, flags_of) in enumerate(CLASSES.items()):
            whole = {}
            for world in PROCESSES:
                folder = Path(scratch, f"{index}_{world}")
                every = ("--checkpointing_steps", str(RESUME_AT))
                curve, ended = run(flags_of(world), world, folder, *every)
                whole[world], hangs[name] = curve, hangs[name] + (not ended)
                final = max(curve["eval_loss"])
                differences = [largest(curve, whole[1], tag) for tag in ("grad_norm", "eval_loss")]
                curves.append((name, world, *differences, f"{curve['eval_loss'][final]:.7f}"))
                print(*curves[-1], sep="\t", flush=True)
            for before, after in RESUMES:
                source = ("--resume_from_checkpoint", str(Path(scratch, f"{index}_{before}", f"step_{RESUME_AT}")))
                folder = Path(scratch, f"{index}_{before}_{after}")
                curve, ended = run(flags_of(after), after, folder, *source)
                hangs[name] += not ended
                differences = [largest(curve, whole[before], tag) for tag in ("grad_norm", "eval_loss")]
                resumes.append((name, before, after, *differences))
                print(*resumes[-1], sep="\t", flush=True)
    PAGE.write_text(page(curves, resumes, hangs))


def page(curves: list[tuple], resumes: list[tuple], hangs: dict[str, int]) -> str:
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
Without `use_seedable_sampler` a resume reads the rows in another order.

## A resume within the second epoch

From the checkpoint after batch {RESUME_AT}, with `skip_first_batches`. Largest relative difference from the run that
was not interrupted, on the number of processes before, over the 8 optimizer steps and 2 evaluations that follow.

{table(resume_columns, resumes)}

## Ends

A process under DDP over gloo may hang at its end, when the last reference to its group goes (torch 2.13); `samecurve`
keeps one. Starts, of {len(PROCESSES) + len(RESUMES)} each, that had logged everything and did not end within
{PATIENCE_SECONDS} s: {", ".join(f"{count} ({name})" for name, count in hangs.items())}.
"""


if __name__ == "__main__":
    main()
