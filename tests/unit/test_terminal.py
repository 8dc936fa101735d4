"""What reaches the terminal is printable, and no output changes an exit code."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from samecurve.cli import commands
from samecurve.errors import DataError
from samecurve.run import lifecycle
from samecurve.storage import terminal
from samecurve.storage.terminal import Stream, TextConsole, aligned, json_line, printable

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "a\x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b31m\x08\x7fb\u202ec\u2066\u2028d\re"
SHOWN = "a␛]52;c;cHduZWQ=␇␛[2J\\x9b31m␈␡bU+202EcU+2066U+2028d␍e"
# a process that ends as a run does
PROGRAM = """
import sys
from samecurve.errors import ConfigurationError, NothingToDo, Preempted
from samecurve.run import lifecycle
def main():
    print("ü ⟦" * 9000)
    if sys.argv[1:]:
        raise {"done": NothingToDo, "refused": ConfigurationError, "stopped": Preempted}[sys.argv[1]]("ü")
lifecycle.end_with(main)
"""


def test_controls_and_marks_of_direction_are_shown():
    assert printable(HOSTILE) == SHOWN
    assert printable("tab\tline\nümläut 😀 👩‍🚀 ␛") == "tab\tline\nümläut 😀 👩‍🚀 ␛"


def test_streams_show_what_print_writes_but_let_progress_bars_move():
    raw = io.StringIO()
    stream = Stream(raw)
    print(HOSTILE, file=stream)
    stream.writelines(["\x1b[31K"])
    for text in ("\rsteps  50%", "\n", "\x1b[A", "50%\r", "\r"):
        stream.write(text)
    assert raw.getvalue() == f"{SHOWN}\n␛[31K\rsteps  50%\n\x1b[A50%\r\r"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_the_colours_of_other_libraries(is_terminal):
    """But none that hide text: a background, black, or concealed."""
    raw = io.StringIO()
    raw.isatty = lambda: is_terminal
    Stream(raw).write("\x1b[1;33mWARNING\x1b[0m \x1b[8mhidden\x1b[m \x1b[41;31mred\x1b[38;5;1m \x1b[30m\x1b[2J\x1b]0;m")
    plain = "WARNING hidden red ␛[2J␛]0;m"
    assert raw.getvalue() == (
        plain.replace("WARNING", "\x1b[1;33mWARNING\x1b[0m").replace("hidden", "hidden\x1b[m") if is_terminal else plain
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_shows_text_and_keeps_its_own_colours(is_terminal, monkeypatch):
    raw = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Stream(raw))
    console = TextConsole(force_terminal=is_terminal, color_system="standard" if is_terminal else None)
    console.print("\x1b[2J\u202e", style="bold")
    assert raw.getvalue() == ("\x1b[1m␛[2JU+202E\x1b[0m\n" if is_terminal else "␛[2JU+202E\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_for_the_terminal_means_the_same(encoding, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    line = json_line({"text": HOSTILE + "ü"})
    assert json.loads(line) == {"text": HOSTILE + "ü"}
    assert printable(line) == line and ("ü" in line) == (encoding == "utf-8")


def test_errors_are_printed_as_text(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def fail() -> None:
        raise DataError(HOSTILE)

    assert lifecycle.exit_code(fail) == DataError.exit_code
    assert sys.stderr.getvalue().endswith(f"{SHOWN}\n")
    lifecycle.print_stderr_from_thread(f"{HOSTILE}\udcff")
    assert capfd.readouterr().err == f"{SHOWN}\\udcff\n"


def outputs(kind: str):
    """A standard stream that is closed, full, without a reader, or without Unicode."""
    if kind == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        return open(writer, "w", encoding="utf-8")
    if kind == "full":
        return open("/dev/full", "w", encoding="utf-8")
    return None if kind == "closed" else io.TextIOWrapper(io.BytesIO(), encoding="ascii")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(("command", "kind"), [*zip(commands.COMMANDS, cycle(["closed", "full", "gone", "ascii"]))])
def test_no_output_changes_the_exit_code_of_a_command(command, kind, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, outputs(kind))
    for arguments, code in ([command, "--help"], 0), ([command, "--no_such_option_ü"], 2):
        with pytest.raises(SystemExit) as ended:
            commands.main(arguments)
        print("ü ⟦" * 9000, flush=True)
        terminal._flush()
        assert ended.value.code == code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("kind", [">&- 2>&- <&-", ">/dev/full 2>/dev/full", "2>&1 | true"])
@pytest.mark.parametrize(("end", "code"), [("", 0), ("done", 0), ("refused", 2), ("stopped", 75)])
def test_no_output_changes_the_exit_code_of_a_run(end, code, kind, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    line = f"set -o pipefail; '{sys.executable}' '{tmp_path}/program.py' {end} {kind}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(["bash", "-c", line], env=environment, timeout=60).returncode == code


def test_a_closed_descriptor_is_given_to_no_file(tmp_path):
    opened = f"open({str(tmp_path / 'a')!r}, 'w')"
    program = f"from samecurve.storage import terminal; terminal.set_up(); a = {opened}; a.write(str(a.fileno()))"
    subprocess.run(["bash", "-c", f"'{sys.executable}' -c \"{program}\" <&- >&- 2>&-"], cwd=ROOT, check=True)
    assert int((tmp_path / "a").read_text()) > 2


def test_a_live_bar_is_drawn_by_codes(monkeypatch):
    """Its own codes reach the terminal as they are, those of a printed text do not."""
    monkeypatch.setenv("TERM", "xterm")
    shown = bytearray()

    def read(descriptor: int) -> bytes:
        shown.extend(data := os.read(descriptor, 4096))
        return data

    code = pty.spawn([sys.executable, str(Path(__file__).with_name("live_bar_probe.py"))], read)
    text = shown.decode()
    assert code == 0 and "second bar" in text and "\x1b[2K" in text
    assert "\N{SYMBOL FOR ESCAPE}[2K" not in text and "\x1b]0;" not in text


def test_numbers_of_a_table_end_at_the_right():
    assert aligned([["square", "fp32"], ["64", "0.1"], ["16384", ""]]) == "square  fp32\n64       0.1\n16384"
