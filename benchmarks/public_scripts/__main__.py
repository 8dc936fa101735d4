"""Judge published scripts by `prove`, unchanged, with small models and data in the place of theirs.

    python -m benchmarks.public_scripts --accelerate CHECKOUT --transformers CHECKOUT FOLDER

CHECKOUT is a clone, for its `examples`. FOLDER gets the models, the data, and for each script its working folder and
its verdict as JSON. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, description
from benchmarks.markdown import table
from benchmarks.public_scripts.cases import CASES, GLUE, TRAINER, Case
from benchmarks.public_scripts.data import write_data, write_packages
from benchmarks.public_scripts.page import NOTES, PAGE
from samecurve.distributed.network import free_port

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("script", "strategies", "verdict", "cause in the script or its library", "s")
SPLIT = "--average_tokens_across_devices False"
# what run_glue.py is run with by hand: processes, rows of each, more arguments
BY_HAND = {
    "1 process, 8 rows": (1, 8, ""),
    "2 processes, 4 rows each": (2, 4, ""),
    f"the same, `{SPLIT}`": (2, 4, SPLIT),
}


def write_inputs(folder: Path) -> None:
    """Write models, data and packages, unless an earlier call has."""
    if (folder / "packages").is_dir():
        return
    from benchmarks.public_scripts.models import write_models  # torch takes seconds

    inputs = folder / "inputs"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    write_models(inputs)
    write_data(inputs)
    write_packages(folder / "packages")


def script_of(case: Case, options: argparse.Namespace) -> Path:
    return (vars(options)[case.library] / "examples" / case.path).resolve()


def run(command: list[str], script: Path, work: Path, folder: Path) -> tuple[int, str]:
    """Returns the exit code and what the command prints, started in a fresh folder that has the inputs."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "inputs", work)
    packages = [ROOT, folder / "packages" / "evaluate"]
    packages += [folder / "packages" / "tpu"] if "DistributedType.TPU" in script.read_text() else []
    fixed = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "hub")}
    fixed |= {"PYTHONPATH": os.pathsep.join(map(str, packages))}
    done = subprocess.run(command, cwd=work, env=os.environ | fixed, capture_output=True, text=True)
    (work / "printed.txt").write_text(done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


def judge(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the certificate, or what is printed where there is none, and the seconds."""
    script, folder = script_of(case, options), options.folder.resolve()
    kept = folder / "verdicts" / f"{script.stem}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    work = folder / "work" / script.stem
    prove = [sys.executable, "-m", "samecurve", "prove", str(script), "--strategies", ",".join(case.strategies)]
    started = time.monotonic()
    _, printed = run([*prove, "--", *case.arguments.split()], script, work, folder)
    verdict: dict[str, Any] = {"seconds": round(time.monotonic() - started)}
    certificate = work / "runs" / "prove" / script.stem / "certificate.json"
    if certificate.exists():
        verdict["certificate"] = json.loads(certificate.read_text())
    else:
        verdict["printed"] = printed[-4000:]
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(verdict, indent=1))
    print(script.name, printed[-4000:], sep="\n", file=sys.stderr, flush=True)
    return verdict


def without_places(reason: str) -> str:
    """The reason why a run was not judged, without this machine's folders, in one line."""
    reason = re.sub(r",? see \S+$", "", reason.strip())
    reason = re.sub(r"(/[^\s:,'\"]+)+/", "", reason)
    return reason.replace("|", "\\|").replace("\n", " ")


def answer(case: Case, strategy: str, verdict: dict[str, Any]) -> tuple[str, str]:
    """The cells of the verdict and of its cause."""
    content = verdict.get("certificate")
    if content is None:
        last = verdict["printed"].strip().splitlines()[-1]
        return f"does not run: {without_places(last)}", case.cause(strategy, "")
    if content["shows_nothing"]:
        return f"FAIL: {content['shows_nothing']}", case.cause(strategy, "")
    seen = next(line for line in content["strategies"] if line["strategy"] == strategy)
    if reason := seen["reason"]:
        start = "does not run: " if "ended with code" in reason else "not judged: "
        return start + without_places(reason.removeprefix("not judged: ")), case.cause(strategy, "")
    found = dict.fromkeys(finding["kind"] for finding in (*content["problems"], *seen["findings"]))
    causes = dict.fromkeys(filter(None, (case.cause(strategy, kind) for kind in found)))
    return (f"FAIL: {', '.join(found)}" if found else "PASS"), "; ".join(causes)


def rows_of(case: Case, verdict: dict[str, Any]) -> list[list[str]]:
    lines = [["", strategy, *answer(case, strategy, verdict), ""] for strategy in case.strategies]
    lines[0][0], lines[0][-1] = f"`{case.script}`", str(verdict["seconds"])
    return lines


def by_hand(options: argparse.Namespace) -> list[list[str]]:
    """Two steps of run_glue.py without dropout, by torchrun: the losses and gradient norms that Trainer logs."""
    folder = options.folder.resolve()
    kept, case = folder / "verdicts" / "by_hand.json", next(case for case in CASES if case.script == "run_glue.py")
    if kept.exists():
        return json.loads(kept.read_text())
    script, rows = script_of(case, options), []
    plain = f"{GLUE} {TRAINER} --use_cpu --max_steps 2 --logging_steps 1".replace(
        "bert-base-cased", "bert-without-dropout"
    )
    for name, (processes, batch, more) in BY_HAND.items():
        words = [*plain.split(), "--per_device_train_batch_size", str(batch), *more.split()]
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port"]
        work = folder / "work" / "by_hand"
        code, printed = run([sys.executable, *torchrun, str(free_port()), str(script), *words], script, work, folder)
        if code:
            raise RuntimeError(f"{name}: {printed[-4000:]}")
        state = json.loads((work / "out" / "trainer_state.json").read_text())
        steps = [line for line in state["log_history"] if "grad_norm" in line]
        rows.append([name, *(f"{line[key]:.5g}" for key in ("loss", "grad_norm") for line in steps)])
        print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    kept.write_text(json.dumps(rows))
    return rows


def checkout(path: Path, file: str, name: str) -> str:
    """Version and date of a checkout, with a link to its commit."""
    found = re.search(r"__version__ = \"(.+)\"", (path / file).read_text())
    done = subprocess.run(["git", "log", "-1", "--format=%H %as"], cwd=path, capture_output=True, text=True, check=True)
    hashed, day = done.stdout.split()
    version = found[1] if found else "of no known version"
    return f"[{name} {version} of {day}](https://github.com/huggingface/{name}/tree/{hashed}/examples)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for inputs, runs and verdicts; an earlier call's is completed")
    parser.add_argument("--accelerate", type=Path, required=True, help="a checkout")
    parser.add_argument("--transformers", type=Path, required=True, help="a checkout")
    parser.add_argument("--only", default="", help="scripts with this in their name; no page is written then")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "public_scripts.md", help="of the page")
    options = parser.parse_args()
    write_inputs(options.folder.resolve())
    rows = [row for case in CASES if options.only in case.script for row in rows_of(case, judge(case, options))]
    if options.only:
        return
    columns = ("`run_glue.py` by hand", "first loss", "second", "first norm", "second")
    facts = {"today": date.today(), "commit": commit("benchmarks/public_scripts.md"), "machine": description()}
    facts |= {
        "accelerate": checkout(options.accelerate, "src/accelerate/__init__.py", "accelerate"),
        "transformers": checkout(options.transformers, "src/transformers/__init__.py", "transformers"),
        "table": table(COLUMNS, rows),
        "notes": "\n".join(text for cause, text in NOTES.items() if any(cause in row[3].split("; ") for row in rows)),
        "by_hand": table(columns, by_hand(options)),
    }
    options.output.write_text(PAGE.format(**facts), encoding="utf-8")


if __name__ == "__main__":
    main()
