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
from samecurve.storage.git_lfs import POINTER_BYTES, pointer_problem

# UTF-32's little-endian mark begins with UTF-16's
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
LONGEST_ROW = 64 << 20  # bytes of a line of a table
CONVERT = (
    "find out the file's encoding (`file NAME` guesses it), convert the file (iconv -f ENCODING -t UTF-8 NAME), or "
    "leave it out with data.pattern"
)


def lines_of(name: Path | str, longest: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked and with their line breaks, in the file's encoding if that is UTF-8.

    UTF-16 and UTF-32 with a byte-order mark are converted to UTF-8.

    Args:
        name: a local file, or a path or URL for fsspec.
        longest: largest length of a line in bytes (in characters where the encoding is converted); None for any.

    Raises:
        DataError: a line is longer, or the file cannot be read to its end, is a Git LFS pointer, or is not in the
            encoding of its mark.
    """
    encoding = None
    try:
        with contextlib.ExitStack() as stack:
            stream = _unpacked(name, stack)
            encoding = marked_encoding(str(name), stream.peek(POINTER_BYTES)[:POINTER_BYTES])
            # other characters than "\n" end no line
            text = stream if encoding is None else io.TextIOWrapper(stream, encoding, newline="\n")
            number, limit = 0, -1 if longest is None else longest + 1
            while line := text.readline(limit):
                number += 1
                if longest is not None and len(line) > longest:
                    raise too_long(f"{name}:{number}")
                yield line if isinstance(line, bytes) else line.encode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not valid {encoding}, although the file begins with its byte-order mark: {error.reason}; is the "
            f"file complete? If so, {CONVERT}"
        ) from error
    except (DataError, MemoryError):  # MemoryError: nothing is wrong with the file
        raise
    except Exception as error:  # each codec and each kind of file system raises its own errors
        raise unreadable(name, error) from error


def too_long(place: str) -> DataError:
    """Return the error for a line that is longer than LONGEST_ROW. Some tokenizers need 45 times its size in memory."""
    return DataError(
        f"{place}: the line is longer than {LONGEST_ROW >> 20} MiB; is a line break missing? If it is one row, split it"
    )


def marked_encoding(name: str, head: bytes) -> str | None:
    """Return the encoding that a byte-order mark names, UTF-16 or UTF-32; None for all other files.

    Args:
        name: name of the file in messages.
        head: the first bytes of the file's content.

    Raises:
        DataError: for a Git LFS pointer, and for UTF-16 or UTF-32 without a mark.
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
    reason = getattr(error, "strerror", None) or error
    fix = ""
    if isinstance(error, PermissionError):
        fix = "; give the user of this process permission to read it (chmod +r), or leave it out with data.pattern"
    return DataError(f"{name}: could not be read: {reason}{fix}")


def _unpacked(name: Path | str, stack: contextlib.ExitStack) -> io.BufferedReader:
    stream: Any  # fsspec has its own classes
    if isinstance(name, Path):
        stream = stack.enter_context(open(name, "rb"))
    else:
        import fsspec

        stream = stack.enter_context(fsspec.open(name, "rb"))
    unpack = _UNPACKERS.get(Path(name).suffix.lower())
    return stack.enter_context(io.BufferedReader(unpack(stream) if unpack else stream))


def _zstd(stream: BinaryIO) -> Any:
    import pyarrow

    # The standard library reads zstd since Python 3.14. PythonFile, because other file systems' files are none of io's.
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


_UNPACKERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
