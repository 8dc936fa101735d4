"""Write docs/capabilities.md: `python -m scripts.pages.capabilities > docs/capabilities.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from samecurve.config import own_code
from samecurve.config.schema import Recipe
from samecurve.specs.data_names import OWN
from samecurve.specs.environment import ROOT, dated
from samecurve.strategy import capabilities
from samecurve.strategy.capabilities import (
    CELLS,
    CONTEXT,
    CUT_STAGES,
    DEEPSPEED,
    DEEPSPEED_PIPELINE,
    EXPERT,
    FSDP,
    KEYS,
    TENSOR,
    TORCH_PIPELINE,
    WHOLE_BACKWARD,
    ZERO_2,
    ZERO_3,
    ZERO_BUBBLE,
    Mode,
)

_CONSTRAINTS = ROOT / "constraints.txt"
_BY_TASK = "test_preference_tasks test_encoder_tasks test_embed_task test_distill_task test_sft test_continue_pretrain"
# By key: tests in tests/distributed that compare its allowed values with one process, and the modes in which they do.
PROOFS: dict[str, dict[str, tuple[Mode, ...]]] = {
    "task": {
        _BY_TASK: (TENSOR, CONTEXT, TORCH_PIPELINE),
        "test_sft test_continue_pretrain test_preference_tasks": (DEEPSPEED_PIPELINE,),
        "test_expert_parallel test_expert_parallel_tasks": (EXPERT,),
    },
    "precision": {
        "test_equal_curves": (TENSOR, CONTEXT, TORCH_PIPELINE, FSDP),
        "test_expert_parallel": (EXPERT,),
        "test_fp16": (FSDP,),
    },
    "fp8": {"test_fp8_curves": (FSDP, ZERO_2, DEEPSPEED_PIPELINE)},
    "adapter.name": {"test_lora": (TENSOR, CONTEXT, TORCH_PIPELINE), "test_expert_parallel_tasks": (EXPERT,)},
    "adapter.dora": {"test_lora": (CONTEXT, TORCH_PIPELINE), "test_expert_parallel_tasks": (EXPERT,)},
    "adapter.quantization": {"test_qlora": (CONTEXT, FSDP, ZERO_2, ZERO_3)},
    "optimizer.name": {
        "test_optimizer_curves": (TENSOR, CONTEXT, TORCH_PIPELINE, FSDP, DEEPSPEED),
        "test_expert_parallel": (EXPERT,),
        "test_own_code_curves": (FSDP, DEEPSPEED),
    },
    "model.kernels": {"test_kernels_curves": (FSDP, ZERO_2, ZERO_3, DEEPSPEED_PIPELINE)},
    "model.attention": {
        "test_context_parallel": (CONTEXT,),
        "test_pipeline_schedules": (TORCH_PIPELINE,),
        "test_dropout_curves": (TENSOR,),
    },
    "loss.implementation": {
        "test_tensor_parallel": (TENSOR,),
        "test_context_parallel": (CONTEXT,),
        "test_expert_parallel": (EXPERT,),
        "test_pipeline_schedules": (TORCH_PIPELINE,),
        "test_equal_curves": (DEEPSPEED_PIPELINE,),
    },
    "compile": {
        "test_step_options": (TENSOR, FSDP, ZERO_2, WHOLE_BACKWARD, DEEPSPEED_PIPELINE),
        "test_context_parallel": (CONTEXT,),
        "test_pipeline_schedules": (WHOLE_BACKWARD,),
    },
    "memory.activation_checkpointing": {
        "test_step_options": (TENSOR, FSDP, ZERO_2, ZERO_3, DEEPSPEED_PIPELINE),
        "test_context_parallel": (CONTEXT,),
        "test_expert_parallel": (EXPERT,),
        "test_pipeline_schedules": (TORCH_PIPELINE,),
    },
    "memory.gradient_sync": {"test_context_parallel": (CONTEXT,)},
}
_ON_A_GPU = ("flash_attention_2", "flex_attention")
# Allowed values that none of these tests has.
UNPROVEN: dict[tuple[str, Mode], tuple[Any, ...]] = {
    ("task", EXPERT): ("mlm",),
    ("adapter.quantization", CONTEXT): ("8bit", "torchao_int8"),
    ("adapter.quantization", ZERO_2): ("8bit", "torchao_int8"),
    ("model.attention", TENSOR): ("varlen", *_ON_A_GPU),
    ("model.attention", TORCH_PIPELINE): ("eager", *_ON_A_GPU),
    ("memory.activation_checkpointing", ZERO_BUBBLE): ("every_n_layers",),
    ("memory.activation_checkpointing", CUT_STAGES): ("selective", "every_n_layers"),
}

_HEADER = """\
# Capabilities

<!-- Written by `python -m scripts.pages.capabilities` from strategy/capabilities.py. Do not edit. -->

What a recipe may ask of each way of distributing a run. Several ways may apply to one strategy: `fsdp_tp` has the
limits of FSDP and of tensor parallelism. A value is

- *compared* where one of the tests named below compares it with one process, or where it is the default, with which
  all tests run;
- *allowed* where nothing is known against it, but no test of its own compares it;
- *refused* before anything is loaded, with the reason.

A key that a table does not have is not limited there. Versions are those of `constraints.txt`.
"""


def render_page() -> str:
    """The whole page, Markdown."""
    modes = [mode for mode in vars(capabilities).values() if isinstance(mode, Mode)]
    return "\n".join([_HEADER, *(line for mode in modes for line in _section(mode))])


def _section(mode: Mode) -> Iterator[str]:
    yield f"## {mode.name[0].upper()}{mode.name[1:]}\n"
    yield "| key | compared | by | allowed | refused |\n|---|---|---|---|---|"
    for key in dict.fromkeys([*KEYS, *PROOFS]):
        refused_here = any(cell.key == key and mode in cell.modes for cell in CELLS)
        if refused_here or (key, mode) in UNPROVEN or any(mode in modes for modes in PROOFS.get(key, {}).values()):
            yield _line(key, mode)
    yield ""


def _line(key: str, mode: Mode) -> str:
    field, modes = _field(key), {mode, mode.within}
    cells = [(cell, cell.modes[here]) for cell in CELLS if cell.key == key for here in modes & cell.modes.keys()]
    own = [OWN] if key in own_code.KEYS else []
    values = [*_values(field.annotation), *(value for cell, _ in cells for value in cell.allowed), *own]
    values = list(dict.fromkeys(values))
    refused: dict[str, list[Any]] = {}
    kept = list(values)
    for value, (cell, why) in product(values, cells):
        if cell.refuses(value):
            tasks = f" with `{'`, `'.join(cell.tasks)}`" if cell.tasks else ""  # with others it is allowed
            refused.setdefault(f"{tasks}: {pinned(why)}", []).append(value)
            kept = [other for other in kept if other != value or cell.tasks]
    tests = dict.fromkeys(
        test for names, proven in PROOFS.get(key, {}).items() if modes & {*proven} for test in names.split()
    )
    unproven = {value for here in modes for value in UNPROVEN.get((key, here), ())}
    compared = [value for value in kept if value not in unproven and (tests or value in ("auto", field.default))]
    links = ", ".join(f"[{test.removeprefix('test_')}](../tests/distributed/{test}.py)" for test in tests)
    reasons = [f"{_shown(values)}{reason}" for reason, values in refused.items()]
    if not _values(field.annotation):  # of a number the only allowed values are known
        reasons = [f"other values: {pinned(why)}" for _, why in cells]
    others = [value for value in kept if value not in compared]
    return f"| `{key}` | {_shown(compared)} | {links} | {_shown(others)} | {'; '.join(reasons)} |"


def _shown(values: list[Any]) -> str:
    return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)


def pinned(text: str) -> str:
    """Write the versions that the tests ran with instead of the installed ones."""
    for name, version in re.findall(r"^([\w-]+)==([\w.]+)", _CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE):
        text = text.replace(dated(name), f"{name} {version}") if name in text else text
    return text


def _field(key: str) -> Any:
    model, field = Recipe, None
    for name in key.split("."):
        field = model.model_fields[name]
        kinds = (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return field


def _values(annotation: Any) -> list[Any]:
    """The values of a key that has only some; [] for numbers and text."""
    if annotation in (bool, NoneType):
        return [False, True] if annotation is bool else [None]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for kind in get_args(annotation) for value in _values(kind)]


if __name__ == "__main__":
    print(render_page(), end="")
