"""`chat`: a conversation with a trained chat model in a terminal, or a single answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TextStreamer

from samecurve.errors import ConfigurationError
from samecurve.inference.generation import GenerationOptions
from samecurve.inference.generator import Message, TextGenerator, load_generator
from samecurve.storage.terminal import printable

COMMANDS = {"/system TEXT": "set the system prompt", "/reset": "begin a new conversation", "/quit": "or Ctrl-D"}


def run(arguments: argparse.Namespace, options: GenerationOptions, piped: str | None) -> int:
    """Run the command `chat`. `piped` is the standard input if it is not a terminal, which gets a single answer."""
    trusts, precision = arguments.trust_remote_code, arguments.precision
    generator = load_generator(arguments.run, trust_remote_code=trusts, precision=precision)
    if not generator.chat:
        plain = bool(generator.tokenizer.chat_template)
        why = "was trained on plain text, not on chats" if plain else "has no chat template"
        raise ConfigurationError(
            f"{generator.folder}: the model {why}; use python -m samecurve generate {arguments.run}"
        )
    torch.manual_seed(arguments.seed)
    session = ChatSession(generator, options, arguments.system)
    if piped is not None:
        session.answer(piped)
        return 0
    print(f"{generator.folder}, temperature {options.temperature:g}. {_list_commands()}; Ctrl-C stops an answer")
    return read_and_answer(session, input)


class ChatSession:
    """A conversation and its state. `print_` is called with each piece of an answer as it is generated."""

    def __init__(
        self,
        generator: TextGenerator,
        options: GenerationOptions,
        system: str = "",
        print_: Callable[[str], None] | None = None,
    ):
        self.generator, self.options, self.system = generator, options, system
        self.turns: list[Message] = []
        self._print = print_ or (lambda piece: print(printable(piece), end="", flush=True))

    def answer(self, text: str) -> None:
        """Add a user's turn and generate its answer.

        Raises ConfigurationError, and drops the turn, if the conversation does not fit into the model's positions.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        encoded = self.generator.encode([self.generator.render([*system, *turns])], rendered=True)
        streamer = Pieces(self.generator, self._print)
        try:
            self.generator.generate(encoded, self.options, streamer)
        except KeyboardInterrupt:
            streamer.end()  # prints what it holds back until a word is complete
        self._print("\n")
        self.turns = [*turns, {"role": "assistant", "content": self.generator.text(streamer.ids)}]


def read_and_answer(session: ChatSession, read: Callable[[str], str]) -> int:
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
            print(f"\n{_list_commands()}")
            continue
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return 0
        if line.startswith("/"):
            if command == "/reset":
                session.turns = []
                print("new conversation")
            elif command == "/system":
                session.system, session.turns = rest.strip(), []
                print(f"new conversation with{'' if session.system else 'out'} a system prompt")
            else:
                print(f"{command}: unknown command; {_list_commands()}")
        elif line:
            try:
                session.answer(line)
            except ConfigurationError as error:
                print(f"{error}; /reset begins a new conversation")


def _list_commands() -> str:
    return ", ".join(f"{name} ({text})" for name, text in COMMANDS.items())


class Pieces(TextStreamer):
    """Prints whole words as they are generated, and collects the tokens in `ids`."""

    def __init__(self, generator: TextGenerator, print_: Callable[[str], None]):
        super().__init__(cast(Any, generator.tokenizer), skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self._print = print_

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._print(text)
