"""Cost of a checkpoint as a page: its file with and without a hash, and training that waits for it or does not."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from benchmarks.machine import commit
from samecurve.checkpoint import commit as protocol
from samecurve.specs.environment import versions
from samecurve.storage.filesystem import LocalFileSystem

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
FILE_MIB, PAIRS = 512, 9
# 45 million parameters: 541 MB of weights and moments
MODEL = "{model_type: llama, hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 12, num_attention_heads: 8}"
EVERY = 3


def hashing(folder: Path) -> tuple[float, float]:
    """(median MiB/s of a checkpoint's file with its sha256, median of the ratio to the same without it)."""

    class NoHash:
        def update(self, _):
            pass

        def hexdigest(self):
            return ""

    content, path, sha256 = os.urandom(FILE_MIB * MIB), folder / "file", protocol.hashlib.sha256

    def seconds(hasher) -> float:
        protocol.hashlib.sha256 = hasher
        began = time.perf_counter()
        protocol.write_file(LocalFileSystem(), path, [content])
        taken = time.perf_counter() - began
        protocol.hashlib.sha256 = sha256
        path.unlink()
        return taken

    pairs = [(seconds(sha256), seconds(NoHash)) for _ in range(PAIRS)]
    print(f"hashing: {PAIRS} pairs done", flush=True)
    rate = statistics.median(FILE_MIB / hashed for hashed, _ in pairs)
    return rate, statistics.median(hashed / plain for hashed, plain in pairs)


def saving(strategy: str, folder: Path) -> dict:
    """Medians over the saves of one run each: with the write in the background, and with training waiting for it."""
    found = {"strategy": strategy}
    for name, background in (("beside", True), ("waiting", False)):
        metrics = train(strategy, background, folder / f"{strategy}_{name}")
        # not of the steps between, which may wait for the write; the last one always does
        saves = [record for record in metrics if record["step"] % EVERY == 0][:-1]
        found[name] = statistics.median(record["save_stall_seconds"] for record in saves)
        found["total"] = statistics.median(record["save_seconds"] for record in metrics if "save_seconds" in record)
        found["step"] = statistics.median(record["step_seconds"] for record in metrics[1:])
    print(f"saving under {strategy}: done", flush=True)
    return found


def train(strategy: str, background: bool, directory: Path) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    command += ["recipes/quickstart.yaml", "--strategy", f"configs/{strategy}.yaml", f"output_dir={directory}"]
    command += [f"model.config={MODEL}", "steps=15", "schedule.warmup_steps=1", "evaluate.every_steps=0"]
    command += [f"checkpoint.every_steps={EVERY}", f"checkpoint.background={str(background).lower()}"]
    command += ["batch.micro_batch_size=1", "batch.global_batch_size=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def report(hashed: tuple[float, float], saves: list[dict]) -> str:
    rows = "\n".join(
        f"| {each['strategy']} | {each['step']:.2f} | {each['beside']:.3f} | {each['waiting']:.3f} | "
        f"{each['beside'] / each['waiting']:.2f} |"
        for each in saves
    )
    found = {name: version for name, version in versions().items() if version and name != "samecurve"}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"""# What a checkpoint costs

Measured on {date.today()} at {commit("benchmarks/checkpoint.md")} by `python scripts/bench_checkpoint.py`:
{os.cpu_count()} cores ({platform.machine()}), no GPU, gloo, a local disk; {listed}.

A rank's file of {FILE_MIB} MiB with its sha256 is written at {hashed[0]:,.0f} MiB/s, in {hashed[1]:.2f} times the time
that it takes without (median of {PAIRS} pairs in turn).

Two processes, a 45 M Llama, 541 MB per checkpoint; seconds, medians. *In the background*, training waits for the copy
to host memory; what the step after it waits for the write itself, where that is longer than a step, is not in it.
`checkpoint.background: false` waits for the commit.

| strategy | a step | training waits, `background: true` | training waits, `background: false` | ratio |
|---|---|---|---|---|
{rows}
"""
