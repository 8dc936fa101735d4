"""Real runs of train.py over gloo processes, on data with uneven rows, kept so that a run is made once per session."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import forked
import pytest

from benchmarks.machine import commit, description
from samecurve.bench.step import write_changed
from samecurve.config.inheritance import latest_overrides
from samecurve.distributed.network import free_port
from samecurve.storage.atomic import utc_timestamp

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "SAMECURVE_FAULT_RESULTS"
BIN = Path(sys.executable).parent
STEPS = 25
LEAST_VALUE, LEAST_CHANGE = 1e-6, 5e-5  # of losses and gradient norms; the change is a part of the largest
SAVE_EVERY = 5  # and all are kept: 20 steps follow the first
# A start takes 10, with DeepSpeed's first build of its NVMe library 200.
LIMIT_SECONDS = int(os.environ.get("SAMECURVE_TEST_LIMIT_SECONDS", 900))

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

RECIPE = {
    "seed": 3,
    "steps": STEPS,
    "precision": "fp32",
    "model": {"config": LLAMA},
    "tokenizer": {"vocabulary_size": 300},
    # not packed: rows of very different lengths, so that a mean of means is wrong
    "data": {"packing": False, "validation_fraction": 0.1},
    "batch": {"global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 32},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.8},
    "schedule": {"name": "cosine", "warmup_steps": 5},
    "evaluate": {"every_steps": 10},
    "checkpoint": {"every_steps": SAVE_EVERY, "keep": STEPS // SAVE_EVERY},
    "export": {"verify": "off"},  # a new process with transformers takes seconds; test_export_verified.py starts some
}

LORA = "adapter={name: lora, rank: 4, alpha: 8}"


@dataclass(frozen=True)
class Run:
    """What a finished process tree left behind."""

    directory: Path
    returncode: int
    output: str

    @cached_property
    def facts(self) -> dict:
        return json.loads((self.directory / "run.json").read_text())

    @cached_property
    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())

    @cached_property
    def metrics(self) -> list[dict]:
        """Nothing computes faster than the peak, so every run that a test reads is a test of that number, too."""
        records = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        impossible = [each for each in records if (each.get("mfu") or 0) > 1 or (each.get("hfu") or 0) > 1]
        assert not impossible, (self.directory, impossible)
        return records

    def column(self, key: str) -> list[float]:
        values = [record[key] for record in self.metrics]
        if key in ("loss", "grad_norm"):
            assert_moves(values, f"{self.directory}: {key}")
        return values

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step_{step:08d}"

    @cached_property
    def weights(self) -> dict:
        from safetensors.torch import load_file

        updates = self.metrics[-1]["step"] - self.metrics[-1]["skipped_steps"]
        assert updates and any(record["learning_rate"] for record in self.metrics), f"{self.directory}: nothing trained"
        return load_file(self.directory / "model" / "model.safetensors")


class Workspace:
    """One folder of data, recipe and runs. `run` is remembered by its arguments."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self._runs: dict[tuple, Run] = {}
        data = folder / "documents.jsonl"
        _write_documents(data)
        recipe = {**RECIPE, "output_dir": str(folder / "run"), "data": {**RECIPE["data"], "path": str(data)}}
        self.recipe.write_text(json.dumps(recipe))  # JSON is YAML

    @cached_property
    def base(self) -> Path:
        """A model to put adapters on: the export of a short run."""
        run = self.run(None, 1, "steps=6", "checkpoint.every_steps=0", "batch.micro_batch_size=8")
        assert run.returncode == 0, run.output
        return run.directory / "model"

    @property
    def lora(self) -> tuple[str, ...]:
        """Overrides: train an adapter on `base`."""
        return f"model={{path: {self.base}}}", f"tokenizer={{path: {self.base}}}", LORA

    def strategy(self, name: str, **changes: dict) -> Path:
        """A strategy file; with `changes`, a bare DeepSpeed JSON of that name with some blocks replaced."""
        if not changes:
            return ROOT / "configs" / f"{name}.yaml"
        config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        folder = self.folder / f"strategy_{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**config, **changes}))
        return path

    def sequence_parallel(self, name: str) -> Path:
        """The strategy file `name`, under that name, with sequence parallelism."""
        return self.parallel(name, tp_sequence_parallel="true")

    @property
    def ring(self) -> Path:
        """fsdp_cp, under that name, whose keys travel in a ring."""
        return self.parallel("fsdp_cp", cp_comm_strategy="alltoall")

    def parallel(self, name: str, **keys: int | str) -> Path:
        """The strategy file `name`, under that name, with other values of some keys of its parallelism."""
        changes = [f"parallelism_config.parallelism_config_{key}={value}" for key, value in keys.items()]
        folder = self.folder / "_".join(f"{key}_{value}" for key, value in keys.items())
        return write_changed(self.strategy(name), changes, folder)

    def run(self, strategy: str | Path | None, world: int, *overrides: str, launcher: str = "fork") -> Run:
        key = (strategy, world, overrides, launcher)
        if key not in self._runs:
            directory = self.folder / f"run_{len(self._runs):03d}"
            command = self._command(launcher, strategy, world, f"output_dir={directory}", *overrides)
            self._runs[key] = self.execute(command, directory)
        return self._runs[key]

    def probe(
        self,
        script: str,
        strategy: str | Path | None,
        world: int,
        *overrides: str,
        launcher: str = "fork",
        **environment: str,
    ) -> dict:
        """What a script beside this file, started with train.py's arguments, prints behind FOUND."""
        path = str(Path(__file__).with_name(script))
        command = self._command(launcher, strategy, world, *overrides, script=path)
        run = self.execute(command, self.folder, **environment)
        assert run.returncode == 0, run.output
        return json.loads(run.output.split("FOUND ", 1)[1].splitlines()[0])

    def resume(
        self, source: Run, step: int, strategy: str | Path | None, world: int, *overrides: str, launcher: str = "fork"
    ) -> Run:
        """Go on from a copy of another run as it was after `step`, under any strategy."""
        directory = self.folder / f"resumed_{len(list(self.folder.iterdir()))}"
        shutil.copytree(source.directory, directory, ignore=shutil.ignore_patterns("model", "tensorboard", "step_*"))
        shutil.copytree(source.checkpoint(step), directory / "checkpoints" / source.checkpoint(step).name)
        command = self._command(launcher, strategy, world, f"output_dir={directory}", *overrides)
        return self.execute(command, directory)

    def _command(
        self, launcher: str, strategy: str | Path | None, world: int, *overrides: str, script: str = "train.py"
    ) -> list[str]:
        path = self.strategy(strategy) if isinstance(strategy, str) else strategy
        command = [*launch_command(launcher, path, world, self.folder, script), str(self.recipe), *overrides]
        return command if path is None or launcher == "accelerate" else [*command, "--strategy", str(path)]

    def execute(
        self, command: list[str], directory: Path, limit_seconds: float = LIMIT_SECONDS, **environment: str
    ) -> Run:
        """command: as launch_command makes it, with the script's arguments."""
        env, command = self.environment(**environment), once(command)
        if command[0] == "fork":
            world, port, script, *arguments = command[1:]
            done = forked.run(ROOT / script, arguments, int(world), int(port), env, limit_seconds)
            return Run(directory, done.returncode, done.stdout)
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_seconds
        )
        return Run(directory, done.returncode, done.stdout + done.stderr)

    def environment(self, **more: str) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
        env |= {"PATH": f"{BIN}:{env['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return env | {"SAMECURVE_CACHE": str(self.folder / "cache"), "TOKENIZERS_PARALLELISM": "false", **more}


def launch_command(
    launcher: str, strategy: Path | None, world: int, folder: Path, script: str = "train.py"
) -> list[str]:
    """The command up to and with the script; `--strategy` is added by the caller where the launcher has no file.

    launcher: "fork" stands for torchrun where starting itself is not what is tested, see forked.py.
    """
    python, port = sys.executable, str(free_port())
    if launcher == "fork":
        return ["fork", str(world if strategy else 0), port, script]
    if launcher == "python":
        return [python, script]
    if launcher == "torchrun":
        options = ["--nproc_per_node", str(world), "--master_port", port]
        return [python, "-m", "torch.distributed.run", *options, script]
    if launcher == "accelerate":
        options = ["--config_file", str(strategy), "--num_processes", str(world), "--main_process_port", port]
        return [python, "-m", "accelerate.commands.launch", *options, script]
    hostfile = folder / "hostfile"
    hostfile.write_text(f"127.0.0.1 slots={world}\n")
    options = ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    return [str(BIN / "deepspeed"), *options, "--master_port", port, script]


def once(command: list[str]) -> list[str]:
    """Of overrides for one key the last, so that a test can add to settings that it shares with others."""
    is_override = re.compile(r"[a-z_]\w*(\.\w+)*=").match
    after = ["", *command]
    given = [word for before, word in zip(after, command, strict=False) if is_override(word) and before != "--variant"]
    others = [
        word for before, word in zip(after, command, strict=False) if not is_override(word) or before == "--variant"
    ]
    return [*others, *latest_overrides(given)]


def long(*values) -> list:
    """Parameters for `scripts/test.sh --full` only: other ways into what the everyday ones show."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def rank_hashes(folder: Path) -> dict[str, str]:
    """Of weights, moments and random numbers; state.json has times in it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {file["name"]: file["sha256"] for file in manifest["files"] if file["name"].startswith("rank_")}
    assert found, folder
    return found


def append_result(record: dict) -> None:
    """A line for scripts/reliability.py, when $SAMECURVE_FAULT_RESULTS names a file."""
    if RESULTS in os.environ:
        with open(os.environ[RESULTS], "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record | origin() | {"time": utc_timestamp()}) + "\n")


@cache
def origin() -> dict:
    return {"machine": description(), "commit": commit("benchmarks/faults")}


def _write_documents(path: Path) -> None:
    """300 documents of 3 to 60 words over 60 made-up words: enough structure to learn, lengths that differ much."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 60))) for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def assert_moves(values: Sequence[float | None], name: str = "the reference") -> None:
    """A dead model follows itself under every strategy: a curve that is to show something is not 0, and moves by more
    than rounding, of which the comparisons allow 1e-5."""
    known = [abs(value) for value in values if value is not None]
    assert not known or max(known) > LEAST_VALUE, f"{name} is 0: {values}"
    assert len(known) < 2 or max(known) - min(known) > LEAST_CHANGE * max(known), f"{name} stands still: {values}"


def largest_relative_difference(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) > 0
    assert_moves(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def relative_l2(found: dict, expected: dict) -> float:
    """Over all weights together: a single tensor whose true gradient is zero is all rounding under Adam."""
    assert found.keys() == expected.keys()
    difference = sum((found[name] - expected[name]).double().square().sum() for name in expected)
    return float((difference / sum(value.double().square().sum() for value in expected.values())).sqrt())
