"""`chat`: a conversation with a trained chat model in a terminal, or a single answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TextStreamer

from samecurve.errors import ConfigurationError
from samecurve.inference.generator import Message, Writer, load
from samecurve.inference.writing import Writing

COMMANDS = {"/system": "TEXT, or nothing to remove it", "/reset": "begin a new conversation", "/quit": "or Ctrl-D"}


def run(arguments: argparse.Namespace, how: Writing, piped: str | None) -> int:
    """Run the command `chat`. `piped` is the standard input if it is not a terminal, which gets a single answer."""
    writer = load(arguments.run)
    if not writer.chat:
        raise ConfigurationError(_no_template(writer, arguments.run))
    torch.manual_seed(arguments.seed)
    talk = Talk(writer, how, arguments.system)
    if piped is not None:
        talk.say(piped)
        return 0
    print(f"{writer.folder}, temperature {how.temperature:g}. {_listed()}; Ctrl-C stops an answer")
    return loop(talk, input)


def _no_template(writer: Writer, run: Path) -> str:
    why = "has no chat template" if not writer.tokenizer.chat_template else "was trained on plain text, not on turns"
    return f"{writer.folder}: {why}, so there is no conversation; python -m samecurve generate {run} lets it write"


class Talk:
    """A conversation and its state. `print_` is called with each piece of an answer as it is generated."""

    def __init__(self, writer: Writer, how: Writing, system: str = "", print_: Callable[[str], None] | None = None):
        self.writer, self.how, self.system = writer, how, system
        self.turns: list[Message] = []
        self._print = print_ or _to_stdout

    def say(self, text: str) -> None:
        """Add a user's turn and generate its answer.

        Raises ConfigurationError, and drops the turn, if the conversation does not fit into the model's positions.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        encoded = self.writer.encode([self.writer.ask([*system, *turns])], rendered=True)
        streamer = _streamer(self.writer, self._print)
        try:
            self.writer.write(encoded, self.how, streamer)
        except KeyboardInterrupt:
            streamer.end()
        self._print("\n")
        self.turns = [*turns, {"role": "assistant", "content": "".join(streamer.pieces)}]


def loop(talk: Talk, read: Callable[[str], str]) -> int:
    """Read and answer lines until the end of the input. Returns the exit code.

    `read` shows a prompt and returns a line, as `input` does; EOFError ends the loop.
    """
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(f"\n{_listed()}")
            continue
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return 0
        if line.startswith("/"):
            _obey(talk, command, rest.strip())
        elif line:
            _answer(talk, line)


def _answer(talk: Talk, line: str) -> None:
    try:
        talk.say(line)
    except ConfigurationError as error:
        print(f"{error}; /reset begins a new conversation")


def _obey(talk: Talk, command: str, rest: str) -> None:
    if command == "/reset":
        talk.turns = []
        print("a new conversation")
    elif command == "/system":
        talk.system, talk.turns = rest, []
        print("a new conversation, " + ("with that system turn" if rest else "without a system turn"))
    else:
        print(f"{command}: no such command; {_listed()}")


def _listed() -> str:
    return ", ".join(f"{name} ({text})" for name, text in COMMANDS.items())


def _to_stdout(text: str) -> None:
    print(text, end="", flush=True)


def _streamer(writer: Writer, print_: Callable[[str], None]):
    class Pieces(TextStreamer):
        """Prints whole words as they are generated, and collects them in `pieces`."""

        def __init__(self) -> None:
            super().__init__(writer.tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.pieces: list[str] = []

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.pieces.append(text)
            print_(text)

    return Pieces()
