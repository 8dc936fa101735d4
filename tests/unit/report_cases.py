"""What the tables of configuration mistakes share: good files, one change, and the report that must come out.

A row of a table is one problem: (place, key, *fragments). The fragments are what a message must not lose, whatever its
wording: the value found, the keys and values of the rule, the fix.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from samecurve.errors import SamecurveError
from samecurve.strategy.launchers import Ancestor
from samecurve.strategy.plan import Plan
from samecurve.strategy.resolve import resolve_plan

Row = tuple[str, ...]
# kinds of values, as the messages name them
INTEGER, NUMBER, TEXT, BLOCK = "an integer", "a number", "text", "a block of keys"

GOOD = {
    "r.yaml": """\
output_dir: runs/x
steps: 10
precision: bf16
model:
  config: {model_type: llama, num_hidden_layers: 4}
tokenizer: {vocabulary_size: 512}
data:
  path: text.txt
batch:
  global_batch_size: 8
  micro_batch_size: 1
  sequence_length: 64
optimizer:
  learning_rate: 1e-3
""",
    "text.txt": "words",
    "configs/single.yaml": 'distributed_type: "NO"\nnum_processes: 1\n',
    "configs/ddp.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
    "configs/fsdp.yaml": """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
""",
    "configs/hsdp.yaml": """\
distributed_type: FSDP
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: false
parallelism_config:
  parallelism_config_dp_replicate_size: 2
""",
    "configs/zero2.yaml": """\
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  deepspeed_config_file: ds_configs/zero2.json
""",
    "ds_configs/zero2.json": """\
{
  "gradient_clipping": "auto",
  "bf16": {"enabled": "auto"},
  "fp16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 5e8
  }
}
""",
    "ds_configs/zero3_nvme.json": """\
{
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
    "offload_param": {"device": "cpu"}
  }
}
""",
    "ds_configs/pipeline.json": """\
{
  "zero_optimization": {"stage": 1},
  "pipeline": {
    "stages": 2,
    "partition": "parameters"
  }
}
""",
}

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in {**GOOD, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def changed(name: str, old: str, new: str) -> dict[str, str]:
    """The good file with one change. The change must apply: a case that changes nothing tests nothing."""
    assert GOOD[name].count(old) == 1, (name, old)
    return {name: GOOD[name].replace(old, new)}


def launched(*words: str, directory: str = ".") -> Callable[[], list[Ancestor]]:
    """The ancestors of a process that `accelerate launch` started, below a shell."""
    argv = ("/usr/bin/python", "/venv/bin/accelerate", "launch", *words)
    return lambda: [Ancestor(argv, str(Path(directory).absolute())), Ancestor(("bash", "run.sh"), "/")]


def message(folder: Path, argv: Sequence[str], environ: Mapping[str, str], ancestors=None) -> tuple[str, int] | Plan:
    """The report without the test's folder, and the exit code; or the plan."""
    try:
        return resolve_plan(argv, environ, ancestors or (lambda: []))
    except SamecurveError as error:
        return str(error).replace(f"{folder}/", ""), error.exit_code


def check_report(report: str, rows: Sequence[Row]) -> None:
    """The report has exactly these problems, in this order: place, key and every fragment of each."""
    header, *lines = report.splitlines()
    assert header == f"{len(rows)} problem{'s' * (len(rows) > 1)} in the configuration", report
    assert len(lines) == len(rows), report
    for line, (place, key, *fragments) in zip(lines, rows, strict=True):
        start = f"  {place}: {key}: " if key else f"  {place}: "
        assert line.startswith(start), f"{start!r} is not the start of {line!r}"
        text = line.removeprefix(start)
        assert key or not re.match(r"[\w.]+: ", text), f"a key that was not expected: {line!r}"
        assert fragments and not missing(text, fragments), f"{missing(text, fragments)} not in {text!r}"


def check_message(text: str, place: str, *fragments: str) -> None:
    """The message of one problem begins with its place and has every fragment."""
    start = f"{place}: "
    assert text.startswith(start), f"{start!r} is not the start of {text!r}"
    lost = missing(text.removeprefix(start), fragments)
    assert fragments and not lost, f"{lost} not in {text!r}"


def missing(text: str, fragments: Iterable[str]) -> list[str]:
    """The fragments that are not in the text, as whole words and each at a place of its own."""
    lost = []
    for fragment in sorted(fragments, key=len, reverse=True):
        before = r"(?<!\w)(?<!\d\.)" if re.match(r"\w", fragment) else ""
        after = r"(?!\w|\.\d)" if re.search(r"\w$", fragment) else ""
        found = re.search(before + re.escape(fragment) + after, text)
        if found:
            text = f"{text[: found.start()]}\0{text[found.end() :]}"
        else:
            lost.append(fragment)
    return lost


def findings(rules: Iterable[Callable], values: dict[str, object]) -> list[tuple[str, str]]:
    """What these rules find in a recipe of these values. A rule that asks for another key is left out."""
    found = []
    for rule in rules:
        with contextlib.suppress(KeyError):
            found += rule(values.__getitem__)
    return found
