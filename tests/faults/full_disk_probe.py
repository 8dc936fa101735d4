"""Runs commands on a disk that is full from the n-th write on, for every STRIDE-th n. Prints a JSON line for each.

    LD_PRELOAD=full_disk.so python full_disk_probe.py full_disk.so FOLDER CASE=STRIDE...

One process imports the libraries and forks a child for each n.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import deepspeed  # noqa: F401 - before the forks
import peft  # noqa: F401 - as above
from harness import RECIPE, ROOT

import samecurve.cli.commands as cli
import train
from samecurve.inference import generation, merge_lora, predictions  # noqa: F401 - before the forks
from samecurve.run import lifecycle
from samecurve.training import startup  # noqa: F401 - as above

AGAIN = 40  # of the other commands, so many are repeated
BASE = {"output_dir": "run", "steps": 2, "checkpoint": {"every_steps": 1}, "evaluate": {"every_steps": 0}}
DATA = {"path": "data.jsonl", "cache_dir": "cache", "validation_fraction": 0.1, "packing": False}
LORA = ["output_dir=lora", "model={path: run/model}", "tokenizer={}", "adapter.name=lora"]
MLM = ["output_dir=mlm", "task=mlm", "model={config: {model_type: bert, hidden_size: 32, num_attention_heads: 2}}"]


def train_run(*changes: str) -> Callable[[], int]:
    def work() -> int:
        sys.argv[1:] = ["recipe.json", *changes]
        return lifecycle.exit_code(train.main)

    return work


def command(*words: str) -> Callable[[], int]:
    return lambda: cli.main(words)


# the work, and the file that it leaves behind when it has succeeded
CASES = {
    "train": (train_run("output_dir=new", "data.cache_dir=cold"), "new/model/model.safetensors"),
    "export": (command("export", "run", "--dtype", "bf16", "--output", "o"), "o/README.md"),
    "checkpoint": (command("export", "run", "--checkpoint", "latest", "--output", "o"), "o/README.md"),
    "merge": (command("merge", "lora", "--dtype", "bf16", "--output", "o"), "o/README.md"),
    "report": (command("report", "run", "--html", "o.html"), "o.html"),
    "generate": (command("generate", "run", "--prompt", "one", "--max_new_tokens", "2"), None),
    "predict": (command("predict", "mlm", "one [MASK]", "--json", "o.jsonl"), "o.jsonl"),
    "evaluate": (command("evaluate", "run", "--json", "o.json"), "o.json"),
    "inspect": (command("inspect", "recipe.json", "--html", "o.html"), "o.html"),
    "plan": (
        command("plan", "run/model", "batch.sequence_length=64", "--cluster", "h100x8", "--output", "o"),
        "o/recipe.yaml",
    ),
}


def main(library: str, folder: Path, strides: dict[str, int]) -> None:
    disk = ctypes.CDLL(library).full_disk
    disk.argtypes, disk.restype = [ctypes.c_long, ctypes.c_char_p], ctypes.c_long
    os.environ["HOME"] = str(folder / "base")
    base = folder / "base"
    base.mkdir()
    os.chdir(base)
    for name in ("configs", "ds_configs"):
        Path(name).symlink_to(ROOT / name)
    words = "one two three four five six seven eight nine ten".split()
    rows = [{"text": " ".join(random.Random(i).choices(words, k=40))} for i in range(40)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.json").write_text(json.dumps({**RECIPE, **BASE, "data": DATA, "schedule": {}}))
    for name, stride in strides.items():
        if not Path("run").exists():
            expect_done(child(train_run(), base, 0, disk))
        if name in ("merge", "predict"):
            expect_done(child(train_run(*(LORA if name == "merge" else MLM)), base, 0, disk))
        work, result = CASES[name]
        at, last = 0, 0
        while at <= last:
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(base, copy, symlinks=True)
            os.chdir(copy)
            outcome = child(work, copy, at, disk)
            outcome |= {"case": name, "left": result is None or Path(result).exists()}
            if outcome["code"] and (name == "train" or at % AGAIN == 1):  # the disk has room again
                again = child(work, copy, 0, disk)
                outcome |= {"again": again["code"], "result": result is None or Path(result).exists()}
            print(json.dumps(outcome), flush=True)
            last = last or outcome["writes"]
            at += stride if at else 1
        os.chdir(base)


def expect_done(outcome: dict) -> None:
    assert outcome["code"] == 0, outcome["output"]


def child(work: Callable[[], int], folder: Path, at: int, disk) -> dict:
    """Run the work in a fork of this process and return its exit code, number of writes and output."""
    with tempfile.TemporaryFile() as output:
        if not (pid := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            disk(at, str(folder).encode())
            try:
                code = work()
            except SystemExit as error:
                code = error.code
            except BaseException:
                traceback.print_exc()
                code = 1
            num_writes = disk(0, b"")
            sys.stdout.flush()
            os.write(2, f"[{num_writes} writes]".encode())
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    num_writes = re.search(r"\[(\d+) writes\]", text)  # threads may print beside it
    assert num_writes, text
    return {"at": at, "code": code, "writes": int(num_writes[1]), "output": text}


if __name__ == "__main__":
    strides = (word.split("=") for word in sys.argv[3:])
    main(sys.argv[1], Path(sys.argv[2]), {name: int(stride) for name, stride in strides})
