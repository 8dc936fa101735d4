"""Layers of a recipe: base files, the recipe's file, the command line. A later layer overrides an earlier one.

Some keys are alternatives: a model has a path or a config. One given in a later layer removes the other of an earlier
layer, with a note in the header. Both in one layer are an error.
"""

from __future__ import annotations

from samecurve.config.documents import COMMAND_LINE, Document, KeyPath, merge_blocks
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
_RATE: KeyPath = ("optimizer", "learning_rate")


def merge_over_base(below: Document, document: Document) -> Document:
    """Return `document` merged over `below`, the file that it is based on."""
    given = {key for pair in ALTERNATIVES for key in pair if document.get(*key) is not None}
    # before the merge, after which the layers cannot be told apart
    notes = _replace(below, given)
    return Document(
        document.name,
        merge_blocks(below.content, document.content),
        {**below.places, **document.places},
        below.problems + document.problems,
        notes=[*below.notes, *document.notes, *notes],
        rate_from_scratch=below.rate_from_scratch,
        scratch_files=below.scratch_files,
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
