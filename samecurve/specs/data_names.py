"""Names of data sets, chat templates and the user's own code in a recipe, and the widths of grouped rows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

# the hub's own revisions, such as refs/pr/1, contain slashes
_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_FILE = re.compile(r"\.[A-Za-z]\w{0,7}$")  # `owner/name.jsonl` means a file, `owner/name-v1.5` a data set

ProblemType = Literal["single_label", "multi_label", "regression", "relevance"]
WEIGHT_UNITS = 1 << 24  # of a token's weight 1, in which weights are counted: float32 has none finer from 1 on
# Rows of data.group_by_length are padded to multiples of this many tokens. GPUs multiply matrices faster whose sides
# are a multiple of 64. 128 also halves the number of shapes, each of which costs attention a plan, and keeps from cuDNN
# the lengths at which it fails (models/attention/cudnn.py).
WIDTH_MULTIPLE = 128

Truncation = Literal["right", "left", "drop", "error"]  # values of data.truncation
BAD_ROWS = "bad_rows.jsonl"  # rows that data.bad_rows=drop leaves out, in the run directory
CHATML = "chatml"  # value of tokenizer.chat_template
OWN = "module:Name"  # stands for every import path where a table has one entry for them all

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

BUILTIN = "builtin:python-stdlib"
FUNCTIONS = "builtin:python-functions"  # for sft
PREFERENCES = "builtin:python-preferences"  # for dpo and reward
MODULES = "builtin:python-modules"  # for classify
DOCSTRINGS = "builtin:python-docstrings"  # for embed
WORDS = "builtin:python-tokens"  # for token_classify
STEPS = "builtin:python-steps"  # for process_reward


def is_import_path(value: object) -> bool:
    """Whether a recipe's value names a class or function of the user's own: `my_package.my_module:Name`."""
    return isinstance(value, str) and _IMPORT_PATH.fullmatch(value) is not None


Spec = TypeVar("Spec")


class ByName(dict[str, Spec]):
    """Facts by name. An import path is no key, and has the facts of a class of the user's own."""

    def __init__(self, rows: Mapping[str, Spec], own: Spec):
        super().__init__(rows)
        self._own = own

    def __missing__(self, name: str) -> Spec:
        if is_import_path(name):
            return self._own
        raise KeyError(name)


def is_hub_name(path: str) -> bool:
    """Whether a path can only be OWNER/NAME on the hub: neither the path nor its parent folder exists locally."""
    looks_like_one = _NAME.fullmatch(path) is not None and _FILE.search(path) is None
    return looks_like_one and not os.path.lexists(path) and not os.path.lexists(os.path.dirname(path))


class Address(NamedTuple):
    """Address of a data set on the hub.

    Attributes:
        name: OWNER/NAME.
        revision: revision in an hf:// URL, None if the URL has none.
        inside: folder or file within the repository, "" for all of it.
    """

    name: str
    revision: str | None = None
    inside: str = ""

    @property
    def is_file(self) -> bool:
        return bool(self.inside) and (table_kind(Path(self.inside)) is not None or is_text(Path(self.inside)))


def address(path: str) -> Address | None:
    """Parse a hub name or hf:// URL; None for any other path."""
    url = _URL.fullmatch(path)
    if url is not None:
        return Address(url[1], url[2], (url[3] or "").strip("/"))
    return Address(path) if is_hub_name(path) else None


TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
TABLES |= {".arrow": "arrow"}  # what save_to_disk of datasets writes
COMPRESSED = frozenset((".gz", ".zst", ".bz2", ".xz"))
TEXTS = frozenset(
    ".txt .text .md .mdx .markdown .rst .tex .html .xml .py .c .h .cc .cpp .rs .go .java .js .ts .sh .sql".split()
)


def table_kind(file: Path) -> str | None:
    """Return the format of a table, also of a compressed one (`.jsonl.gz`); None for any other file."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return TABLES.get(suffixes[-1]) if suffixes else None


def is_text(file: Path) -> bool:
    """Whether the suffix is that of a text file, compressed or not."""
    stem = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    return stem.suffix.lower() in TEXTS
