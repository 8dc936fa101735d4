"""Reader of the safetensors files in a model's folder: their headers and their tensors.

An incomplete file is rejected before any of its content is used.
Format: 8 bytes with the header's length, the header (JSON), the tensors (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samecurve.errors import ConfigurationError
from samecurve.storage.checksums import pointer_problem
from samecurve.storage.records import parse, read_record

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OFFSET = range(2**63)
_HEADER = {"__metadata__?": dict, "*": {"dtype": str, "shape": [_OFFSET], "data_offsets": [_OFFSET]}}
_LARGEST_HEADER = 100 * 10**6  # the format's own limit, in bytes
_SAMPLE_BYTES = 4096


class Stored(NamedTuple):
    """A tensor in a file: bytes [start, stop). `dtype` is safetensors' name, such as BF16.

    `packed` is there for a quantized weight, whose `shape` is that of the dequantized one; see dequantize.read.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    packed: Packed | None = None

    @property
    def num_bytes(self) -> int:
        """Size of what dequantize.read returns."""
        return 4 * math.prod(self.shape) if self.packed else self.stop - self.start


class Packed(NamedTuple):
    """How a quantized weight is stored; see dequantize.contents.

    Attributes:
        parts: values and scales by their stored names; no scales where none are stored.
        block: (rows, columns) that share a scale, None if the scales fit no block.
        transposed: whether the weight is (..., columns, rows).
    """

    parts: dict[str, Stored]
    block: tuple[int, int] | None
    transposed: bool = False

    @property
    def problem(self) -> str:
        """Reason why the weight cannot be dequantized, "" if it can."""
        (_, values), *rest = self.parts.items()
        if not rest:
            return f"{values.dtype}, and no scale is stored with it; copy or download the folder again"
        if self.block is None:
            name, scales = rest[0]
            return (
                f"{name} has the shape {scales.shape}, which does not divide the values' {values.shape} by the "
                "quantization_config of config.json; is it another model's?"
            )
        return ""


def commit_of(path: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a hub name stands for now: by the hub, or without it by the cache.

    None where neither knows, so that reading the model reports it.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        with contextlib.suppress(Exception):  # huggingface_hub and its HTTP library raise different types
            return HfApi().model_info(path, revision=revision, timeout=10).sha
    with contextlib.suppress(ValueError):  # not a name of the hub
        file = try_to_load_from_cache(path, "config.json", revision=revision)
        return Path(file).parent.name if isinstance(file, str) else None
    return None


def weight_files(path: str, revision: str | None = None) -> dict[str, Stored]:
    """List the tensors of a folder or hub name, by their names in the files.

    Raises:
        ConfigurationError: there are no safetensors files, or a file is missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            # without the same weights in other formats: consolidated.safetensors, .bin, .gguf
            patterns = ["model*.safetensors", "*.json", "*.model"]
            folder = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
        except Exception as error:  # huggingface_hub, its HTTP library and the file system raise different types
            text = " ".join(str(error).split())
            raise ConfigurationError(f"model.path: the weights of {path} could not be downloaded: {text}") from error
    index = folder / INDEX
    if index.exists():
        files = indexed_files(index)
        headers = {file: header(file) for file in sorted(set(files.values()))}
        lost = [name for name, file in files.items() if name not in headers[file]]
        if lost:
            raise ConfigurationError(
                f"{files[lost[0]]}: {lost[0]} is missing, which {index.name} lists for this file; copy or "
                "download the folder again"
            )
        return {name: headers[file][name] for name, file in files.items()}
    single = folder / SINGLE
    if not single.exists():
        raise ConfigurationError(f"model.path: {folder} has no {SINGLE}; convert the weights to safetensors")
    return header(single)


def header(file: Path) -> dict[str, Stored]:
    """List a safetensors file's tensors by name. Raise ConfigurationError for an unreadable or incomplete file."""
    try:
        with open(file, "rb") as stream:
            size = file.stat().st_size
            length = struct.unpack("<Q", stream.read(8))[0]
            begin = 8 + length
            # before `read` would allocate whatever length a damaged or forged file announces
            if length > _LARGEST_HEADER or begin > size:
                raise _damaged(file, f"it has {size:,} bytes, and its header alone would have {length:,}")
            entries, problem = parse(stream.read(length), _HEADER)
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}") from error
    except struct.error as error:
        raise _damaged(file, f"it has {size:,} bytes") from error
    if problem:
        raise _damaged(file, f"its header cannot be read: {problem}")
    entries.pop("__metadata__", None)
    entries = {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), *(begin + at for at in entry["data_offsets"]))
        for name, entry in entries.items()
    }
    expected = max((stored.stop for stored in entries.values()), default=begin)
    if expected != size:
        raise _damaged(file, f"it has {size:,} bytes, and its header announces {expected:,}")
    return entries


def read(stored: dict[str, Stored], names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors in their stored form. `stored` is the result of weight_files.

    Files are reopened on each call, because the pages of an open memory map stay in memory.

    Raises:
        ConfigurationError: safetensors rejects a file.
    """
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    tensors = {}
    for file, inside in by_file.items():
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in inside}
        except SafetensorError as error:
            raise _damaged(file, str(error)) from error
    return tensors


def _damaged(file: Path, what: str) -> ConfigurationError:
    pointer = pointer_problem(str(file))
    return ConfigurationError(
        pointer or f"{file}: the file is damaged or incomplete: {what}; copy or download it again"
    )


def indexed_files(index: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises ConfigurationError for an index that is damaged or names other folders."""
    content = read_record(index, {"weight_map": {"*": str}}).require(ConfigurationError, "copy or download it again")
    files = {name: index.parent / file for name, file in content["weight_map"].items()}
    for file in files.values():
        if file.parent != index.parent or file.name in ("", ".."):
            raise ConfigurationError(
                f"{index}: weight_map names {file}, which is not a file of this folder; correct it"
            )
    return files


def fingerprint(files: dict[str, Stored]) -> str:
    """Compute a fingerprint of a pretrained model's weights: names, dtypes, shapes, and bytes of every tensor.

    These are from its start, its middle and its end: of an embedding perhaps only the rows of new tokens were trained.
    The fingerprint reads a few MB of any model and does not depend on the order of `files` (by tensor name).
    """
    digest = hashlib.sha256()
    for name, stored in sorted(files.items()):
        digest.update(json.dumps([name, stored.dtype, stored.shape]).encode())
        last = max(stored.stop - _SAMPLE_BYTES, stored.start)
        with open(stored.file, "rb") as stream:
            for start in (stored.start, (stored.start + last) // 2, last):
                stream.seek(start)
                digest.update(stream.read(min(_SAMPLE_BYTES, stored.stop - start)))
    return digest.hexdigest()
