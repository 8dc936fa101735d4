"""Standard output and error: printable text, on streams that cannot end a program.

Text of data, models, file names and errors may hold control characters, which set a terminal's title, write its
clipboard or clear its screen, and marks that reverse the order of what is read. A disk that is full, a reader that is
gone, a closed descriptor or an ASCII locale is no reason to lose a run, or to end with another exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 as pictures (U+241B for ESC), C1 as \x9b; marks of direction and separators of lines by their number, as U+202E
_SHOWN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
_SHOWN |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_SHOWN |= {code: f"U+{code:04X}" for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))}
_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # that JSON leaves as they are
_MOVES = re.compile(r"[\r\n]*(\x1b\[A)*")  # of tqdm, between the lines of its bars
_COLOURS = re.compile(r"\x1b\[([0-9;:]*)m")  # of other libraries' messages
# bold and the like, and colours of the text, but not black; a background or hidden text could make text unreadable
_LEGIBLE = re.compile(r"(0?[0-4]?|2[2-4]|3[1-79]|9[1-7])(;(0?[0-4]?|2[2-4]|3[1-79]|9[1-7]))*")
PLAIN_LINE_SECONDS = 30.0
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a reader, a terminal, or the descriptor


def printable(text: str) -> str:
    """Show control characters and marks of direction in a text, except for tabs and line breaks."""
    return text.translate(_SHOWN)


def json_line(value: Any) -> str:
    """Return JSON whose characters are printable and mean the same; in ASCII alone where the output has no Unicode."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not is_utf8)
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def set_up() -> None:
    """Make the standard streams of this process tolerant and printable. Every program calls this first."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened, such as a checkpoint, would get what C libraries print
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(opened, True)
            else:
                os.dup2(opened, descriptor)
                os.close(opened)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)
    os.environ.setdefault("PYTHON_COLORS", "0")  # the colours of Python 3.13 and later would be shown as characters
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name) or open(descriptor, "w", encoding="utf-8", closefd=False)
        if not isinstance(stream, Stream):
            setattr(sys, name, Stream(stream))
    atexit.register(_flush)


def _flush() -> None:
    """Write what is left; Python itself would end with code 120 where that fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Stream):
            stream.close_quietly()


class Stream:
    """A text stream that shows printable text and drops what cannot be written.

    Colours pass to a terminal. Text of data is made printable before it is printed, where they are shown.

    Attributes:
        is_gone: nobody reads it any more.
        rich_proxied_file: where rich's consoles write, whose colours are control characters.
    """

    def __init__(self, raw: TextIO, is_raw: bool = False):
        self._raw, self._is_raw = raw, is_raw
        self.is_gone = False
        if isinstance(raw, io.TextIOWrapper):
            raw.reconfigure(errors="backslashreplace")
        if not is_raw:
            self.rich_proxied_file = Stream(raw, is_raw=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def write(self, text: str) -> int:
        shown = text
        if not (self._is_raw or _MOVES.fullmatch(text)):
            # carriage returns of progress bars, in front or behind
            start, end = ("\r" * text.startswith("\r"), "\r" * (len(text) > 1 and text.endswith("\r")))
            pieces = _COLOURS.split(text[len(start) : len(text) - len(end)])
            pieces[::2] = map(printable, pieces[::2])
            # changes of colours, of which outputs other than terminals get none
            pieces[1::2] = [
                f"\x1b[{codes}m" if self._raw.isatty() and _LEGIBLE.fullmatch(codes) else "" for codes in pieces[1::2]
            ]
            shown = f"{start}{''.join(pieces)}{end}"
        self._try(self._raw.write, shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._raw.flush)

    def _try(self, act: Any, *arguments: str) -> None:
        try:
            act(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.is_gone = self.is_gone or getattr(error, "errno", None) in _GONE

    def close_quietly(self) -> None:
        """Flush for the last time; what cannot be written is dropped."""
        try:
            self._raw.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                empty = os.open(os.devnull, os.O_WRONLY)
                os.dup2(empty, self._raw.fileno())
                self._raw.flush()


class TextConsole(Console):
    """Rich's console for text as it is: no markup, emoji, colours of numbers or breaks of lines; all of it printable.

    It becomes silent when its reader (terminal or launcher) goes away, so that the program continues.
    """

    def __init__(self, **options: Any):
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        super().__init__(**plain | options)

    @property
    def file(self) -> IO[str]:
        """Where it writes. rich unwraps one proxy, but a live bar has put its own around Stream."""
        inner = super().file
        while (behind := getattr(inner, "rich_proxied_file", None)) is not None:
            inner = behind
        return inner

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich's own method would end the process


@contextlib.contextmanager
def progress_bar(title: str, total: float, line: Callable[[], str], quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal, else `line()` every PLAIN_LINE_SECONDS; and `line()` at the end.

    Yields a function to call with how much more of `total` is done.
    """
    from rich.progress import Progress

    console, last = TextConsole(quiet=quiet), time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: float) -> None:
            nonlocal last
            bar.advance(task, amount)
            if not console.is_terminal and time.perf_counter() - last > PLAIN_LINE_SECONDS:
                last = time.perf_counter()
                console.print(line())

        yield advance
    console.print(line())


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table of text: the first column starts at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
