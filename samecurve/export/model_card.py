"""Model cards: data, training and evaluation of a model, from the files of its run directory.

The format is the Hugging Face hub's: YAML between two lines of dashes, then Markdown
(https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import html
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from samecurve.metrics.console import duration, number, spaced
from samecurve.reports.history import History
from samecurve.reports.plot import Scale, loss_series, plot, session_marks
from samecurve.run.sessions import SessionRecord, sessions, unknown_origin
from samecurve.specs.data_names import is_import_path
from samecurve.specs.model_families import PACKAGED
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import utc_timestamp, write_text
from samecurve.storage.records import COUNT, mismatch, read_record

CARD, PICTURE = "README.md", "loss.svg"
UNKNOWN = "not known"
# Sub-folder of an adapter's folder with the config of the adapted model.
ADAPTED_CONFIG = "model_config"
_CURVE_POINTS, _CURVE_EVALUATIONS = 12, 50  # most rows of the table
# What a card needs of run.json.
_FACTS = {
    "output_dir": Path,
    "overrides?": [str],
    "package?": (str, None),
    "unproven?": ([str], None),
    "world_size": int,
    "num_parameters": COUNT,
    "num_trained_parameters": COUNT,
    "data": {"train?": {"*": (int, float, str, None)}, "held_out?": {"*": (int, float, str, None)}},
    "new_head?": ([str], None),
    "adapter?": ({"base_model?": str}, None),
    "recipe": {
        "task": str,
        "seed": int,
        "steps": COUNT,
        "precision": str,
        "adapter": {
            "name": (str, None),
            "rank?": COUNT,
            "dora?": bool,
            "path?": (str, None),
            "modules_to_save?": ([str], None),
        },
        "model": {"path": (str, None)},
        "data": {"path": (str, None), "source?": (str, None), "mixture?": ([{"path": str, "weight": float}], None)},
        "batch": {"global_batch_size": COUNT, "sequence_length": COUNT},
        "optimizer": {"name": str, "learning_rate": float},
        "schedule": {"name": str},
        "evaluate": {"path": (str, None)},
    },
}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank, whose default is 16
_END = r"\s\"'`,;|<>{}()\[\]="  # what ends a path within another text
_PATH = re.compile(rf"(?<![^{_END}:])(?:file://)?[^{_END}:]*/[^{_END}]+")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.\-]*")


@dataclass(frozen=True)
class ExportInfo:
    """Facts about an export that the run directory does not contain.

    Attributes:
        dtype: torch's name of the dtype of the stored weights.
        license: license given by the user, None if not given.
        step: step after which the weights were saved; None for the last one.
        merged: whether an adapter is merged into its base model.
        text_alone: whether the folder holds the text part of a packaged model without the rest.
        rounding: what rounding the weights to `dtype` costs, in words; "" for nothing.
        gguf: name of the GGUF in the folder; "" for safetensors.
    """

    dtype: str = "float32"
    license: str | None = None
    step: int | None = None
    merged: bool = False
    text_alone: bool = False
    rounding: str = ""
    gguf: str = ""


def write_card(run: Path, info: ExportInfo, folder: Path) -> None:
    """Write README.md, and the picture of the loss that it shows, into a model's folder; see `model_card`."""
    history = _history(run, info)
    stored = read_record(folder / "config.json", {"model_type?": (str, None)}).value or {}
    info = replace(info, text_alone=bool(stored) and stored.get("model_type") not in PACKAGED)
    write_text(folder / CARD, model_card(run, info, history))
    if drawn := plot("loss", loss_series(history), session_marks(sessions(run)), Scale(logarithmic=True)):
        write_text(folder / PICTURE, drawn)


def _history(run: Path, info: ExportInfo) -> History:
    return History.read(run, up_to=math.inf if info.step is None else info.step)


def model_card(run: Path, info: ExportInfo, history: History | None = None) -> str:
    """Return the text of README.md for a model of the run directory `run`. A damaged run.json makes it short."""
    known, history = sessions(run), history or _history(run, info)
    problem = (known[-1].problem or mismatch(known[-1].facts, _FACTS)) if known else "no such file"
    task = "" if problem else known[-1].facts["recipe"]["task"]
    if not problem and task not in TASKS and not is_import_path(task):
        problem = f"recipe.task: no task {task}"
    if problem:  # the model is whole, whatever happened to the record of its training
        entries = {"library_name": "transformers", **_license(info.license), "tags": ["samecurve"]}
        text = yaml.safe_dump(entries, sort_keys=False)
        why = _escaped(without_folders(f"run.json cannot be used: {problem}".replace(f"{run}/", "")))
        title = _escaped(run.resolve().name)
        return f"---\n{text}---\n\n# {title}\n\n## Not known\n\nHow this model was trained: {why}.\n"
    facts = without_folders(known[-1].facts)
    recipe = facts["recipe"]
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    base = recipe["model"]["path"]
    missing = ["intended uses, limitations and biases of the model"]
    missing += ["the licence of these weights"] if info.license is None else []
    missing += ["the licence of the data"]
    missing += [f"what {_escaped(base)} was trained on, and its licence"] if base else []
    parts = [
        f"---\n{yaml.safe_dump(metadata(known[-1].facts, info), sort_keys=False, allow_unicode=True)}---\n",
        f"# {_escaped(Path(facts['output_dir']).name)}\n",
        *(_use_gguf(facts, info) if info.gguf else _use(facts, info)),
        "## Training\n",
        _table([("", ""), *_training(facts, history, info)]),
        *_curve(history),
        *_evaluation(facts, history),
        *_sessions(known),
        f"\n## Recipe\n\nWith every default:\n\n{_fenced(text.rstrip(), 'yaml')}",
        "## Not known\n\nThis card cannot say:\n",
        *(f"- {text}" for text in missing),
    ]
    return "\n".join(parts) + "\n"


def without_folders(value: Any) -> Any:
    """Shorten paths in the texts of `value`, at any depth, because a card is shared with strangers.

    A path below the working directory is written relative to it, any other one by its last part alone. A text that is
    a path as a whole may have spaces; within other texts (an error, an override) a path ends at the first one.
    """
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(inner) for inner in value]
    if not isinstance(value, str):
        return value
    key, sign, path = value.partition("=") if re.match(r"[\w.]+=[/~]", value) else ("", "", value)  # an override
    if path.startswith(("/", "~/")) and len(path.splitlines()) == 1:
        return f"{key}{sign}{_shortened(path)}"
    return _PATH.sub(lambda match: _shortened(match[0]), value)


def _shortened(path: str) -> str:
    """Shorten an absolute path, or one that leads upwards; not the rest of a URL, and no word like </think>."""
    path = path.removeprefix("file://")
    if not re.match(r"/[^/]+/|~/|(.*/)?\.\./", path):
        return path
    absolute, here = Path(os.path.abspath(os.path.expanduser(path))), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else absolute.name


def metadata(facts: dict, info: ExportInfo) -> dict:
    """Return the card's YAML metadata. A base model that is not on the hub has no name there and is left out."""
    recipe, adapter = facts["recipe"], None if info.merged else facts["recipe"]["adapter"]["name"]
    entries: dict = {"library_name": "peft" if adapter else "transformers", **_license(info.license)}
    base = recipe["model"]["path"]
    # models/llama may be a folder or OWNER/NAME
    if base and re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", base) and not Path(base).expanduser().exists():
        entries["base_model"] = base
        entries["base_model_relation"] = "adapter" if adapter else "finetune"
    entries["pipeline_tag"] = TASKS[recipe["task"]].hub_tag
    entries["tags"] = ["samecurve", recipe["task"], *([adapter] if adapter else [])]
    return entries


def _license(given: str | None) -> dict:
    """Return the license entries. A text that is not one of the hub's short identifiers becomes `other`."""
    if given is None:
        return {"license": "unknown"}
    if _LICENSE_ID.fullmatch(given.lower()):
        return {"license": given.lower()}
    return {"license": "other", "license_name": given}


def _use(facts: dict, info: ExportInfo) -> Iterator[str]:
    recipe = facts["recipe"]
    loader = auto_class = TASKS[recipe["task"]].auto_class
    if facts.get("package") and not info.text_alone:
        loader = "AutoModelForImageTextToText"
    lines = [f"from transformers import {loader}, AutoTokenizer", ""]
    if recipe["adapter"]["name"] and not info.merged:
        lines.insert(0, "from peft import PeftModel")
        base = repr(recipe["model"]["path"])
        if TASKS[recipe["task"]].predicts:  # the config in this folder defines the head
            lines[1] = f"from transformers import {loader}, AutoConfig, AutoTokenizer"
            base += f", config=AutoConfig.from_pretrained(folder, subfolder={ADAPTED_CONFIG!r})"
        lines += [f"model = {loader}.from_pretrained({base})  # what the adapter belongs to"]
        if auto_class == "AutoModelForCausalLM":  # the base model may end its answers with another token
            lines[1] = f"from transformers import {loader}, AutoTokenizer, GenerationConfig"
            lines += ["model.generation_config = GenerationConfig.from_pretrained(folder)"]
        lines += ["model = PeftModel.from_pretrained(model, folder)  # this folder"]
    else:
        lines += [f"model = {loader}.from_pretrained(folder)  # this folder"]
    yield _fenced("\n".join([*lines, "tokenizer = AutoTokenizer.from_pretrained(folder)"]), "python")
    if auto_class != "AutoModelForCausalLM":
        return
    adapter = recipe["adapter"]
    if not adapter["name"] or info.merged:
        command = "vllm serve .  # this folder, or the model's name on the hub"
    elif adapter.get("dora") or adapter.get("modules_to_save"):
        what = "DoRA" if adapter.get("dora") else "modules_to_save"
        command = f"# vLLM has no {what}: merge the adapter first (python -m samecurve merge RUN)"
    else:
        rank, larger = adapter.get("rank", 0), ""
        if rank > 16:
            larger = f" --max-lora-rank {next((known for known in _VLLM_RANKS if known >= rank), rank)}"
        command = f"vllm serve {shlex.quote(recipe['model']['path'])} --enable-lora{larger} --lora-modules adapter=."
        command += "  # model name: adapter; .: this folder"
    yield f"To serve it, if vLLM has the model's class:\n\n{_fenced(command)}"


def _use_gguf(facts: dict, info: ExportInfo) -> Iterator[str]:
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(facts["output_dir"]).name.lower()).strip("-._") or "model"
    file = shlex.quote(info.gguf)
    yield _fenced(f"ollama create {name} -f Modelfile && ollama run {name}\nllama-cli -m {file}")
    yield "`Modelfile` has the stop tokens and the chat template. With transformers and the `gguf` package:\n"
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [
        f"{name} = {loader}.from_pretrained(folder, gguf_file={info.gguf!r})  # this folder"
        for name, loader in (("model", "AutoModelForCausalLM"), ("tokenizer", "AutoTokenizer"))
    ]
    yield _fenced("\n".join(lines), "python")


def _training(facts: dict, history: History, info: ExportInfo) -> Iterator[tuple[str, object]]:
    """Yield what the model was made of, and how."""
    recipe = facts["recipe"]
    overrides = " ".join(facts.get("overrides", ()))
    yield "task", recipe["task"]
    yield "recipe", f"{facts.get('recipe_path', UNKNOWN)} {overrides}".strip()
    base = recipe["model"]["path"]
    start = base or f"random weights ({facts.get('model_type', 'model')})"
    adapter = recipe["adapter"].get("path")
    yield "starts from", f"{start} with the adapter {adapter}" if adapter else start
    if facts.get("package"):
        yield "trained", facts["package"]
    if facts.get("unproven"):
        yield "unproven", "; ".join(facts["unproven"])
    if facts.get("new_head"):
        yield "not pretrained", ", ".join(facts["new_head"])
    if facts.get("adapter"):
        yield "base model's fingerprint", facts["adapter"].get("base_model", UNKNOWN)
    yield "parameters", f"{facts['num_parameters']:,}, {facts['num_trained_parameters']:,} of them trained"
    mixture = recipe["data"].get("mixture") or ()
    mixed = ", ".join(f"{part['path']} (weight {part['weight']:g})" for part in mixture)
    yield "data", recipe["data"]["path"] or recipe["data"].get("source") or mixed
    for name in ("hub", "evaluated_on", "rows", "bad_rows", "evaluation_bad_rows"):
        if name in facts["data"]:
            dropped = " dropped, because they could not be used" if name.endswith("bad_rows") else ""
            yield f"data, {spaced(name)}", f"{facts['data'][name]}{dropped}"
    prints = facts.get("data_fingerprints") or {}
    for part, counts in facts["data"].items():
        if isinstance(counts, dict):
            listed = ", ".join(f"{spaced(name)} {number(count)}" for name, count in counts.items())
            fingerprint = f"; fingerprint {prints.get(part, UNKNOWN)}" if part in ("train", "held_out") else ""
            yield spaced(part), listed + fingerprint

    batch, optimizer, schedule = recipe["batch"], recipe["optimizer"], recipe["schedule"]
    done, skipped = history.last.get("step", UNKNOWN), history.last.get("skipped_steps", 0)
    yield "optimizer steps", f"{done} of {recipe['steps']}" + (f", {skipped} of them skipped" if skipped else "")
    yield "batch", f"{batch['global_batch_size']} rows of {batch['sequence_length']} tokens"
    yield "trained on", f"{history.totals.get('tokens', 0):,} tokens, rows or pairs, as the loss counts them"
    yield "time in steps", duration(history.totals.get("step_seconds", 0))
    yield "optimizer", f"{optimizer['name']}, learning rate {optimizer['learning_rate']:g}, {schedule['name']}"
    yield "computed in", f"{recipe['precision']}, from fp32 weights; stored as {info.dtype}"
    if info.rounding:
        yield "stored weights", info.rounding
    yield "seed", recipe["seed"]
    yield "hardware", f"{facts['world_size']} x {facts.get('device', UNKNOWN)}"
    versions = facts.get("versions", {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or UNKNOWN
    yield "card written", utc_timestamp()


def _curve(history: History) -> Iterator[str]:
    yield "\n## Loss\n"
    if not history.last:
        yield "No steps are recorded."
        return
    if "loss" in history.ends:
        yield f"![loss at each step]({PICTURE})\n"
    shown = [*_spread(history.records, _CURVE_POINTS), *_spread(history.evaluations, _CURVE_EVALUATIONS)]
    rows = [("step", "loss", "held-out loss")]
    for step, record in sorted({record["step"]: record for record in shown}.items()):
        rows.append((step, _number(record.get("loss")), _number(record.get("eval_loss"))))
    yield _table(rows)


def _spread(records: Iterable[dict], most: int) -> list[dict]:
    """Choose at most `most` records, evenly spaced from the first to the last."""
    records = list(records)
    indices = {round(index * (len(records) - 1) / (most - 1)) for index in range(most)} if records else ()
    return [records[index] for index in sorted(indices)]


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _evaluation(facts: dict, history: History) -> Iterator[str]:
    yield "\n## Evaluation\n"
    evaluated = [record for record in history.evaluations if record["eval_loss"] is not None]
    if not evaluated:
        yield "None: the run had no evaluation on held-out rows."
        return
    source = facts["data"].get("evaluated_on") or facts["recipe"]["evaluate"]["path"]
    source = source or "rows held out of the training data"
    last = evaluated[-1]
    rows = [(spaced(key.removeprefix("eval_")), number(value)) for key, value in last.items() if "eval_" in key]
    yield f"On {_escaped(source)}, after step {last['step']}:\n"
    yield _table([("metric", "value"), *rows])


def _sessions(known: Sequence[SessionRecord]) -> Iterator[str]:
    yield "\n## Sessions\n"
    origin = unknown_origin(known[0])
    if origin:
        source = _escaped(without_folders(origin))
        yield f"The first session listed here resumed from {source}, whose history is not known.\n"
    rows: list[tuple[object, ...]] = [("began", "from step", "strategy", "processes", "device", "ended")]
    for index, session in enumerate(known):
        facts = session.facts
        ended = without_folders(session.ended) if index < len(known) - 1 else "this model"
        what = [facts.get(key, UNKNOWN) for key in ("strategy", "world_size", "device")]
        rows.append((facts.get("started", UNKNOWN), session.start_step + 1, *what, ended))
    yield _table(rows)


def _fenced(text: str, language: str = "") -> str:
    """Return a block of code that no text inside can close."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _escaped(text: object) -> str:
    """Escape HTML: the hub cleans cards of it, other viewers may not."""
    return html.escape(str(text), quote=False)


def _table(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; the first row is the header."""
    cells = ([_escaped(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in cells]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
