"""Reading of JSON files that a program wrote earlier, or that a stranger supplied: any of them may be damaged.

A file has one of three outcomes: absent, damaged (with the reason), or a value that fits its schema. The caller decides
what the outcome means; nothing here raises because of what a file contains.

A schema is made of Python's own values:

    str, bool, dict, list    a value of that type
    Path                     a text that can be a file's path, see `name_problem`
    int                      an integer of 64 bits
    range(1, 10)             an integer of that range
    float                    a finite number
    date                     the text of a day, YYYY-MM-DD
    None                     null
    (int, None)              one of several; () is none at all
    [str]                    a list of such values
    {"step": int, "model?": dict, "*": float}    an object. Without a question mark, a key has to be there. "*" is the
                                                 schema of all other keys, which may have any value without it;
                                                 beside it "^key_[0-9]+" is that of the keys that match the pattern.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from samecurve.errors import SamecurveError
from samecurve.storage.filesystem import LONGEST_NAME, name_problem

COUNT = range(2**53)  # the integers that every JSON reader keeps
MOST_BYTES = 64 * 2**20
MOST_LEVELS = 100  # of lists and objects inside of one another
_NAMES = {str: "text", bool: "true or false", dict: "an object", list: "a list", int: "an integer", float: "a number"}
_NAMES |= {Path: f"a path, without NUL and of names up to {LONGEST_NAME} bytes"}
_NAMES[date] = "a day, YYYY-MM-DD"


@dataclass(frozen=True)
class Record:
    """Outcome of reading a file.

    Attributes:
        value: the content; None if the file is absent or damaged.
        problem: why there is no value, in words; "" if there is one.
        content: of a damaged file.
    """

    path: Path
    value: Any = None
    problem: str = ""
    is_absent: bool = False
    content: bytes = b""

    def require(self, error: type[SamecurveError], fix: str) -> Any:
        """Return the value. Raises `error`, with file and problem and how to fix it, if there is none."""
        if self.problem:
            raise error(f"{self.path}: {self.problem}; {fix}")
        return self.value

    def optional(self, error: type[SamecurveError], fix: str) -> Any:
        """Return the value, {} for an absent file. Raises as `require` for a damaged one."""
        return {} if self.is_absent else self.require(error, fix)

    @property
    def is_damaged(self) -> bool:
        return bool(self.problem) and not self.is_absent


def read_record(path: Path, schema: Any = dict, most_bytes: int = MOST_BYTES) -> Record:
    """Read a JSON file. Errors of the file system count as damage, except for a file that does not or cannot exist."""
    try:
        if name_problem(path):
            raise FileNotFoundError
        if path.exists() and not path.is_file():  # a pipe would have no end
            return Record(path, problem="not a file")
        with open(path, "rb") as stream:
            content = stream.read(most_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Record(path, problem="no such file", is_absent=True)
    except OSError as error:
        return Record(path, problem=error.strerror or str(error))
    if len(content) > most_bytes:
        return Record(path, problem=f"larger than {most_bytes:,} bytes")
    value, problem = parse(content, schema)
    return Record(path, value, problem, content=content if problem else b"")


def parse(content: bytes, schema: Any = dict) -> tuple[Any, str]:
    """Parse JSON. Returns (value, "") or (None, why there is none)."""
    try:  # a fifth of json's time; takes less than json does, and gives the same values
        value = from_json(content, allow_inf_nan=False)
    except ValueError:
        if not content.strip():
            return None, "the file is empty"
        try:
            value = json.loads(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            return None, f"damaged: byte {error.start} is not UTF-8 text"
        except RecursionError:
            return None, f"damaged: more than {MOST_LEVELS} levels of brackets"
        except ValueError as error:
            return None, f"damaged: not JSON ({error})"
    problem = mismatch(value, schema)
    if not problem and content.count(b"[") + content.count(b"{") > MOST_LEVELS and count_levels(value) > MOST_LEVELS:
        problem = f"damaged: more than {MOST_LEVELS} levels of brackets"
    return (None, problem) if problem else (value, "")


def count_levels(value: Any) -> int:
    """Count how deep lists and objects are inside of one another."""
    level, num_levels = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        num_levels += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return num_levels


def mismatch(value: Any, schema: Any, key: str = "") -> str:
    """Say how a value differs from a schema; "" if it fits. key: the value's own, with dots."""
    if isinstance(schema, tuple):
        fits = _fits_one(value, schema)
        nested = next(
            (kind for kind in schema if isinstance(value, dict | list) and isinstance(kind, type(value))), None
        )
        if not fits and nested is not None:
            return mismatch(value, nested, key)
    elif isinstance(schema, dict):
        fits = isinstance(value, dict)
        if fits:
            return _mismatch_inside(value, schema, key)
    elif isinstance(schema, list):
        fits = isinstance(value, list)
        if fits:
            problems = (mismatch(item, schema[0], f"{key}[{index}]") for index, item in enumerate(value))
            return next(filter(None, problems), "")
    else:
        fits = _fits(value, schema)
    if fits:
        return ""
    shown = _NAMES[type(value)] if isinstance(value, (dict, list)) else json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"{key + ': ' if key else ''}found {shown}, expected {_expected(schema)}"


def _fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema without parts. Fast: a log has a million lines of twenty numbers."""
    if schema is float:
        return type(value) in (float, int) and abs(value) <= sys.float_info.max  # False for NaN
    if schema is None:
        return value is None
    if schema is int:
        return type(value) is int and -(2**63) <= value < 2**63
    if isinstance(schema, range):
        return type(value) is int and value in schema
    if schema is Path:
        return isinstance(value, str) and not name_problem(value)
    return _is_day(value) if schema is date else isinstance(value, schema)


def _is_day(value: Any) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value  # which also reads other ways to write it
    except (TypeError, ValueError):
        return False


def _fits_one(value: Any, schemas: tuple) -> bool:
    for kind in schemas:
        if not mismatch(value, kind) if isinstance(kind, (dict, list, tuple)) else _fits(value, kind):
            return True
    return False


def _mismatch_inside(value: dict, schema: dict, key: str) -> str:
    prefix = f"{key}." if key else ""
    for name, kind in schema.items():
        wanted = name.removesuffix("?")
        if wanted in value:
            if isinstance(kind, range) and _fits(value[wanted], kind):
                continue
            if problem := mismatch(value[wanted], kind, prefix + wanted):
                return problem
        elif wanted == name and not name.startswith(("*", "^")):
            return f"{prefix}{name}: missing"
    if "*" in schema and schema["*"] is not object and not (schema["*"] == (float, None) and are_numbers(value)):
        named, patterns = {name.removesuffix("?") for name in schema}, [name for name in schema if name.startswith("^")]
        for name, item in value.items():
            kind = schema[next((pattern for pattern in patterns if re.fullmatch(pattern, name)), "*")]
            if name in named or (isinstance(kind, tuple) and _fits_one(item, kind)):
                continue
            if problem := mismatch(item, kind, prefix + name):
                return problem
    return ""


def are_numbers(value: dict) -> bool:
    """Whether all items are null or finite numbers, without a loop in Python. False where their sum is too large."""
    try:
        is_finite = {*map(type, value.values())} <= {float, int, type(None)} and math.isfinite(
            sum(filter(None, value.values()))
        )
    except OverflowError:
        return False
    return is_finite


def is_number(value: Any) -> bool:
    """Whether a value is null or a finite number."""
    return value is None or _fits(value, float)


def _expected(schema: Any) -> str:
    if isinstance(schema, tuple):
        return " or ".join(dict.fromkeys(map(_expected, schema))) or "no such key"
    if isinstance(schema, range):
        if len(schema) == 1:
            return str(schema.start)
        return f"an integer from {schema.start} to {schema.stop - 1}"
    return "null" if schema is None else _NAMES[schema if isinstance(schema, type) else type(schema)]
