"""Reads strategy files as people have them: of FSDP1, with ZeRO's keys in the YAML, with "auto" and numbers as text.

What they mean is written in the form that the engines read. Keys of the recipe become `Statement`s, which
recipe_values.py brings together with the recipe; keys without effect here are listed. Nothing raises: mistakes become
problems of the documents, and what is not understood stays in them for validate.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samecurve.config.documents import Document, KeyPath, describe, read_document
from samecurve.strategy.accelerate_keys import ACCELERATE, INLINE, NoEffect, RecipeOwned, Rejected, Table, ValueRule
from samecurve.strategy.deepspeed_defaults import read_defaults
from samecurve.strategy.deepspeed_keys import DEEPSPEED, OLD_NAMES, SECOND_NAMES, STAGES
from samecurve.strategy.fsdp1 import read_fsdp1
from samecurve.strategy.plan import Files, Statement
from samecurve.strategy.written_defaults import settle_defaults

_ZERO, _STAGE = "zero_optimization", ("zero_optimization", "stage")
_JSON = ("deepspeed_config", "deepspeed_config_file")
_KEPT = {_STAGE, *INLINE.values()}  # "auto" there is what the YAML says
_FP32 = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}


def read_as_written(chosen: str) -> Files:
    """Read an Accelerate YAML with the JSON that it names, or a DeepSpeed JSON, without judging a key.

    Their keys tell which it is, since Accelerate also reads JSON and DeepSpeed's file may have any suffix.
    """
    accelerate = read_document(chosen)
    keys = accelerate.content.keys()
    if "distributed_type" not in keys and (chosen.endswith(".json") or keys & (DEEPSPEED.keys() - ACCELERATE.keys())):
        return Files(Document(""), accelerate)
    deepspeed, notes, named = Document(""), (), accelerate.get(*_JSON)
    if named in ("", "none"):
        accelerate.content[_JSON[0]][_JSON[1]] = None
    elif isinstance(named, str) and accelerate.get("distributed_type") == "DEEPSPEED":
        # from the working directory, as Accelerate does, else from the YAML's folders
        path = Path(named).expanduser()
        folders = [Path(), *Path(accelerate.name).absolute().parents]
        file_path = next((file for folder in folders if (file := folder / path).is_file()), None)
        if file_path is None:
            text = f"no such file: {path.absolute()}, nor from the folders around {accelerate.name}"
            accelerate.unreadable(_JSON, f"{text}; give a path relative to the working directory")
        else:
            accelerate.content[_JSON[0]][_JSON[1]] = str(file_path)
            notes = (f"{named} of {accelerate.place(_JSON)} is {file_path}",) if file_path != path else ()
            deepspeed = read_document(str(file_path))
    return Files(accelerate, deepspeed, copy.deepcopy(accelerate.content), notes=notes)


def read(chosen: str | None, num_machines: int = 0) -> Files:
    """Read a strategy's files as the engines take them; None stands for no strategy. num_machines: see read_fsdp1."""
    if chosen is None:
        return Files(Document(""), Document(""))
    files = read_as_written(chosen)
    reading = _Reading(files.accelerate, files.deepspeed, files.written, notes=list(files.notes))
    reading.rename()
    read_fsdp1(reading.accelerate, reading.notes, reading.no_effect, num_machines)
    for document, table in ((reading.accelerate, ACCELERATE), (reading.deepspeed, DEEPSPEED)):
        reading.statements += read_defaults(document, reading.notes)
        reading.walk(document, table)
    if reading.accelerate.get("distributed_type") == "FSDP":
        reading.accelerate.content["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False  # Accelerate's is true
    reading.inline()
    reading.open_values()
    reading.unused_stages()
    statements = tuple(_agreed(reading.statements))
    reading.stage_0()
    return Files(
        reading.accelerate,
        reading.deepspeed,
        reading.written,
        statements,
        reading.no_effect,
        tuple(reading.notes),
    )


@dataclass
class _Reading:
    accelerate: Document
    deepspeed: Document
    written: dict = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    no_effect: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rename(self) -> None:
        """Give keys that have several names, and deprecated ones that mean others, the names of the tables."""
        settle_defaults(self.accelerate, self.no_effect)
        if isinstance(whole := self.deepspeed.get(_ZERO), bool):  # as DeepSpeed reads it: read_zero_config_deprecated
            self.deepspeed.content[_ZERO] = {"stage": int(whole)}
            self.notes.append(f"{self.deepspeed.place((_ZERO,))}: {_ZERO} {json.dumps(whole)} is stage {int(whole)}")
        for names, path in (({"bfloat16": "bf16"}, ()), (SECOND_NAMES, (_ZERO,)), (OLD_NAMES, ("aio",))):
            block = self.deepspeed.get(*path)
            for name, usual in names.items() if isinstance(block, dict) else ():
                if name in block:
                    self._rename(self.deepspeed, (*path, name), usual)
        for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
            asked, block = self.deepspeed.get(_ZERO, old), self.deepspeed.get(_ZERO)
            if asked is True and isinstance(block, dict) and f"offload_{part}" not in block:
                block[old] = {"device": "cpu"}
                self._rename(self.deepspeed, (_ZERO, old), f"offload_{part}")

    def _rename(self, document: Document, path: KeyPath, name: str) -> None:
        block, usual = document.get(*path[:-1]), (*path[:-1], name)
        value = block.pop(path[-1])
        if name in block and block[name] != value:
            text = f"found {describe(value)}, but {name}, of which it is another name, is {describe(block[name])} "
            document.problem(path, f"{text}({document.place(usual)}); keep one of them")
        elif name not in block:
            block[name] = value
            for known in [known for known in document.places if known[: len(path)] == path]:
                document.places[(*usual, *known[len(path) :])] = document.places[known]

    def walk(self, document: Document, table: Table, path: KeyPath = ()) -> None:
        """Apply the table to a block of keys. What stays in it is used, unknown or refused."""
        block = document.get(*path)
        for key, value in list(block.items()) if isinstance(block, dict) else ():
            here, rule = (*path, key), table.get(key)
            if isinstance(rule, dict) and isinstance(value, dict):
                self.walk(document, rule, here)
            elif isinstance(rule, RecipeOwned):
                self._owned(document, here, rule)
            elif isinstance(rule, ValueRule):
                is_open = here != _STAGE if value is None else value == "auto" and here not in _KEPT
                if is_open and not rule.accepts(value):
                    del block[key]  # the library's default
                else:
                    block[key] = value if rule.accepts(value) else _converted(rule, value)
            elif why := _why_no_effect(key, rule, value):
                del block[key]
                if value not in (None, "auto", [], {}) and why != _HAPPENS_ANYWAY:
                    self.no_effect[".".join(here)] = why
        if path and isinstance(block, dict) and not block and path[0] in ("optimizer", "scheduler"):
            parent = document.get(*path[:-1])
            if isinstance(parent, dict):
                parent.pop(path[-1], None)

    def _owned(self, document: Document, path: KeyPath, rule: RecipeOwned) -> None:
        block = document.get(*path[:-1])
        value = block.pop(path[-1])
        if value is None or (rule.auto and value == "auto"):
            return
        value = _converted(None, value)
        if refusal := rule.refusal(value):
            document.problem(
                path, f"found {describe(value)}, {'which ' if refusal.startswith('would') else ''}{refusal}"
            )
            return
        weak = value in rule.defaults
        self.statements.append(Statement(rule.by, rule.values(value), document, path, value, rule.auto, weak))

    def inline(self) -> None:
        """Make the JSON of ZeRO's keys in the YAML, as Accelerate does, or compare them with the JSON that it names."""
        document, block = self.accelerate, self.accelerate.get("deepspeed_config")
        if document.get("distributed_type") != "DEEPSPEED" or document.incomplete:
            return
        block = document.content["deepspeed_config"] = block if isinstance(block, dict) else {}
        given = {key: block.pop(key) for key in INLINE if key in block}
        given = {key: value for key, value in given.items() if value is not None and value != "none"}
        wrong = [key for key in given if not ACCELERATE["deepspeed_config"][key].accepts(given[key])]
        for key in wrong:
            block[key] = given.pop(key)  # validate.py says what is wrong with it
        if not self.deepspeed.name:
            content = {**copy.deepcopy(_FP32), _ZERO: {}}
            self.deepspeed = Document(document.name, content, dict(document.places), incomplete=bool(wrong))
            if "zero_stage" not in given and not wrong:
                given["zero_stage"] = 2
                self.notes.append(f"{document.name}: deepspeed_config has no zero_stage, and Accelerate's default is 2")
            for key, value in given.items():
                self._set_json(key, value)
        elif not self.deepspeed.incomplete:
            for key, value in given.items():
                self._compare_json(key, value)
        if block.get("zero3_init_flag") is not None and self.deepspeed.get(*_STAGE) != 3:
            del block["zero3_init_flag"]
            self.no_effect["deepspeed_config.zero3_init_flag"] = "only ZeRO-3 uses it"

    def _set_json(self, key: str, value: Any) -> None:
        path, block = INLINE[key], self.deepspeed.content
        for name in path[:-1]:
            block = block.setdefault(name, {})
        block[path[-1]] = [name.strip() for name in value.split(",")] if path[-1] == "classes" else value
        for depth in range(1, len(path) + 1):
            self.deepspeed.places[path[:depth]] = self.accelerate.place(("deepspeed_config", key))

    def _compare_json(self, key: str, value: Any) -> None:
        path = INLINE[key]
        other = self.deepspeed.get(*path)
        if other == "auto" or (other is None and path[-1] == "classes"):
            self._set_json(key, value)
        elif other == value or (path[-1] == "classes" and isinstance(other, list) and value == ",".join(other)):
            self.no_effect[f"deepspeed_config.{key}"] = "the DeepSpeed JSON says the same"
        else:
            place = self.deepspeed.place(path)
            text = f"found {describe(value)}, but {'.'.join(path)} is {describe(other)} ({place}); make the two equal"
            self.accelerate.problem(("deepspeed_config", key), f"{text}, or remove this one")

    def open_values(self) -> None:
        """Leave to DeepSpeed what the JSON leaves open and no YAML says."""
        for path in INLINE.values():
            block = self.deepspeed.get(*path[:-1])
            if path != _STAGE and isinstance(block, dict) and block.get(path[-1]) == "auto":
                del block[path[-1]]

    def unused_stages(self) -> None:
        """List the keys of zero_optimization that DeepSpeed does not read at its stage."""
        stage, block = self.deepspeed.get(*_STAGE), self.deepspeed.get(_ZERO)
        if stage not in (1, 2, 3) or not isinstance(block, dict) or "pipeline" in self.deepspeed.content:
            return
        for key in [key for key in block if stage not in STAGES.get(key, (stage,))]:
            value = block[key]
            if not (isinstance(value, dict) and value.get("device", "none") == "none"):
                self.no_effect[f"{_ZERO}.{key}"] = f"DeepSpeed does not read it at stage {stage}"
            if not _invalid(DEEPSPEED[_ZERO][key], value):
                del block[key]

    def stage_0(self) -> None:
        """Stage 0 shards nothing: DDP trains it, and what DeepSpeed would read there has no effect."""
        document, stage = self.deepspeed, self.deepspeed.get(*_STAGE)
        known = document.name and not document.incomplete and not document.problems
        if not known or "pipeline" in document.content or stage not in (0, None) or stage is False:
            return
        if not isinstance(document.get(_ZERO), (dict, type(None))) or any(_leftovers(document, DEEPSPEED)):
            return  # validate.py reports these
        why = "zero_optimization.stage is 0" if stage == 0 else "zero_optimization names no stage"
        self.notes.append(f"{document.place(_STAGE)}: {why}, which shards nothing: this is DDP")
        for path in _leaves(document.content):
            if path != _STAGE:
                self.no_effect[".".join(path)] = "DDP does not read DeepSpeed's keys"
        if not self.accelerate.name:
            self.accelerate = Document(document.name, places=document.places)
        self.accelerate.content["distributed_type"] = "MULTI_GPU"
        self.accelerate.content.pop("deepspeed_config", None)
        self.deepspeed = Document("")


def _agreed(statements: list[Statement]) -> Iterator[Statement]:
    """Yield one statement for each key of the recipe. Two without a value in common are a problem.

    A weak one gives way to others.
    """
    for by in dict.fromkeys(statement.by for statement in statements):
        first, *others = sorted((one for one in statements if one.by == by), key=lambda one: one.weak)
        for other in [other for other in others if not other.weak]:
            values = tuple(value for value in first.values if value in other.values)
            if not values:
                text = f"found {describe(other.written)}, but {'.'.join(first.path)} is {describe(first.written)}"
                other.document.problem(other.path, f"{text} ({first.document.place(first.path)}); make the two agree")
                break
            # of two that agree, the one that leaves less open is cited
            kept = first if len(first.values) <= len(other.values) else other
            first = replace(kept, values=values)
        else:
            yield first


_HAPPENS_ANYWAY = "it says what happens anyway"


def _why_no_effect(key: str, rule: Any, value: Any) -> str:
    """Say why a key with this value changes nothing; "" if it may."""
    if rule is None:
        is_comment = key.startswith(("_", "#", "//")) or key in ("comment", "comments")
        return "a comment" if is_comment else ""
    if isinstance(rule, NoEffect):
        accepted = value in (None, "auto") or rule.rule.accepts(_converted(rule.rule, value))
        return (_HAPPENS_ANYWAY if value in rule.silent else rule.reason) if accepted else ""
    if (
        isinstance(rule, Rejected)
        and isinstance(value, dict)
        and str(value.get("enabled")).lower() in ("false", "auto")
    ):
        return "it is not enabled"
    # by type, too: for Python 0 == False and 1 == True
    harmless = isinstance(rule, Rejected) and any(
        value == allowed and type(value) is type(allowed) for allowed in rule.harmless
    )
    return "its value enables nothing" if harmless else ""


def _invalid(rule: Any, value: Any) -> bool:
    """Whether a value of a key that is not used would be reported if it were."""
    if isinstance(rule, dict) and isinstance(value, dict):
        return any(key not in rule or _invalid(rule[key], inner) for key, inner in value.items())
    return isinstance(rule, ValueRule) and not rule.accepts(value)


def _leftovers(document: Document, table: Table, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys that validate.py has something to say about."""
    for key, value in document.get(*path).items():
        rule = table.get(key)
        if isinstance(rule, dict) and isinstance(value, dict):
            yield from _leftovers(document, rule, (*path, key))
        elif rule is None or isinstance(rule, (Rejected, NoEffect)) or _invalid(rule, value):
            yield (*path, key)


def _leaves(block: dict, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _converted(rule: ValueRule | None, value: Any) -> Any:
    """The number or truth value that a text spells, if the rule accepts that; else the value as it is."""
    if not isinstance(value, str):
        return value
    spelled: Any = {"true": True, "false": False}.get(value.lower())
    if spelled is None:
        try:
            spelled = float(value)
        except ValueError:
            return value
        spelled = int(spelled) if spelled.is_integer() and "." not in value else spelled
    return spelled if rule is None or rule.accepts(spelled) else value
