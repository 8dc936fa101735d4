"""Finds the source of each kind of document behind `data.path`: files, a hub data set, or a built-in data set."""

from __future__ import annotations

import ast
import contextlib
import io
import keyword
import random
import re
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.data import sources
from samecurve.data.schemas.classification import Example, ExampleSource
from samecurve.data.schemas.conversation import ChatSchema, Conversation, ConversationSource
from samecurve.data.schemas.preference import Pair, PairSchema, PairSource
from samecurve.data.schemas.retrieval import Match, MatchSource
from samecurve.data.schemas.token_labels import STEP_NAMES, LabelledWords, LabelledWordsSource
from samecurve.specs.data_names import DOCSTRINGS, FUNCTIONS, MODULES, PREFERENCES, STEPS, WORDS, ProblemType

if TYPE_CHECKING:
    from samecurve.config.schema import Data


def find_conversations(
    name: str, pattern: str | None, schema: ChatSchema, selection: sources.Selection = sources.WHOLE
) -> ConversationSource:
    """Find the conversations of `data.path`. Raises as `sources.find_source` does.

    Args:
        pattern: glob within a folder or a repository of the hub, None for all data files.
    """
    if name == FUNCTIONS:
        return FunctionSource(name, sources.builtin_files())
    files = sources.find_source(name, pattern, selection=selection).files
    return ConversationSource(name, files, schema=schema, selection=selection)


def find_pairs(
    name: str,
    pattern: str | None,
    schema: PairSchema,
    selection: sources.Selection = sources.WHOLE,
    kind: type[PairSource] = PairSource,
) -> PairSource:
    """Find the preference pairs of `data.path`. Raises as `sources.find_source` does.

    Args:
        pattern: glob within a folder or a repository of the hub, None for all data files.
        kind: how the rows of tables are read.
    """
    if name == PREFERENCES:
        return PreferenceSource(name, sources.builtin_files())
    files = sources.find_source(name, pattern, selection=selection).files
    return kind(name, files, schema=schema, selection=selection)


def find_examples(
    data: Data, names: tuple[str, ...] | None, selection: sources.Selection, problem_type: ProblemType = "single_label"
) -> ExampleSource:
    """Find the labelled texts of `data.path`. Raises as `sources.find_source` does.

    `names` are the class names, None if they are not known yet.
    """
    name = data.path
    assert name is not None  # classify takes no mixture
    if name == MODULES:
        return ModuleSource(name, sources.builtin_files())
    files = sources.find_source(name, data.pattern, selection=selection).files
    columns = data.text_column, data.text_pair_column, data.label_column
    return ExampleSource(name, files, *columns, names, problem_type, selection=selection)


def find_labelled_words(
    data: Data, names: tuple[str, ...] | None, selection: sources.Selection, steps: bool = False
) -> LabelledWordsSource:
    """Find the labelled words, or steps, of `data.path`. Raises as `sources.find_source` does."""
    name = data.path
    assert name is not None  # the tasks take no mixture
    if name == (STEPS if steps else WORDS):
        return (StepSource if steps else WordSource)(name, sources.builtin_files())
    files = sources.find_source(name, data.pattern, selection=selection).files
    columns = {"label_column": data.label_column, "words_column": data.words_column, "names": names, "steps": steps}
    return LabelledWordsSource(name, files, data.text_column, selection=selection, **columns)


def find_matches(name: str, data: Data, selection: sources.Selection = sources.WHOLE) -> MatchSource:
    """Find the anchors and candidates of `data.path`. Raises as `sources.find_source` does.

    The first row is read, and a broken first file raises its DataError.
    """
    if name == DOCSTRINGS:
        return DocstringSource(name, sources.builtin_files())
    files = sources.find_source(name, data.pattern, selection=selection).files
    rows = (row for _, row in sources.table_rows(files[0], MatchSource.documents_are) if isinstance(row, dict))
    first = next(rows, {})  # decides on the negatives of all rows
    negatives = data.negative_columns
    if negatives is None:  # negative, negative_1, negative_2, ...
        matches = (re.fullmatch(r"negative(?:_(\d+))?", name) for name in map(str, first))
        negatives = [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1] or 0))]
    columns = [("anchor_column", data.anchor_column), ("positive_column", data.positive_column)]
    columns += [("negative_columns", column) for column in negatives]
    number, listed = data.num_negatives, first.get("neg") or []
    number = number if number is not None else len(listed) if isinstance(listed, list) else 0
    rest = data.format, number, data.num_negatives is not None
    return MatchSource(name, files, "text", tuple(columns), *rest, selection=selection)


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FunctionSource(ConversationSource):
    """builtin:python-functions: the user's turn is signature and docstring, the assistant's the dedented body.

    The body is dedented, because an answer that began with spaces would begin inside of a token: `\\n` and the spaces
    after it are one token, and the line break belongs to the prompt.
    """

    @property
    def identity(self) -> str:
        return "functions"

    def entries(self) -> Iterator[Conversation]:
        for place, prompt, body in _distinct_functions(self.local_files):
            yield _conversation(place, prompt, body)


@dataclass(frozen=True)
class PreferenceSource(PairSource):
    """builtin:python-preferences: the chosen answer is a function's body, the rejected one a corrupted copy."""

    @property
    def identity(self) -> str:
        return "preferences 2"  # raise it when _corrupted does something else

    def entries(self) -> Iterator[Pair]:
        before = "pass"
        for place, prompt, body in _distinct_functions(self.local_files):
            rejected = _corrupted(prompt, body, before)
            yield Pair(_conversation(place, prompt, body), _conversation(place, prompt, rejected))
            before = body


def _conversation(place: str, prompt: str, body: str) -> Conversation:
    return Conversation(place, ({"role": "user", "content": prompt}, {"role": "assistant", "content": body}), 1)


def _corrupted(prompt: str, body: str, other: str) -> str:
    """Corrupt a function's body in one of four ways.

    It loses a third of its lines, its lines are shuffled, a third of its names is replaced by others of its names, or
    it is replaced by `other`, the body of another function.
    """
    # Seeded by the function itself, so that the result is always the same.
    draw = random.Random(f"{prompt}\0{body}")
    lines, names = body.split("\n"), [match.span() for match in re.finditer(r"\b[A-Za-z_]{2,}\b", body)]
    corruptions = [other]
    if len(lines) > 1:
        kept = sorted(draw.sample(range(len(lines)), len(lines) - _third(lines)))
        corruptions.append("\n".join(lines[index] for index in kept))
        corruptions.append("\n".join(draw.sample(lines, len(lines))))
    if len(names) > 1:
        words, changed = [body[start:end] for start, end in names], body
        # from the end, so that the spans before stay valid
        for start, end in sorted(draw.sample(names, _third(names)), reverse=True):
            changed = changed[:start] + draw.choice(words) + changed[end:]
        corruptions.append(changed)
    draw.shuffle(corruptions)
    return next((text.strip() for text in corruptions if text.strip() not in ("", body)), f"{body}\npass")


def _third(things: list) -> int:
    return max(1, len(things) // 3)


# Classes: packages of about the same size on different subjects. Not tkinter, which many distributions split off.
PACKAGES: tuple[str, ...] = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml")
_MOST_PER_PACKAGE = 200


@dataclass(frozen=True)
class ModuleSource(ExampleSource):
    """builtin:python-modules: a documented function's code, labelled with its package of the standard library."""

    names: tuple[str, ...] | None = PACKAGES

    @property
    def identity(self) -> str:
        return "modules"

    def entries(self) -> Iterator[Example]:
        """Yield each function once, at most _MOST_PER_PACKAGE per package, so that no class dominates."""
        root = Path(sysconfig.get_paths()["stdlib"])
        counts = dict.fromkeys(PACKAGES, 0)
        seen = set()
        for file in self.local_files:
            package = file.relative_to(root).parts[0].removesuffix(".py")
            for line, prompt, body in _functions(file) if package in counts else ():
                code = function(prompt, body)
                if code not in seen and counts[package] < _MOST_PER_PACKAGE:
                    seen.add(code)
                    counts[package] += 1
                    yield Example(f"{file}:{line}", code, None, package)


KINDS_OF_WORDS = ("keyword", "name", "number", "operator", "string")
_MOST_FUNCTIONS = 1000
_MOST_STEPS = 12


@dataclass(frozen=True)
class WordSource(LabelledWordsSource):
    """builtin:python-tokens: the words of a function's body, labelled with their kind in Python's grammar."""

    names: tuple[str, ...] | None = KINDS_OF_WORDS

    @property
    def identity(self) -> str:
        return "words"

    def entries(self) -> Iterator[LabelledWords]:
        kinds = {tokenize.NAME: "name", tokenize.NUMBER: "number", tokenize.OP: "operator", tokenize.STRING: "string"}
        for place, _, body in islice(_distinct_functions(self.local_files), _MOST_FUNCTIONS):
            try:
                tokens = [t for t in tokenize.generate_tokens(io.StringIO(body).readline) if t.type in kinds]
            except (tokenize.TokenError, SyntaxError):  # some lines of a body are no program by themselves
                continue
            label = tuple("keyword" if keyword.iskeyword(t.string) else kinds[t.type] for t in tokens)
            if label:
                yield LabelledWords(place, tuple(t.string for t in tokens), label)


@dataclass(frozen=True)
class StepSource(LabelledWordsSource):
    """builtin:python-steps: a function's signature and docstring, and the lines of its body as steps.

    In every second function the lines go over into those of another function, and are wrong from there on.
    """

    names: tuple[str, ...] | None = STEP_NAMES
    steps: bool = True

    @property
    def identity(self) -> str:
        return "steps"

    def entries(self) -> Iterator[LabelledWords]:
        before: list[str] = []
        for place, prompt, body in islice(_distinct_functions(self.local_files), _MOST_FUNCTIONS):
            lines = [line for line in body.split("\n") if line.strip()][:_MOST_STEPS]
            # seeded by the function itself, so that the result is always the same
            draw = random.Random(f"{prompt}\0{body}")
            right = draw.randrange(len(lines)) if before and draw.random() < 0.5 else len(lines)
            steps = lines[:right] + (before[:_MOST_STEPS] if right < len(lines) else [])
            before = lines
            yield LabelledWords(
                place, tuple(steps), tuple(STEP_NAMES[index < right] for index in range(len(steps))), prompt
            )


@dataclass(frozen=True)
class DocstringSource(MatchSource):
    """builtin:python-docstrings: the anchor is a docstring's first paragraph, the positive its function without it."""

    @property
    def identity(self) -> str:
        return "docstrings"

    def entries(self) -> Iterator[Match]:
        """Yield each pair whose paragraph and function are both new."""
        # Otherwise a text's second match would be trained as its negative.
        seen: set[str] = set()
        for file in self.local_files:
            for line, prompt, body in _functions(file):
                definition = ast.parse(function(prompt, body)).body[0]
                assert isinstance(definition, Function)
                summary = " ".join((ast.get_docstring(definition) or "").split("\n\n")[0].split())
                signature = "\n".join(prompt.split("\n")[: definition.body[0].lineno - 1])
                texts = summary, function(signature, body)
                # there is no signature where the docstring begins in the function's first line
                if len(summary.split()) >= 3 and signature and not seen.intersection(texts):
                    seen.update(texts)
                    yield Match(f"{file}:{line}", texts)


def _distinct_functions(files: tuple[Path, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield (place, prompt, body) of each function, each pair once, because copies would be memorised."""
    seen = set()
    for file in files:
        for line, prompt, body in _functions(file):
            if (prompt, body) not in seen:
                seen.add((prompt, body))
                yield f"{file}:{line}", prompt, body


def _functions(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, signature and docstring, body) of each documented function that has a body besides its docstring.

    Yields nothing for a file that is not UTF-8 or not Python that can be parsed.
    """
    try:
        source = file.read_bytes().decode()
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return
    # not splitlines, which also breaks lines where ast does not, for example at a form feed
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, Function) and len(node.body) > 1 and ast.get_docstring(node):
            docstring = node.body[0]
            prompt = _dedented(lines[node.lineno - 1 : docstring.end_lineno], node.col_offset)
            body = _dedented(lines[docstring.end_lineno : node.end_lineno], docstring.col_offset).strip()
            with contextlib.suppress(SyntaxError, ValueError):
                ast.parse(function(prompt, body))
                if prompt and body:
                    yield node.lineno, prompt, body


def function(prompt: str, body: str) -> str:
    """Return the code of a prompt and its answer."""
    return f"{prompt}\n{textwrap.indent(body, '    ')}\n"


def _dedented(lines: list[str], indent: int) -> str:
    """Remove the function's own indentation."""
    # Lines within a string over several lines may have less indentation.
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines).rstrip()
