"""Reads YAML and JSON files as data with positions: the value, file and line of every key path.

Nothing here raises for the user's mistakes: they become `ConfigProblem`s, so that one report can show all of them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from samecurve.config.key_hints import near_file
from samecurve.errors import without_credentials

KeyPath = tuple[str, ...]
Finding = tuple[str, str]
"""(dotted key, what is wrong with its value and the fix)."""


@dataclass(frozen=True)
class Place:
    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


COMMAND_LINE = Place("command line")
ENVIRONMENT = Place("environment")


@dataclass(frozen=True)
class ConfigProblem:
    """One problem of the configuration.

    Attributes:
        place: file and line, command line or environment.
        key: the dotted key; "" for a problem of the whole file.
        text: the value found, the rule and the fix.
        topology: True for problems about the number of processes.
    """

    place: Place
    key: str
    text: str
    topology: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}" if self.key else f"{self.place}: {self.text}"


def format_problems(problems: Iterable[ConfigProblem]) -> str:
    """Format a report: a header, then each problem once; files by name and line, then command line and environment."""

    def position(problem: ConfigProblem) -> tuple:
        pseudo = problem.place in (COMMAND_LINE, ENVIRONMENT)
        return pseudo, problem.place.file, problem.place.line or 0, problem.key, problem.text

    lines = [f"  {problem}" for problem in sorted(set(problems), key=position)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in the configuration", *lines])


@dataclass
class Document:
    """The content of a file (always a mapping), the place of every key path, and the problems found while reading it.

    Attributes:
        typed: the text of values given on the command line. Only the schema knows whether `123` is a number.
        notes: decisions made while reading that are printed for the user, see inheritance.py.
        rate_from_scratch: the place of a learning rate that was for a model which a later layer's model.path replaced.
        scratch_files: the files of a model.config which a later layer's model.path replaced. Their other values were
            for that model, so those of a strategy's file count before them.
        bases: the files that it was merged over, the lowest first.
        incomplete: a file that it is made of could not be read, so an absent key may stand there.
    """

    name: str
    content: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    typed: dict[KeyPath, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rate_from_scratch: Place | None = None
    scratch_files: set[str] = field(default_factory=set)
    bases: tuple[str, ...] = ()
    incomplete: bool = False

    def place(self, path: KeyPath) -> Place:
        """The place of the key; else of what the command line has set in it, else of the nearest block around it."""
        if path not in self.places:
            inside = [known for known in self.places if len(known) > len(path) > 0 and known[: len(path)] == path]
            path = inside[0] if inside else path
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.name))

    def is_earlier(self, path: KeyPath, other: KeyPath) -> bool:
        """Whether a key was given in a layer below that of another key: base files, the file, the command line."""
        layers = [*self.bases, self.name, COMMAND_LINE.file]
        return layers.index(self.place(path).file) < layers.index(self.place(other).file)

    def get(self, *path: str) -> Any:
        """The value at a key path, or None."""
        value: Any = self.content
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def unreadable(self, path: KeyPath, text: str) -> None:
        """Add a problem that leaves keys unknown."""
        self.problem(path, text)
        self.incomplete = True

    def problem(self, path: KeyPath, text: str, topology: bool = False) -> None:
        self.problems.append(ConfigProblem(self.place(path), ".".join(path), text, topology))


def describe(value: Any) -> str:
    """Format a found value for a message, with its type where the value alone could mislead."""
    if isinstance(value, (dict, list, tuple)):
        return "a block of keys" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python writes no more than 4300 digits
        return f"an integer of {value.bit_length()} bits"
    shown = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, int, float)) else repr(value)
    shown = without_credentials(shown)  # before a part of them is cut off
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{shown} (text)" if isinstance(value, str) else shown


def joined(words: Iterable[str], last: str = "or") -> str:
    """Join words as "a, b or c". last: the word before the last one."""
    *others, final = words
    return f"{', '.join(others)} {last} {final}" if others else final


def suggest(path: KeyPath, legal: Iterable[KeyPath]) -> str:
    """Suggest the nearest valid key: the same name in another block, else a similar name in this block."""
    legal = sorted(legal)
    elsewhere = [".".join(other) for other in legal if other[-1] == path[-1]]
    if elsewhere:
        return f"; move it to {' or '.join(elsewhere)}"
    siblings = [other[-1] for other in legal if other[:-1] == path[:-1]]
    near = difflib.get_close_matches(path[-1], siblings, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; valid keys here: {', '.join(siblings)}" if len(siblings) <= 12 else ""


MOST_VALUES = 100_000  # of a YAML file, where each use of an alias counts


class _Loader(yaml.SafeLoader):
    """A YAML loader with the floats of YAML 1.2 (`1e-4` is one) and without dates, unlike PyYAML's YAML 1.1.

    Integers stay those of YAML 1.1 (`010` is 8), because Accelerate reads the same files so.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.judged: set[yaml.Node] = set()  # blocks that were searched for duplicate keys; an alias is the same node
        self.built = 0
        self.around: set[yaml.Node] = set()  # blocks and lists around the node that is being built

    def count(self, node: yaml.Node, number: int) -> None:
        """Count built values. Raises MarkedYAMLError for aliases of aliases, of which 1 KB can stand for millions."""
        self.built += number
        if self.built > MOST_VALUES:
            text = f"its aliases stand for more than {MOST_VALUES:,} values; write out those that are needed"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)  # PyYAML before 6.0.4 repeats the pairs of each alias
        self.count(node, len(node.value))


_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
# Its own mapping, since SafeLoader's is shared by every user of PyYAML. Resolvers are found by a scalar's first
# character.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] not in ("float", "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    """Build a node's data, and record the place of every key below it and duplicate keys."""
    loader.count(node, 1)
    if node in loader.around:
        text = "an alias refers to a value that contains it; write out what is meant"
        raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
    if not isinstance(node, (yaml.SequenceNode, yaml.MappingNode)):
        return loader.construct_object(node)
    loader.around.add(node)
    if isinstance(node, yaml.SequenceNode):
        entries = [_build(loader, child, (*path, str(index)), document) for index, child in enumerate(node.value)]
        loader.around.remove(node)
        return entries
    if node not in loader.judged:
        # before merge keys (<<) are flattened, which puts their pairs beside those that override them
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_lines:
                text = f"given twice (first in line {first_lines[key]}); keep one"
                document.problems.append(ConfigProblem(Place(document.name, line), ".".join((*path, key)), text))
            first_lines.setdefault(key, line)
        loader.flatten_mapping(node)
        loader.judged.add(node)
    built = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        document.places[(*path, key)] = Place(document.name, key_node.start_mark.line + 1)
        built[key] = _build(loader, value_node, (*path, key), document)
    loader.around.remove(node)
    return built


def parse_yaml(text: str, document: Document) -> Any:
    """Parse YAML. Places and problems go to the document, which gets no places where the text is invalid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return {} if node is None else _build(loader, node, (), document)
    except RecursionError:
        document.unreadable((), "invalid YAML: nested too deeply")
        return {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a tag such as !!int over a word
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        if isinstance(error, ReaderError):  # a control character
            line = text.count("\n", 0, error.position) + 1
        place = Place(document.name, line)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        document.problems.append(ConfigProblem(place, "", f"invalid YAML: {what}"))
        document.incomplete = True
        return {}


def _refuse_constant(name: str) -> None:
    # Python's json reads NaN and Infinity, which no other reader of JSON has to accept.
    raise ValueError(f"{name} is not a JSON value")


def _parse_json(text: str, document: Document) -> Any:
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        document.unreadable((), "invalid JSON: nested too deeply")
        return {}
    except ValueError as error:
        place = Place(document.name, getattr(error, "lineno", None))
        document.problems.append(ConfigProblem(place, "", f"invalid JSON: {getattr(error, 'msg', error)}"))
        document.incomplete = True
        return {}
    # JSON without tabs is YAML, and PyYAML's nodes know their lines, which json's objects do not. The data is json's.
    # PyYAML refuses some of it, such as a long key; then the lines are unknown.
    lines = Document(document.name)
    parse_yaml(text.replace("\t", " "), lines)
    if not lines.incomplete:
        document.places |= lines.places
        document.problems += lines.problems
    return content


def read_document(path: str | os.PathLike) -> Document:
    """Read a YAML or JSON file (by its suffix). A missing file or a syntax error becomes a problem of the document."""
    document = Document(os.fspath(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        hint = near_file(document.name) if isinstance(error, FileNotFoundError) else ""
        document.unreadable((), f"cannot be read: {why_unreadable(error)} ({Path(path).absolute()}){hint}")
        return document
    parse = _parse_json if document.name.endswith(".json") else parse_yaml
    content = parse(text, document)
    if isinstance(content, dict):
        document.content = content
    else:
        document.unreadable((), f"found {describe(content)}, expected a block of keys")
    return document


def why_unreadable(error: OSError | ValueError) -> str:
    """Say in a few words why a text file could not be read."""
    return getattr(error, "strerror", None) or (
        "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
    )


def merge_blocks(base: dict, over: dict) -> dict:
    """Merge `over` into `base` block by block; lists and values are replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_blocks(merged[key], value) if both else value
    return merged
