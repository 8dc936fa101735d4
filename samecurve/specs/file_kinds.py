"""Kinds of data files by the suffixes of their names."""

from __future__ import annotations

from pathlib import Path

TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
TABLES |= {".arrow": "arrow"}  # what save_to_disk of datasets writes
COMPRESSED = frozenset((".gz", ".zst", ".bz2", ".xz"))
TEXTS = frozenset(".txt .text .md .rst .tex .html .xml .py .c .h .cc .cpp .rs .go .java .js .ts .sh .sql".split())


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
