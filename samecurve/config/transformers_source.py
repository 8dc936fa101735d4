"""The fields of transformers' config classes, read from their source: importing transformers takes seconds.

Its configs are dataclasses since version 5: a field is an annotated name in the class or in one of its base classes.
What cannot be read this way is None here, and checked once transformers is loaded (hf_config.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ROOT_CLASS = "PreTrainedConfig"
# Every family with the field rope_parameters accepts these names instead (RotaryEmbeddingConfigMixin).
_ROTARY = ("rope_scaling", "rope_theta", "partial_rotary_factor")
_WORDS = {"int": "an integer", "float": "a number with a decimal point", "str": "text", "bool": "true or false"}
_WORDS |= {"None": "null", "list": "a list", "dict": "a block of keys"}
_TYPES = {"str": str, "bool": bool, "float": float, "list": list, "dict": dict}


@dataclass
class Field:
    """`annotation`, `default`: the source's expressions; None where there is none."""

    annotation: ast.expr | None
    default: ast.expr | None = None

    def accepts(self, value: Any) -> bool:
        return self.annotation is None or _accepts(self.annotation, value)

    @property
    def needed(self) -> str:
        """The accepted values, for a message."""
        words = dict.fromkeys(_words(self.annotation)) if self.annotation else {}
        numbers = {_WORDS["int"], _WORDS["float"]}
        if numbers <= words.keys():
            words = dict.fromkeys(["a number", *(word for word in words if word not in numbers)])
        return " or ".join(words)


@dataclass
class ConfigClass:
    """Keys and values that a config class accepts.

    Attributes:
        fields: fields by name.
        aliases: other names of fields, with the name of the field.
        also: names that the class may read from its arguments although they are no fields, such as `rope_scaling`.
    """

    fields: dict[str, Field] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    also: set[str] = field(default_factory=set)


@lru_cache
def model_types() -> dict[str, str] | None:
    """model_type -> the name of its config class, of all families that transformers has."""
    # the first file is generated, and configuration_auto.py adds to it by hand
    found = {**_mapping("CONFIG_MAPPING_NAMES", "auto_mappings.py"), **_mapping("CONFIG_MAPPING_NAMES")}
    return found or None


@lru_cache
def family(model_type: str) -> ConfigClass | None:
    """Return what the config class of a model_type accepts; None if its source is missing or not in the known form."""
    special = _mapping("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", "auto_mappings.py")
    special |= _mapping("SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    name, folder = (model_types() or {}).get(model_type), special.get(model_type, model_type.replace("-", "_"))
    if name is None:
        return None
    for path in sorted((_root() / "models" / folder).glob("configuration_*.py")):
        if name in _classes(path):
            found = ConfigClass()
            complete = _collect(path, name, found)
            if complete and "rope_parameters" in found.fields:
                found.also.update(_ROTARY)
            return found if complete else None
    return None


@lru_cache
def _root() -> Path:
    spec = find_spec("transformers")  # for a top-level package, find_spec imports nothing
    return Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")


@lru_cache
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _mapping(name: str, file: str = "configuration_auto.py") -> dict[str, str]:
    """The pairs of texts in all statements that make or update the mapping of this name."""
    found = {}
    for statement in _parsed(_root() / "models" / "auto" / file).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "value", None)
        if isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value
        if isinstance(target, ast.Name) and target.id == name:
            # OrderedDict([(key, value), ...]), or update({key: value})
            for node in ast.walk(statement):
                pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
                pairs = [node.elts] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else pairs
                found |= _texts(pairs)
    return found


def _texts(pairs: Iterable[Sequence[ast.expr | None]]) -> dict[str, str]:
    """The pairs of two constant texts."""
    found = {}
    for pair in pairs:
        match pair:
            case ast.Constant(value=str(key)), ast.Constant(value=str(value)):
                found[key] = value
    return found


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _parsed(path).body if isinstance(node, ast.ClassDef)}


def _collect(path: Path, name: str, into: ConfigClass) -> bool:
    """Add a class and then its base classes; names that are there already stay. Returns whether all were found."""
    node = _classes(path).get(name)
    if node is None:
        return False
    # Nothing enforces the types of a class without @strict, nor types that are strings (from __future__).
    lazy = any(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in _parsed(path).body)
    checked = not lazy and any("strict" in ast.unparse(each) for each in node.decorator_list)
    for statement in node.body:
        target = getattr(statement, "target", None) or (getattr(statement, "targets", None) or [None])[0]
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and target.id == "attribute_map" and isinstance(value, ast.Dict):
            into.aliases = _texts(zip(value.keys, value.values, strict=True)) | into.aliases
        elif isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            own = Field(statement.annotation if checked else None, statement.value)
            into.fields.setdefault(ast.unparse(statement.target), own)
        elif isinstance(statement, ast.FunctionDef):
            # the root class's other methods are full of words that are no arguments of a config
            reads_arguments = name != _ROOT_CLASS or statement.name == "__post_init__"
            into.also.update(_made_use_of(statement, reads_arguments))
            if statement.name == "__init__":
                into.also.update(argument.arg for argument in ast.walk(statement) if isinstance(argument, ast.arg))
    if name == _ROOT_CLASS:  # its own base classes have no fields
        return True
    return all(_collect(*_origin(path, base), into) for base in node.bases)


def _made_use_of(function: ast.FunctionDef, reads_arguments: bool) -> Iterator[str]:
    """Yield names that a method may read from the config's arguments: a property with a setter, and texts in its code.

    Only some of the texts are such names, so a wrong key that equals another one is not noticed.
    """
    if any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list):
        yield function.name
    texts = [node.value for node in ast.walk(function) if reads_arguments and isinstance(node, ast.Constant)]
    yield from (text for text in texts if isinstance(text, str) and text.isidentifier())


def _origin(path: Path, base: ast.expr) -> tuple[Path, str]:
    """The file of a base class, and its name."""
    name = base.id if isinstance(base, ast.Name) else ""
    if name == _ROOT_CLASS:
        return _root() / "configuration_utils.py", name
    for node in _parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.level and name in [alias.name for alias in node.names]:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            return folder.with_suffix(".py"), name
    return path, name


def _accepts(node: ast.expr, value: Any) -> bool:
    """Whether a type accepts a value, as in huggingface_hub's strict dataclasses. An unknown type accepts anything."""
    if isinstance(node, ast.BinOp):
        return _accepts(node.left, value) or _accepts(node.right, value)
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else True  # a type in quotes is not looked up
    outer = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).rpartition(".")[2]
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in ("Optional", "Union"):
            return (outer == "Optional" and value is None) or any(_accepts(each, value) for each in inner)
        if outer == "Literal":
            # True == 1 for Python, but true is none of the integers that a Literal lists.
            listed = [each.value for each in inner if isinstance(each, ast.Constant)]
            return any(known == value and isinstance(known, bool) == isinstance(value, bool) for known in listed)
        if outer == "list" and isinstance(value, list):
            return all(_accepts(inner[0], item) for item in value)
    if outer == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, _TYPES[outer]) if outer in _TYPES else True


def _words(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _words(node.left)
        yield from _words(node.right)
        return
    inner = node.slice.elts if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
    inner = inner or ([node.slice] if isinstance(node, ast.Subscript) else [])
    outer = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).rpartition(".")[2]
    if outer in ("Optional", "Union"):
        for each in inner:
            yield from _words(each)
        yield from ["null"] if outer == "Optional" else []
    elif outer == "Literal":
        yield f"one of {', '.join(ast.unparse(each) for each in inner)}"
    else:
        yield from [_WORDS[outer]] if outer in _WORDS else []
