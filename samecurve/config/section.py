"""Base class and number types of all blocks of the recipe's schema."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from samecurve.storage.object_store import credentials_problem, is_url

# A shell turns `data.path=$UNSET` into empty text, which as a folder would be the working directory.
Name = Annotated[str, Field(min_length=1)]


def _without_credentials(path: str) -> str:
    if is_url(path) and (problem := credentials_problem(path)):
        raise PydanticCustomError("credentials", "{problem}", {"problem": problem})
    return path


DataPath = Annotated[Name, AfterValidator(_without_credentials)]

# PyTorch, numpy and readers of JSON hold integers in 64 bits.
LARGEST_INTEGER = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER, strict=True)]
Natural = Annotated[int, Field(ge=0, le=LARGEST_INTEGER, strict=True)]


class Section(BaseModel):
    """strict: a quoted number is text and is refused, not read as a number. A list from YAML may fill a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
