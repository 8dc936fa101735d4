"""A recipe file and the command line's overrides -> a `Recipe`, or the list of everything that is wrong with them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from .config import Recipe
from .documents import Document, KeyPath, describe, merge, override, read, suggest
from .sources import BUILTIN

_NEEDED = {
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "string_type": "text is needed",
    "string_too_short": "text that is not empty is needed",
    "bool_type": "true or false is needed",
    "dict_type": "a block of keys is needed",
    "model_type": "a block of keys is needed",
    "tuple_type": "a list is needed",
    "too_long": "{max_length} values are needed, not {actual_length}",
    "literal_error": "one of {expected} is needed",
    "greater_than": "a number above {gt} is needed",
    "greater_than_equal": "a number of at least {ge} is needed",
    "less_than": "a number below {lt} is needed",
    "less_than_equal": "a number of at most {le} is needed",
}


class Source(NamedTuple):
    """What the user wrote. `recipe` is None when anything in it breaks the schema."""

    document: Document
    recipe: Recipe | None
    invalid: frozenset[KeyPath]

    def value(self, dotted: str) -> Any:
        """What the recipe says, or the schema's default. Raises KeyError where it is missing or has the wrong type."""
        path = tuple(dotted.split("."))
        if any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.invalid):
            raise KeyError(dotted)
        found, model = self.document.content, Recipe
        for key in path:
            info = model.model_fields[key]
            found = found[key] if key in found else info.get_default(call_default_factory=True)
            model = info.annotation
            found = found.model_dump() if isinstance(found, BaseModel) else found
        return found

    def cite(self, dotted: str) -> str:
        """`key is value (file:line)`, for a message about another file."""
        path = tuple(dotted.split("."))
        try:
            place = self.document.places.get(path, "the default")
            shown = "a block" if isinstance(self.value(dotted), dict) else json.dumps(self.value(dotted))
        except KeyError:
            return dotted
        return f"{dotted} is {shown} ({place})"


def load(path: str, overrides: Sequence[str] = ()) -> Source:
    """Read `path`, the files that it is based on, and `key.path=value` overrides; check schema and rules.

    The problems are in `Source.document.problems`. Whether the batch divides is known only with the world size.
    """
    document = _read_based(path, ())
    unreadable = bool(document.problems) and not document.content
    for argument in overrides:
        override(document, argument)
    if unreadable:
        return Source(document, None, frozenset({()}))
    recipe, invalid = _validate(document)
    source = Source(document, recipe, invalid)
    _apply_rules(source)
    return source


def _read_based(path: str, chain: tuple[str, ...]) -> Document:
    """The file merged over the file that its `base` key names (relative to the file), and so on."""
    document = read(path)
    base = document.content.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        document.problem(("base",), f"found {describe(base)}, the name of a recipe file is needed")
        return document
    base_path = os.path.normpath(os.path.join(os.path.dirname(path), base))
    if base_path in (*chain, os.path.normpath(path)):
        document.problem(("base",), f'found "{base}", which is based on this file; break the circle')
        return document
    if not os.path.isfile(base_path):
        document.problem(("base",), f"no such file: {base_path}; the name is relative to {path}")
        return document
    below = _read_based(base_path, (*chain, os.path.normpath(path)))
    return Document(
        path,
        merge(below.content, document.content),
        {**below.places, **document.places},
        below.problems + document.problems,
    )


def _validate(document: Document) -> tuple[Recipe | None, frozenset[KeyPath]]:
    for path in _text_fields(document):
        document.get(*path[:-1])[path[-1]] = document.typed[path]
    try:
        return Recipe.model_validate(document.content), frozenset()
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
    for detail in details:
        path = tuple(str(part) for part in detail["loc"])
        document.problem(path, _explain(detail, path))
    return None, frozenset(tuple(str(part) for part in detail["loc"]) for detail in details)


def _text_fields(document: Document) -> Iterator[KeyPath]:
    """Keys of the command line that YAML reads as something else, but the schema wants as text (`output_dir=1`)."""
    try:
        Recipe.model_validate(document.content)
    except ValidationError as error:
        for detail in error.errors():
            path = tuple(str(part) for part in detail["loc"])
            if detail["type"] == "string_type" and path in document.typed:
                yield path


def _explain(detail: dict, path: KeyPath) -> str:
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return "unknown key" + suggest(path, _schema_paths(Recipe))
    if kind == "missing":
        return "missing; add it"
    if kind not in _NEEDED:
        return f"found {describe(found)}: {detail['msg']}"
    limits = {key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in detail.get("ctx", {}).items()}
    needed = _NEEDED[kind].format(**limits)
    return f"found {describe(found)}, {needed}{_number_hint(found) if kind in ('int_type', 'float_type') else ''}"


def _number_hint(found: Any) -> str:
    if not isinstance(found, str):
        return f"; write {int(found)}" if isinstance(found, float) and found.is_integer() else ""
    with contextlib.suppress(ValueError):
        float(found)
        return "; remove the quotes"
    return ""


def _schema_paths(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        for candidate in (info.annotation, *get_args(info.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from _schema_paths(candidate, (*prefix, name))


# Rules that more than one key takes part in. A rule is skipped when a key that it asks for is itself wrong.

Finding = tuple[str, str]


def _apply_rules(source: Source) -> None:
    for rule in (_model, _attention, _positions, _tokenizer, _data, _schedule, _checkpoint, _guard, _evaluate):
        with contextlib.suppress(KeyError):
            for key, text in rule(source.value):
                source.document.problem(tuple(key.split(".")), text)


def _model(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, config = value("model.path"), value("model.config")
    if path is not None and config is not None:
        yield "model", "both path and config are given, but a model has one origin; set one of them to null"
    elif path is None and config is None:
        yield "model", "neither path (pretrained) nor config (from scratch) is given; add one"
    elif config is not None and "model_type" not in config:
        yield "model.config", "model_type is missing; add it, for example model_type: llama"
    elif config is not None and not isinstance(config["model_type"], str):
        yield "model.config.model_type", f"found {describe(config['model_type'])}, text is needed, for example llama"
    elif path is not None and path.startswith((".", "/", "~")):
        yield from _model_folder(Path(path))


def _model_folder(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield "model.path", f"no such folder: {folder.absolute()}"
    elif not (folder / "config.json").is_file():
        yield "model.path", f"{folder.absolute()} holds no config.json; a Hugging Face model folder is needed"


def _positions(value: Callable[[str], Any]) -> Iterator[Finding]:
    length, fields = value("batch.sequence_length"), _architecture(value)
    for key in ("max_position_embeddings", "n_positions"):
        limit = fields.get(key)
        if isinstance(limit, int) and limit < length:
            owner = "model.config" if value("model.path") is None else "the model's config.json"
            yield "batch.sequence_length", f"found {length}, but {key} in {owner} is {limit}; a row has to fit into it"


def _attention(value: Callable[[str], Any]) -> Iterator[Finding]:
    """flash-attn tells packed documents apart by their positions only in a batch of one row, and knows no fp32."""
    if value("model.attention") != "flash_attention_2":
        return
    if value("data.packing") and value("batch.micro_batch_size") > 1:
        text = (
            f"found flash_attention_2, which does not keep packed documents apart when batch.micro_batch_size is "
            f"{value('batch.micro_batch_size')}; set that to 1, or use sdpa, or data.packing: false"
        )
        yield "model.attention", text
    if value("precision") == "fp32":
        yield "model.attention", "found flash_attention_2, which does not compute in fp32; use sdpa, or precision: bf16"


def _tokenizer(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, size = value("tokenizer.path"), value("tokenizer.vocabulary_size")
    if path is not None and size is not None:
        yield "tokenizer", "both path and vocabulary_size (train one) are given; keep one"
    elif path is None and size is None and value("model.path") is None:
        yield "tokenizer", "a model from scratch brings no tokenizer; add tokenizer.path or tokenizer.vocabulary_size"


def _data(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.path") is None:
        yield "data.path", f"missing; name a file, a folder or {BUILTIN}, here or as data.path=... when starting"
    for key in ("data.path", "evaluate.path"):
        path = value(key)
        if path is not None and path != BUILTIN and not Path(path).exists():
            yield key, f"no such file or folder: {Path(path).absolute()}"


def _schedule(value: Callable[[str], Any]) -> Iterator[Finding]:
    steps, warmup = value("steps"), value("schedule.warmup_steps")
    if warmup >= steps:
        yield "schedule.warmup_steps", f"found {warmup}, but steps is {steps}; warm-up has to end before the run does"
    name, decay = value("schedule.name"), value("schedule.decay_steps")
    if name != "wsd" and decay is not None:
        yield "schedule.decay_steps", f"found {decay}, but only wsd has a decay of its own and schedule.name is {name}"
    elif name == "wsd" and decay is None:
        yield "schedule.decay_steps", "missing; wsd needs the length of its final decay"
    elif name == "wsd" and warmup < steps < warmup + decay:
        yield "schedule.decay_steps", f"found {decay}; with {warmup} warm-up steps that is more than the {steps} steps"


def _checkpoint(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, best, evaluated = map(value, ("checkpoint.every_steps", "checkpoint.best", "evaluate.every_steps"))
    if best and every and (not evaluated or every % evaluated):
        text = (
            f"found {best}, but checkpoints are written every {every} steps and evaluate.every_steps is {evaluated}; "
            "set that to a divisor of checkpoint.every_steps, so that each has a number of its own"
        )
        yield "checkpoint.best", text


def _guard(value: Callable[[str], Any]) -> Iterator[Finding]:
    ratio = value("guard.rollback_ratio")
    if ratio is not None and not value("checkpoint.every_steps"):
        text = f"found {ratio:g}, but checkpoint.every_steps is 0, so there is nothing to go back to; set it above 0"
        yield "guard.rollback_ratio", text


def _evaluate(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, held_out = value("evaluate.every_steps"), value("data.held_out_fraction")
    if every and not held_out and value("evaluate.path") is None:
        text = f"found {every}, but nothing is held out; set data.held_out_fraction above 0 or evaluate.path"
        yield "evaluate.every_steps", text


def _architecture(value: Callable[[str], Any]) -> dict[str, Any]:
    """The fields of the model's config that the recipe or a local model folder gives."""
    with contextlib.suppress(OSError, ValueError):
        config, path = value("model.config"), value("model.path")
        if config is None and path is not None:
            config = json.loads((Path(path) / "config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}


def hidden_layers(source: Source) -> int | None:
    """How many decoder layers the model has, where that is known without loading it."""
    with contextlib.suppress(KeyError):
        fields = _architecture(source.value)
        found = [fields[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in fields]
        return found[0] if found and isinstance(found[0], int) else None
    return None


def model_type(source: Source) -> str | None:
    """The model's family in transformers, where that is known without loading it."""
    with contextlib.suppress(KeyError):
        found = _architecture(source.value).get("model_type")
        return found if isinstance(found, str) else None
    return None
