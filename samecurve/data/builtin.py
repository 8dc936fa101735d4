"""The documented functions of the standard library: as chats, preference pairs, texts to classify, code to find."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samecurve.data.schemas.classification import Example, ExampleSource
from samecurve.data.schemas.conversation import Conversation, ConversationSource
from samecurve.data.schemas.preference import Pair, PairSource
from samecurve.data.schemas.retrieval import Match, MatchSource

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FunctionSource(ConversationSource):
    """The user's turn is the signature and the docstring, the assistant's the body without its indentation.

    An answer that began with spaces would begin inside of a token: `\\n` and spaces are one, and the line break
    belongs to the prompt.
    """

    @property
    def identity(self) -> str:
        return "functions"

    def check(self) -> None:
        """Nothing of this was written by the user."""

    def documents(self) -> Iterator[Conversation]:
        for place, prompt, body in _distinct_functions(self.files):
            yield _conversation(place, prompt, body)


@dataclass(frozen=True)
class PreferenceSource(PairSource):
    """builtin:python-preferences: a function's body is chosen, and rejected is the same body with something broken."""

    @property
    def identity(self) -> str:
        return "preferences 2"  # raise it when _corrupted does something else

    def check(self) -> None:
        """Nothing of this was written by the user."""

    def documents(self) -> Iterator[Pair]:
        before = "pass"
        for place, prompt, body in _distinct_functions(self.files):
            rejected = _corrupted(prompt, body, before)
            yield Pair(_conversation(place, prompt, body), _conversation(place, prompt, rejected))
            before = body


def _conversation(place: str, prompt: str, body: str) -> Conversation:
    return Conversation(place, ({"role": "user", "content": prompt}, {"role": "assistant", "content": body}), 1)


def _corrupted(prompt: str, body: str, other: str) -> str:
    """The body without a third of its lines, with its lines in another order, with a third of its names replaced by
    others of them, or `other`, another function's. Which one is drawn from the function itself, so always the same."""
    draw = random.Random(f"{prompt}\0{body}")
    lines, names = body.split("\n"), [found.span() for found in re.finditer(r"\b[A-Za-z_]{2,}\b", body)]
    found = [other]
    if len(lines) > 1:
        kept = sorted(draw.sample(range(len(lines)), len(lines) - _third(lines)))
        found.append("\n".join(lines[index] for index in kept))
        found.append("\n".join(draw.sample(lines, len(lines))))
    if len(names) > 1:
        words, changed = [body[start:end] for start, end in names], body
        for start, end in sorted(draw.sample(names, _third(names)), reverse=True):
            changed = changed[:start] + draw.choice(words) + changed[end:]
        found.append(changed)
    draw.shuffle(found)
    return next((text.strip() for text in found if text.strip() not in ("", body)), f"{body}\npass")


def _third(things: list) -> int:
    return max(1, len(things) // 3)


# Of about the same size, and about things that are not alike.
PACKAGES = ("asyncio", "email", "logging", "multiprocessing", "tkinter", "unittest", "xml")
_MOST_PER_PACKAGE = 200


@dataclass(frozen=True)
class ModuleSource(ExampleSource):
    """builtin:python-modules: a documented function's code, and which package of the standard library it is from."""

    names: tuple[str, ...] | None = PACKAGES

    @property
    def identity(self) -> str:
        return "modules"

    def check(self) -> None:
        """Nothing of this was written by the user."""

    def documents(self) -> Iterator[Example]:
        """Each function once, at most _MOST_PER_PACKAGE of a package, so that no class is the answer to most."""
        root = Path(sysconfig.get_paths()["stdlib"])
        counts = dict.fromkeys(PACKAGES, 0)
        seen = set()
        for file in self.files:
            package = file.relative_to(root).parts[0].removesuffix(".py")
            for line, prompt, body in _functions(file) if package in counts else ():
                code = function(prompt, body)
                if code not in seen and counts[package] < _MOST_PER_PACKAGE:
                    seen.add(code)
                    counts[package] += 1
                    yield Example(f"{file}:{line}", code, None, package)


@dataclass(frozen=True)
class DocstringSource(MatchSource):
    """builtin:python-docstrings: the first paragraph of a function's docstring, and the function without it."""

    @property
    def identity(self) -> str:
        return "docstrings"

    def check(self) -> None:
        """Nothing of this was written by the user."""

    def documents(self) -> Iterator[Match]:
        """Each paragraph and each function once: what belongs together twice would be told apart."""
        seen: set[str] = set()
        for file in self.files:
            for line, prompt, body in _functions(file):
                texts = _summary_and_code(prompt, body)
                if texts and not seen.intersection(texts):
                    seen.update(texts)
                    yield Match(f"{file}:{line}", texts)


def _summary_and_code(prompt: str, body: str) -> tuple[str, str] | None:
    """None where the docstring says less than three words, or begins in the function's first line."""
    definition = ast.parse(function(prompt, body)).body[0]
    summary = " ".join(ast.get_docstring(definition).split("\n\n")[0].split())
    signature = "\n".join(prompt.split("\n")[: definition.body[0].lineno - 1])
    if len(summary.split()) < 3 or not signature:
        return None
    return summary, function(signature, body)


def _distinct_functions(files: tuple[Path, ...]) -> Iterator[tuple[str, str, str]]:
    """(place, prompt, body), each pair once: copies would be learnt by heart. Files that are no UTF-8 or no Python that
    can be parsed are left out."""
    seen = set()
    for file in files:
        for line, prompt, body in _functions(file):
            if (prompt, body) not in seen:
                seen.add((prompt, body))
                yield f"{file}:{line}", prompt, body


def _functions(file: Path) -> Iterator[tuple[int, str, str]]:
    """(line, signature and docstring, body) of each documented function that is more than its docstring."""
    try:
        source = file.read_bytes().decode()
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, Function) and len(node.body) > 1 and ast.get_docstring(node):
            docstring = node.body[0]
            prompt = _dedented(lines[node.lineno - 1 : docstring.end_lineno], node.col_offset)
            body = _dedented(lines[docstring.end_lineno : node.end_lineno], docstring.col_offset).strip()
            if prompt and body and _is_code(function(prompt, body)):
                yield node.lineno, prompt, body


def function(prompt: str, body: str) -> str:
    """The code that a prompt and an answer to it make together."""
    return f"{prompt}\n{textwrap.indent(body, '    ')}\n"


def _dedented(lines: list[str], indent: int) -> str:
    """Without the function's own indentation, where all lines have it: a text over several lines may not."""
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines).rstrip()


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
