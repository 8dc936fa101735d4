"""Data sets of the Hugging Face hub, read with `datasets`: one split of one configuration."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.data.formats import without_nulls
from samecurve.errors import DataError
from samecurve.specs.data_names import Address

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

    from samecurve.data.selection import Selection

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT = re.compile(r"\w+(\.\w+)*")  # as datasets/naming.py
_SHOWN_NAMES = 20


@dataclass(frozen=True)
class Split:
    """Rows of one split, in the cache of `datasets`.

    Attributes:
        name: OWNER/NAME of the data set.
        config: name of the configuration.
        split: name of the split.
        commit: commit of the data set's repository.
        table: the rows.
    """

    name: str
    config: str
    split: str
    commit: str
    table: Dataset = field(repr=False, compare=False)

    @property
    def identity(self) -> tuple[str, ...]:
        return (self.name, self.config, self.split, self.commit)

    @property
    def num_bytes(self) -> int:
        return self.table.data.nbytes

    def __str__(self) -> str:
        return f"{self.name}, config {self.config}, split {self.split}, commit {self.commit}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes whose numbers a column has, or lists of them; () where there are none."""
        feature = self.table.features.get(column)
        while hasattr(feature, "feature"):  # of a list
            feature = feature.feature  # pyright: ignore[reportOptionalMemberAccess]
        return tuple(getattr(feature, "names", None) or ())

    def rows(self) -> Iterator[tuple[str, dict]]:
        """Yield (place, row). Raises DataError for a row that cannot be decoded."""
        number = 0
        try:
            for number, row in enumerate(self.table, start=1):
                # A row is a dict, as `table` has no format; datasets annotates the rows of every format.
                cleaned = without_nulls(row)  # pyright: ignore[reportArgumentType]
                yield f"{self.name}, split {self.split}: row {number}", cleaned
        except MemoryError:
            raise
        except Exception as error:  # each column's decoder raises its own errors
            raise DataError(f"{self.name}, split {self.split}: error after row {number}: {_reason(error)}") from error


def download_hub_folder(name: str, pattern: str, revision: str | None) -> Path:
    """Download the data set's files that match `pattern`, and return their local folder.

    Raises DataError if they can be neither downloaded nor found in the hub's cache.
    """
    from huggingface_hub import snapshot_download

    # The hub's patterns do not support `**/`, and their `*` also matches across folders.
    wanted = [pattern, pattern.replace("**/", "")]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted, revision=revision))
    except MemoryError:
        raise
    except Exception as error:  # errors of the hub's client, its HTTP library or the disk
        raise _unreadable(name, error) from error


def read_hub_split(name: str, selection: Selection) -> Split:
    """Read the selected split, and download it if it is not in the cache.

    Raises DataError if it is not available, with the names of the existing splits or configurations.
    """
    import datasets

    builder = _builder(Address(name), selection)
    try:
        builder.download_and_prepare()
        table = builder.as_dataset(split=selection.split)
    except MemoryError:
        raise
    except Exception as error:  # datasets passes on any error of the network, the disk or a reader
        raise _unreadable(name, error) from error
    assert isinstance(table, datasets.Dataset) and builder.hash is not None  # of one split, and of the hub
    return Split(name, builder.config.name, selection.split, builder.hash, table)


def hub_urls(where: Address, selection: Selection) -> list[str]:
    """Return the URLs of the split's files, each with the commit, for a stream.

    Raises DataError as `read_hub_split`, without a connection to the hub, and for a data set whose README.md sets
    options of the reader.
    """
    builder = _builder(where, selection)
    if _is_cached(builder):
        raise DataError(
            f"{where.name}: data.streaming reads from the hub, which cannot be reached; set data.streaming=false to "
            "read what an earlier run downloaded"
        )
    usual, settings = type(builder.config)(), set(map(lambda known: known.name, fields(builder.config)))
    # BuilderConfig's own fields say which data are read, not how
    settings -= {"name", "version", "data_dir", "data_files", "description"}
    changed = sorted(key for key in settings if getattr(builder.config, key) != getattr(usual, key))
    if changed:
        raise DataError(
            f"{where.name}: its README.md sets {', '.join(changed)}, which data.streaming does not support; set "
            "data.streaming=false"
        )
    assert builder.config.data_files is not None  # only a builder of the cache has none
    return [str(url) for url in builder.config.data_files[selection.split]]


def _builder(where: Address, selection: Selection) -> DatasetBuilder:
    """Return the builder of the selected configuration. Raises DataError if it does not have the split."""
    import datasets

    name, revision = where.name, where.revision or selection.revision
    if not _SPLIT.fullmatch(selection.split):
        raise DataError(
            f"{name}: split {selection.split!r} is not the name of a split; name a whole split, and hold rows out "
            "with data.validation_fraction"
        )
    try:
        folder = where.inside or None
        builder = datasets.load_dataset_builder(name, selection.config, data_dir=folder, revision=revision)
        builder = _of_commit(builder, name, revision) if _is_cached(builder) else builder
    except (DataError, MemoryError):
        raise
    except Exception as error:  # any error of the network, the disk or a reader
        # datasets looks into its cache only if the hub fails, which then need not be asked for its configurations
        from_cache = "find cache for" in str(error) or "in the cache" in str(error)
        problem, config = _unreadable(name, error), selection.config
        with contextlib.suppress(Exception):
            configs = [] if from_cache else datasets.get_dataset_config_names(name, revision=revision)
            if config is None and len(configs) > 1:
                fix = f"set data.config to one of the {len(configs)} configurations {_listed(configs)}"
                problem = DataError(f"{name}: {fix}")
            if config is not None and not from_cache and config not in configs:
                fix = f"no configuration is named {config!r}, only {_listed(configs)}; correct data.config"
                problem = DataError(f"{name}: {fix}")
        raise problem from error
    known = [str(split) for split in builder.config.data_files or builder.info.splits or ()]
    if selection.split not in known:
        raise DataError(
            f"{name}: configuration {builder.config.name!r} has no split {selection.split!r}, only "
            f"{_listed(known)}; correct data.split (for the evaluation data: evaluate.split)"
        )
    return builder


def _is_cached(builder: DatasetBuilder) -> bool:
    """Whether the builder reads a prepared data set from the cache, because the hub did not answer."""
    return builder.name == "cache"


def _of_commit(newest: DatasetBuilder, name: str, revision: str | None) -> DatasetBuilder:
    """Return the builder of the requested revision in the cache of `datasets`. Raises DataError if it is missing."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    # By itself `datasets` takes the newest version in its cache, whatever the revision.
    wanted = revision or "main"
    commit = wanted if _COMMIT.fullmatch(wanted) else None
    if commit is None:
        # the hub's last known answer
        known = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"), "refs", wanted)
        with contextlib.suppress(OSError):
            commit = known.read_text().strip()
    if commit == newest.hash or (commit is None and revision is None):
        return newest
    # the cache of datasets has the folders OWNER___NAME/CONFIG/VERSION/COMMIT
    versions = Path(newest.cache_dir).parents[1]
    folders = [] if commit is None else sorted(versions.glob(f"*/{commit}"))
    if not folders:
        asked = f"revision {wanted}" + (f" (commit {commit})" if commit not in (None, revision) else "")
        others = sorted(folder.name for folder in versions.glob("*/*") if _COMMIT.fullmatch(folder.name))
        raise DataError(
            f"{name}: the hub cannot be reached, and {asked} is not in the cache of datasets; download it while "
            f"online, or set data.revision to one of the commits in the cache: {_listed(others)}"
        )
    return type(newest)(
        dataset_name=newest.dataset_name,
        repo_id=name,
        config_name=newest.config.name,
        version=folders[-1].parent.name,
        hash=commit,
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more if names else "none"


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name}: there is no such local file or folder, and the hub's data set of that name cannot be read: "
        f"{_reason(error)}"
    )


def _reason(error: Exception) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split())
    if kind == "RevisionNotFoundError" or (kind == "DatasetNotFoundError" and text.startswith("Revision ")):
        return "there is no such revision; correct data.revision"
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "DatasetNotFoundError"):
        return "the hub has no data set of that name, or restricts access; correct data.path, or run hf auth login"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"):
        set_to = {name: os.environ.get(name, "0").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        offline = [name for name, value in set_to.items() if value in ("1", "ON", "YES", "TRUE")]
        why = f"{offline[0]} is set; unset it" if offline else "the hub cannot be reached; check the network"
        return f"it is not in the hub's cache, and {why}"
    return f"{kind}: {text[:400]}"
