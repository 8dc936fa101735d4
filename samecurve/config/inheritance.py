"""Layers of a recipe: base files, the recipe's file, the command line. A later one replaces what an earlier one says.

Some keys stand for one another: a model has a path or a config. Whoever gives one of them has decided against the
other one of an earlier layer, which goes, and that is told. Both in one layer is a mistake, and stays one.
"""

from __future__ import annotations

from samecurve.config.documents import COMMAND_LINE, Document, KeyPath, Place, merge_blocks

# Given key -> key that it replaces.
ALTERNATIVES: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("model", "path"), ("model", "config")),
    (("model", "config"), ("model", "path")),
    (("data", "path"), ("data", "mixture")),
    (("data", "mixture"), ("data", "path")),
    (("tokenizer", "path"), ("tokenizer", "vocabulary_size")),
    (("tokenizer", "vocabulary_size"), ("tokenizer", "path")),
    # A pretrained model's embeddings belong to the tokenizer that it was trained with.
    (("model", "path"), ("tokenizer", "vocabulary_size")),
)


def merge_over_base(below: Document, document: Document) -> Document:
    """`document` on top of `below`, the file that it is based on."""
    given = {key for pair in ALTERNATIVES for key in pair if document.get(*key) is not None}
    notes = _replace(below, given)
    return Document(
        document.name,
        merge_blocks(below.content, document.content),
        {**below.places, **document.places},
        below.problems + document.problems,
        notes=[*below.notes, *document.notes, *notes],
        incomplete=below.incomplete or document.incomplete,
    )


def settle_command_line(document: Document) -> None:
    """After all overrides: what they gave replaces what the files said."""
    keys = {key for pair in ALTERNATIVES for key in pair if document.get(*key) is not None}
    document.notes += _replace(document, {key for key in keys if _typed(document, key)})


def _replace(document: Document, given: set[KeyPath]) -> list[str]:
    notes = []
    for new, old in ALTERNATIVES:
        if new not in given or old in given or document.get(*old) is None:
            continue
        notes.append(f"{'.'.join(new)} replaces {'.'.join(old)} of {document.place(old).file}")
        block = document.get(*old[:-1])
        del block[old[-1]]
        document.places = {path: place for path, place in document.places.items() if path[: len(old)] != old}
    return notes


def _typed(document: Document, key: KeyPath) -> bool:
    """Whether the command line gave the key, a block around it or a key inside of it."""
    inside = [place for path, place in document.places.items() if path[: len(key)] == key]
    places: list[Place] = [document.place(key), *inside]
    return COMMAND_LINE in places
