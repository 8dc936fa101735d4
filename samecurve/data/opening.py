"""Opens data files of text: local or behind a URL, compressed or not, as lines of UTF-8."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from samecurve.errors import DataError
from samecurve.storage.checksums import POINTER_BYTES, pointer_problem

# UTF-32's little-endian mark begins with UTF-16's
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
LONGEST_ROW = 64 << 20  # bytes of a row of a table
LARGEST_TEXT = 1 << 30  # bytes, unpacked, of a text file or a JSON array, which are read whole
CONVERT = (
    "find out the file's encoding (`file NAME` guesses it), convert the file (iconv -f ENCODING -t UTF-8 NAME), or "
    "leave it out with data.pattern"
)


def lines_of(name: Path | str, longest: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked and with their line breaks, in the file's encoding if that is UTF-8.

    UTF-16 and UTF-32 with a byte-order mark are converted to UTF-8.

    Args:
        name: a local file, or a path or URL for fsspec.
        longest: largest length of a line in bytes (in characters where the encoding is converted); None for a file that
            is read whole, of at most LARGEST_TEXT.

    Raises:
        DataError: a line or the file is longer, or the file cannot be read to its end, is a Git LFS pointer, or is not
            in the encoding of its mark.
    """
    encoding = None
    try:
        with contextlib.ExitStack() as stack:
            packed: Any  # fsspec has its own classes
            if isinstance(name, Path):
                packed = stack.enter_context(open(name, "rb"))
            else:
                import fsspec

                packed = stack.enter_context(fsspec.open(name, "rb"))
            unpack = _UNPACKERS.get(Path(name).suffix.lower())
            stream = stack.enter_context(io.BufferedReader(unpack(packed) if unpack else packed))
            encoding = marked_encoding(str(name), stream.peek(POINTER_BYTES)[:POINTER_BYTES])
            # other characters than "\n" end no line
            text = stream if encoding is None else io.TextIOWrapper(stream, encoding, newline="\n")
            number, left = 0, LARGEST_TEXT if longest is None else longest
            while line := text.readline(left + 1):
                number += 1
                if len(line) > left:
                    raise too_long(f"{name}:{number}") if longest else too_large(name)
                left -= 0 if longest else len(line)
                yield line if isinstance(line, bytes) else line.encode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not valid {encoding}, although the file begins with its byte-order mark: {error.reason}; is the "
            f"file complete? If so, {CONVERT}"
        ) from error
    except DataError:
        raise
    except Exception as error:  # each codec and each kind of file system raises its own errors
        raise unreadable(name, error) from error


def too_long(place: str) -> DataError:
    """Return the error for a row that is longer than LONGEST_ROW. Some tokenizers need 45 times its size in memory."""
    return DataError(
        f"{place}: the row is longer than {LONGEST_ROW >> 20} MiB; is a line break missing? If it is one row, split it"
    )


def too_large(name: object) -> DataError:
    return DataError(
        f"{name}: the file has more than {LARGEST_TEXT >> 20} MiB, unpacked, and is read whole; split it into several "
        "files, or write one JSON object per line in a .jsonl file"
    )


def marked_encoding(name: str, head: bytes) -> str | None:
    """Return the encoding that a byte-order mark at the beginning names, UTF-16 or UTF-32; None for all other files.

    Raises DataError for a Git LFS pointer, and for UTF-16 or UTF-32 without a mark.
    """
    if problem := pointer_problem(name, head):
        raise DataError(problem)
    encoding = next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), None)
    # ASCII in UTF-16 has every second byte 0, and would be valid UTF-8
    if encoding is None and head.count(0) * 4 > len(head):
        raise DataError(
            f"{name}: {head.count(0)} of the first {len(head)} bytes are 0, as in UTF-16 or UTF-32 without a "
            f"byte-order mark, or in a file that is no text; {CONVERT}"
        )
    return encoding


def unreadable(name: object, error: Exception) -> DataError:
    """Return the error for a file that cannot be opened or read to its end, with the fix if it is known."""
    if problem := pointer_problem(str(name)):
        return DataError(problem)
    reason, fix = getattr(error, "strerror", None) or error, ""
    if isinstance(error, MemoryError):  # of Python or Arrow
        return DataError(
            f"{name}: not enough memory to read it{f' ({error})' if str(error) else ''}; the file itself may be right: "
            "split it, or use a machine with more memory"
        )
    if isinstance(error, ImportError):  # of fsspec, for a protocol such as https; the cause has the package's name
        package = error.name or getattr(error.__cause__, "name", None)
        fix = f"; pip install {package}" if package else ""
    if isinstance(error, PermissionError):
        fix = "; give the user of this process permission to read it (chmod +r), or leave it out with data.pattern"
    return DataError(f"{name}: could not be read: {reason}{fix}")


def _zstd(stream: BinaryIO) -> Any:
    import pyarrow

    # The standard library reads zstd since Python 3.14. PythonFile, because other file systems' files are none of io's.
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


_UNPACKERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
