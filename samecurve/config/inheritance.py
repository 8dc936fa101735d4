"""Layers of a recipe: base files, the recipe's file, the command line. A later layer overrides an earlier one.

Some keys are alternatives: a model has a path or a config. One given in a later layer removes the other of an earlier
layer, with a note in the header. Both in one layer are an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from samecurve.config.documents import (
    COMMAND_LINE,
    ConfigProblem,
    Document,
    KeyPath,
    describe,
    merge_blocks,
    parse_yaml,
)
from samecurve.specs.optimizers import usual_rates

# Numbers of steps, and the keys that give the same in passes over the training rows.
UNITS: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("steps",), ("epochs",)),
    (("evaluate", "every_steps"), ("evaluate", "every_epochs")),
    (("checkpoint", "every_steps"), ("checkpoint", "every_epochs")),
)
# Given key -> key that it replaces.
ALTERNATIVES: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("model", "path"), ("model", "config")),
    (("model", "config"), ("model", "path")),
    (("data", "path"), ("data", "mixture")),
    (("data", "mixture"), ("data", "path")),
    (("tokenizer", "path"), ("tokenizer", "vocabulary_size")),
    (("tokenizer", "vocabulary_size"), ("tokenizer", "path")),
    (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
    (("schedule", "warmup_ratio"), ("schedule", "warmup_steps")),
    # A pretrained model's embeddings belong to the tokenizer that it was trained with.
    (("model", "path"), ("tokenizer", "vocabulary_size")),
    *UNITS,
    *((epochs, steps) for steps, epochs in UNITS),
)
# What is said of the model or the data that the first keys name, and not of others that a later layer puts there.
_OF_ORIGIN = {
    "model": (("path", "config"), ("revision", "trust_remote_code")),
    "data": (("path", "mixture", "source"), ("config", "revision", "split")),
}
_RATE: KeyPath = ("optimizer", "learning_rate")
# What recipes for a small model from scratch set otherwise than fine-tuning does.
_SCRATCH_SIZES: tuple[KeyPath, ...] = (
    ("precision",),
    ("steps",),
    ("batch", "global_batch_size"),
    ("batch", "sequence_length"),
    ("schedule", "warmup_ratio"),
    ("schedule", "warmup_steps"),
)


def merge_over_base(below: Document, document: Document) -> Document:
    """Return `document` merged over `below`, the file that it is based on."""
    given = {key for pair in ALTERNATIVES for key in pair if document.get(*key) is not None}
    # before the merge, after which the layers cannot be told apart
    notes = []
    for name in _OF_ORIGIN:
        before, now = below.get(name), document.get(name)
        if isinstance(before, dict) and isinstance(now, dict) and _is_another(name, before, now):
            notes += forget_origin(below, name)
    notes += _replace(below, given)
    return Document(
        document.name,
        merge_blocks(below.content, document.content),
        {**below.places, **document.places},
        below.problems + document.problems,
        notes=[*below.notes, *document.notes, *notes],
        rate_from_scratch=below.rate_from_scratch,
        scratch_files=below.scratch_files,
        bases=(*below.bases, below.name),
        incomplete=below.incomplete or document.incomplete,
    )


def settle_command_line(document: Document) -> None:
    """Remove alternatives in the files to keys of the command line. Call this after all overrides are applied."""
    keys = {key for pair in ALTERNATIVES for key in pair if document.get(*key) is not None}
    given = set()  # on the command line: the key, a block around it or a key inside of it
    for key in keys:
        inside = [place for path, place in document.places.items() if path[: len(key)] == key]
        if COMMAND_LINE in (document.place(key), *inside):
            given.add(key)
    document.notes += _replace(document, given)
    for steps, epochs in UNITS:
        if document.get(*steps) is not None and document.get(*epochs) is not None:
            text = f"found {document.get(*epochs)}, but {steps[-1]} is {document.get(*steps)}; keep one of them"
            document.problem(epochs, text)
    task, adapter = document.get("task") or "pretrain", document.get("adapter", "name")
    rates = usual_rates(task, adapter is not None, document.get("optimizer", "name") or "adamw")
    if document.rate_from_scratch == (place := document.place(_RATE)) and place != COMMAND_LINE:
        weights = "an adapter on" if adapter else "all weights of"
        usual = f"; {rates} is usual for {weights} a pretrained one (task {task})" if rates else ""
        rate = document.get(*_RATE)
        document.notes.append(f"optimizer.learning_rate: {rate} of {place} was for a model from scratch{usual}")
    sizes = [f"{'.'.join(path)} {document.get(*path)}" for path in _SCRATCH_SIZES if _is_from_scratch(document, path)]
    if sizes:
        document.notes.append(f"also of a recipe for a model from scratch: {', '.join(sizes)}; give what does not suit")


def _is_from_scratch(document: Document, path: KeyPath) -> bool:
    return document.get(*path) is not None and document.place(path).file in document.scratch_files


def _replace(document: Document, given: set[KeyPath]) -> list[str]:
    """Remove what the keys of a later layer replace, and note where a learning rate for what was replaced stands."""
    notes = []
    for new, old in ALTERNATIVES:
        # old in given: both stand in one layer, which a rule reports
        if new not in given or old in given or document.get(*old) is None:
            continue
        notes.append(f"{'.'.join(new)} replaces {'.'.join(old)} of {document.place(old).file}")
        if (new, old) == ALTERNATIVES[0]:
            document.scratch_files |= {place.file for path, place in document.places.items() if path[:2] == old}
        block = document.get(*old[:-1])
        del block[old[-1]]
        document.places = {path: place for path, place in document.places.items() if path[: len(old)] != old}
        if new == ("model", "path") and document.get(*_RATE) is not None:
            document.rate_from_scratch = document.place(_RATE)
    return notes


def _is_another(name: str, before: dict, now: dict) -> bool:
    """Whether `now` names another model or other data than `before` did; fields of one config are merged instead."""
    origins, _ = _OF_ORIGIN[name]
    for key in [key for key in origins if key in now]:
        others = origins if key == "path" else ("path",)
        if any(before.get(other) not in (None, now[key]) for other in ((key,) if now[key] is None else others)):
            return True
    return False


def forget_origin(document: Document, name: str, later: Callable[[KeyPath], bool] = lambda path: False) -> list[str]:
    """Remove what was said of a model or of data that a later layer replaces, such as the trust in its code.

    Args:
        name: "model" or "data".
        later: whether a key was given in that later layer, and so belongs to what replaces them.

    Returns:
        A note for each key.
    """
    notes = []
    for key in _OF_ORIGIN[name][1]:
        path, value = (name, key), document.get(name, key)
        if value in (None, False) or later(path):
            continue
        was = next(origin for key in _OF_ORIGIN[name][0] if (origin := document.get(name, key)) is not None)
        was = was if isinstance(was, str) else "another one"
        shown = f"{'.'.join(path)}: {str(value).lower() if value is True else value} of {document.place(path)}"
        notes.append(f"{shown} was for {was}, which is replaced; give it again if it holds")
        del document.content[name][key]
        document.places.pop(path, None)
    return notes


def apply_override(document: Document, argument: str) -> None:
    """Apply one `key.path=value` of the command line. Of a key that is given twice the last value counts, with a note.

    The value is read as YAML, and as text if it is no valid YAML: the shell removes the quotes of
    `data.pattern='**/*.md'`, and YAML would take the rest for a broken alias.
    """
    dotted, equals, text = argument.partition("=")
    path = tuple(dotted.split("."))
    if not equals or not all(path):
        text = f"found {describe(argument)}, expected key.path=value"
        document.problems.append(ConfigProblem(COMMAND_LINE, "", text))
        return
    parsed, problems = read_value(text)
    if problems:
        document.problems += [ConfigProblem(COMMAND_LINE, dotted, problem) for problem in problems]
        return
    earlier = [other for other in _replaced(document, path) if other != argument]
    document.notes += [f"{argument} replaces {other} of the command line" for other in earlier]
    block = document.content
    for depth, key in enumerate(path[:-1], start=1):
        # None: the block is absent, or stands in the file without keys
        if not isinstance(block.get(key), (dict, type(None))):
            outer = ".".join(path[:depth])
            why = f"{outer} is {describe(block[key])}, which has no keys; set {outer} itself"
            document.problems.append(ConfigProblem(COMMAND_LINE, dotted, why))
            return
        block[key] = dict(block.get(key) or {})
        block = block[key]
    if len(path) == 2 and path[0] in _OF_ORIGIN and _is_another(path[0], block, {path[1]: parsed}):
        document.notes += forget_origin(document, path[0], lambda other: document.place(other) == COMMAND_LINE)
    block[path[-1]] = parsed
    # the lines of keys inside the old value no longer apply
    document.places = {known: place for known, place in document.places.items() if known[: len(path)] != path}
    document.places[path] = COMMAND_LINE
    document.typed = {known: value for known, value in document.typed.items() if known[: len(path)] != path}
    document.typed[path] = text


def latest_overrides(overrides: Sequence[str]) -> list[str]:
    """Keep the last override of each key, for commands that add overrides of their own to the user's.

    An override replaces earlier ones of its key and of keys inside it, and its part of an earlier block around it.
    """
    latest: dict[KeyPath, str] = {}
    for argument in overrides:
        dotted, _, text = argument.partition("=")
        path = tuple(dotted.split("."))
        latest = {known: value for known, value in latest.items() if known[: len(path)] != path}
        for around in [known for known in latest if path[: len(known)] == known]:
            # without the key that is given again
            content, problems = read_value(latest[around])
            block = content
            for key in path[len(around) : -1]:
                block = block.get(key) if isinstance(block, dict) else None
            if not problems and isinstance(block, dict) and path[-1] in block:
                del block[path[-1]]
                latest[around] = json.dumps(content, ensure_ascii=False)  # JSON is YAML
        latest[path] = text
    return [f"{'.'.join(path)}={text}" for path, text in latest.items()]


def read_value(text: str) -> tuple[Any, list[str]]:
    """Return the value that the text spells, and its problem."""
    document = Document(COMMAND_LINE.file)
    # parse_yaml would make {} of empty text, as of an empty file
    parsed = parse_yaml(text, document) if text else ""
    # What begins like a list, a block or a quoted text is meant as YAML, whose mistake is to be told; no template is.
    if document.problems and (text.startswith(("{{", "{%")) or not text.startswith(("[", "{", '"', "'"))):
        return text, []
    # a shell knows no comments in a value: /tmp/a #1 is a path
    if text.startswith("#") or (isinstance(parsed, str) and text.startswith(parsed) and "#" in text[len(parsed) :]):
        return text, []
    return parsed, [problem.text for problem in document.problems]


def _replaced(document: Document, path: KeyPath) -> Iterator[str]:
    """Yield the earlier arguments of the command line whose values this key replaces, wholly or in part."""
    for known, text in document.typed.items():
        is_replaced = known[: len(path)] == path
        if path[: len(known)] == known:
            # in a block that has the key, or something that is no block around it
            block, rest = document.get(*known), path[len(known) :]
            while rest and isinstance(block, dict) and rest[0] in block:
                block, rest = block[rest[0]], rest[1:]
            is_replaced = not rest or not isinstance(block, dict)
        if is_replaced:
            yield f"{'.'.join(known)}={text}"
