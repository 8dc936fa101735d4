"""Selects the data among the files of a path: one split of a hub data set, and no files written by samecurve runs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.errors import DataError
from samecurve.specs.data_names import is_text, table_kind
from samecurve.storage.cache import cache_folder, is_main_process
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe

_STATES = ("running", "done", "failed", "preempted")
# Patterns by which `datasets` derives splits from the names of files and folders (datasets/data_files.py).
_TRAINING = re.compile(r"(?:^|[-._ 0-9/])(?:train|training)(?:$|[-._ 0-9/])", re.IGNORECASE)
_OTHER_SPLITS = re.compile(
    r"(?:^|[-._ 0-9/])(?:validation|valid|dev|val|test|testing|eval|evaluation)(?:$|[-._ 0-9/])", re.IGNORECASE
)


@dataclass(frozen=True)
class Selection:
    """Selection of a part of a data set.

    Attributes:
        split: split of a hub data set.
        config: configuration of a hub data set.
        revision: revision of a hub data set.
        own: folders that the run writes to, which are never data.
        drop_bad_rows: whether rows that cannot be used are left out; otherwise they are an error.
        ignore_columns: columns, and keys of messages, whose content need not be read.
        max_samples: number of rows that are read, the first ones; None for all.
    """

    split: str = "train"
    config: str | None = None
    revision: str | None = None
    own: tuple[str, ...] = ()
    drop_bad_rows: bool = False
    ignore_columns: tuple[str, ...] = ()
    max_samples: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, data: Data) -> Selection:
        own = (recipe.output_dir, str(cache_folder(recipe.data.cache_dir)))
        parts = data.split, data.config, data.revision
        return cls(*parts, own, data.bad_rows == "drop", data.ignore_columns, data.max_samples)


WHOLE = Selection()  # all of a local path


def folder_files(root: Path, name: str, pattern: str | None, own: Iterable[str] = ()) -> tuple[Path, ...]:
    """Return the data files of a folder, sorted by path; with `pattern` those that match, whatever their names.

    Raises:
        DataError: for a folder without a usable file, for one that mixes texts and tables or several splits, and for a
            sub-folder that cannot be listed.
    """
    if not pattern and (saved := _saved_files(root, name)):
        return saved
    listed = sorted(_listed(root, pattern))
    listed = [f for f in listed if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    files, left_out = _without_runs(listed, root, own)
    tables = [file for file in files if table_kind(file)]
    texts = [file for file in files if is_text(file)]
    if left_out:
        _say_left_out(name, tuple(sorted(left_out.items())))
    without = f" ({sum(left_out.values())} files that runs of samecurve wrote are left out)" if left_out else ""
    if pattern:
        if not files:
            raise DataError(
                f"{name}: no file matches data.pattern={pattern!r}{without}; use **/*.ext to search sub-folders too"
            )
        return tuple(files)
    if tables and texts:
        raise DataError(
            f"{name}: the folder has {len(tables)} table files ({tables[0].name}, ...) and {len(texts)} text files "
            f"({texts[0].name}, ...); select one kind, for example with data.pattern='**/*{tables[0].suffix}'"
        )
    if not tables and not texts:
        if left_out and not files:
            written = f"runs of samecurve wrote all {sum(left_out.values())} files of this folder"
            raise DataError(f"{name}: {written}; set data.path to the folder of your data")
        suffixes = ", ".join(suffix or "(none)" for suffix, _ in Counter(f.suffix for f in files).most_common(5))
        raise DataError(
            f"{name}: none of the folder's {len(files)} files is a text or a table{without} (suffixes: {suffixes}); "
            "set data.pattern to read them as text"
            if files
            else f"{name}: the folder is empty; set data.path to the folder of your data"
        )
    relative = [file.relative_to(root).as_posix() for file in tables]
    training = [file for file in relative if _TRAINING.search(file)]
    others = [file for file in relative if _OTHER_SPLITS.search(file) and not _TRAINING.search(file)]
    if training and others:
        raise DataError(
            f"{name}: by their names, the files are of more than one split ({training[0]}, {others[0]}), and training "
            "would read all of them; select the training files, for example with data.pattern='**/*train*'"
        )
    return tuple(tables or texts)


def _saved_files(root: Path, name: str) -> tuple[Path, ...]:
    """Return the Arrow files of a folder that `save_to_disk` of datasets wrote, in its order; () for other folders."""
    splits = read_record(root / "dataset_dict.json", {"splits?": ([Path], None)}).value or {}
    names = [split for split in splits.get("splits") or () if (root / split).is_dir()]
    if names:
        raise DataError(
            f"{name}: the folder has the splits {', '.join(names)}, which save_to_disk wrote; set data.path to one of "
            f"them, such as {Path(name) / names[0]}"
        )
    state = read_record(root / "state.json", {"_data_files?": ([{"filename": Path}], None)}).value or {}
    files = [entry["filename"] for entry in state.get("_data_files") or ()]
    absent = next((file for file in files if not (root / file).is_file()), None)
    if absent is not None:
        raise DataError(f"{name}: state.json names the file {absent}, which is not there; copy the whole folder again")
    return tuple(root / file for file in files)


def _listed(root: Path, pattern: str | None) -> Iterable[Path]:
    """List the files of a folder that match the pattern, or all of them."""
    if pattern:
        try:
            return [file for file in root.glob(pattern) if _is_file(file)]
        except (ValueError, NotImplementedError) as error:  # "**.jsonl", or a path from the root
            raise DataError(
                f"{root}: data.pattern={pattern!r} is no pattern within the folder: {error}; *.jsonl matches files of "
                "the folder itself, **/*.jsonl those of its sub-folders too"
            ) from error

    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: the folder cannot be listed: {error.strerror}; give the user of this process access to "
            "it, or select other files with data.pattern"
        ) from error

    paths = []
    # os.walk, because Path.glob silently skips folders without read permission, and their files would be missing.
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths += [file for name in names if _is_file(file := Path(folder, name))]
    return paths


def _is_file(file: Path) -> bool:
    """Whether a name is a file's. Raises DataError for a link to nothing that would be data."""
    is_data = (table_kind(file) or is_text(file)) and not file.name.startswith(".")  # Emacs locks a file by a link
    if is_data and file.is_symlink() and not file.exists():
        raise DataError(
            f"{file}: a symbolic link to {os.readlink(file)}, which does not exist; restore the file, or leave it out "
            "with data.pattern"
        )
    return file.is_file()


def _without_runs(files: list[Path], root: Path, own: Iterable[str]) -> tuple[list[Path], dict[str, int]]:
    """Return (files not written by a run, number of files left out per run directory)."""
    # on another machine the run's own folder may have heartbeats, but neither run.json nor status.json
    written = {Path(folder).expanduser().resolve() for folder in own}
    known: dict[Path, Path | None] = {}

    def run_of(folder: Path) -> Path | None:
        if folder not in known:
            above = None if folder == root else run_of(folder.parent)
            known[folder] = above or (folder if folder.resolve() in written or is_run(folder) else None)
        return known[folder]

    kept = [file for file in files if run_of(file.parent) is None]
    left_out = Counter(str(run) for file in files if (run := run_of(file.parent)) is not None)
    return kept, dict(left_out)


def is_run(folder: Path) -> bool:
    """Whether a folder is the run directory (output_dir) of a run, by the content of run.json or status.json."""
    for name in ("run.json", "status.json"):
        content = read_record(folder / name).value or {}
        if name == "run.json" and {"recipe", "strategy", "versions"} <= content.keys():
            return True
        if name == "status.json" and {"step", "exit_code"} <= content.keys() and content.get("state") in _STATES:
            return True
    return False


@lru_cache  # once per folder: the tokenizer, the training and the held-out rows may all be read from it
def _say_left_out(name: str, left_out: tuple[tuple[str, int], ...]) -> None:
    if is_main_process():
        total, folders = sum(count for _, count in left_out), [folder for folder, _ in left_out]
        more = f" and {len(folders) - 3} more" if len(folders) > 3 else ""
        where = ", ".join(folders[:3]) + more
        what = (
            "1 file that a run of samecurve wrote is"
            if total == 1
            else f"{total} files that runs of samecurve wrote are"
        )
        print(f"{name}: {what} left out of the data (in {where})")
