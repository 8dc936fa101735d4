"""Rules for the recipe's `optimizer` block."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from samecurve.config.documents import describe, joined
from samecurve.config.schema import Optimizer
from samecurve.specs.data_names import is_import_path
from samecurve.specs.optimizers import OPTIMIZERS

Finding = tuple[str, str]
# rounding to bf16 moves a number by up to 2 ** -9 of itself, 0.2 %; a mean has to move by more than that
LARGEST_BF16_BETA = 0.99


def _bitsandbytes(value: Callable[[str], Any]) -> Iterator[Finding]:
    name = value("optimizer.name")
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "optimizer.name", f"found {name}, which needs the package bitsandbytes; run pip install bitsandbytes"


def _idle(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A key has no effect because the optimizer does not use it."""
    name, given = value("optimizer.name"), value(f"optimizer.{key}")
    default = Optimizer.model_fields[key].default
    # YAML has lists where the schema's defaults are tuples
    if key not in OPTIMIZERS[name].reads and (tuple(given) if isinstance(given, list) else given) != default:
        readers = [other for other, spec in OPTIMIZERS.items() if key in spec.reads]
        use = f"{joined(readers, 'and')} {'use' if len(readers) > 1 else 'uses'}"
        text = f"found {describe(given)}, but only {use} it and optimizer.name is {name}; remove it"
        yield f"optimizer.{key}", text


def _options(value: Callable[[str], Any]) -> Iterator[Finding]:
    name, given = value("optimizer.name"), value("optimizer.options")
    if given and not is_import_path(name):
        text = f"found {', '.join(given)}, but only an optimizer that is named by its import path takes options and "
        yield "optimizer.options", f"{text}optimizer.name is {name}; use the keys of optimizer"
    if taken := {"lr", "weight_decay", "params"} & set(given):
        text = f"found {', '.join(sorted(taken))}, which the recipe sets; use optimizer.learning_rate and "
        yield "optimizer.options", f"{text}optimizer.weight_decay"


def _bf16_weights(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("optimizer.name") == "adamw_bf16" and value("precision") != "bf16":
        text = f"found adamw_bf16, which trains bf16 weights, but precision is {value('precision')}; set that to bf16"
        yield "optimizer.name", f"{text}, or use another optimizer"


def _bf16_mean(value: Callable[[str], Any]) -> Iterator[Finding]:
    second = value("optimizer.betas")[1]
    if value("optimizer.name") == "adamw_bf16" and second > LARGEST_BF16_BETA:
        text = f"found {second:g}, but adamw_bf16 keeps its moments in bf16, where rounding undoes changes of "
        yield "optimizer.betas", f"{text}{1 - second:.2g} of a value; use at most {LARGEST_BF16_BETA:g}, or adamw"


def _adapted(value: Callable[[str], Any]) -> Iterator[Finding]:
    adapter = value("adapter.name")
    if value("optimizer.name") == "muon" and adapter:
        text = f"found muon, which orthogonalizes a model's hidden matrices, but adapter.name is {adapter}"
        yield "optimizer.name", f"{text}, which freezes them; use adamw"


RULES = (
    *(_bitsandbytes, _options, _bf16_weights, _bf16_mean, _adapted),
    *(partial(_idle, key) for key in sorted({key for spec in OPTIMIZERS.values() for key in spec.reads})),
)
