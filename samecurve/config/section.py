"""Base class and number types of all blocks of the recipe's schema."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from samecurve.specs.data_names import is_import_path
from samecurve.storage.filesystem import name_problem
from samecurve.storage.object_store import credentials_problem, is_url


def _without_credentials(path: str) -> str:
    if is_url(path) and (problem := credentials_problem(path)):
        raise PydanticCustomError("credentials", "{problem}", {"problem": problem})
    return path


def _possible(path: str) -> str:
    problem = name_problem(path)
    if problem and ("\0" in path or not is_url(path)):  # keys and queries may be long
        raise ValueError(problem)
    return path


def _no_template(path: str) -> str:
    if ("{%" in path or "{{" in path) and not os.path.lexists(path):
        raise ValueError("which is a template itself; write it into a file, and give the path of that file")
    return path


# A shell turns `data.path=$UNSET` into empty text, which as a folder would be the working directory.
Name = Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)]


def name_or_import_path(value: object, as_name: Callable[[object], object]) -> object:
    """Accept one of the names of a key, or an import path (config/own_code.py)."""
    return value if is_import_path(value) else as_name(value)


def _import_path(path: str) -> str:
    if not is_import_path(path):
        raise ValueError("expected an import path such as my_package.my_module:my_function")
    return path


ImportPath = Annotated[str, AfterValidator(_import_path)]
OnDisk = AfterValidator(_possible)
PathName = Annotated[Name, OnDisk]
TemplatePath = Annotated[Name, AfterValidator(_no_template), OnDisk]

# PyTorch, numpy and readers of JSON hold integers in 64 bits.
LARGEST_INTEGER = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER, strict=True)]
Natural = Annotated[int, Field(ge=0, le=LARGEST_INTEGER, strict=True)]


class Section(BaseModel):
    """strict: a quoted number is text and is refused, not read as a number. A list from YAML may fill a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
