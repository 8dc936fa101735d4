"""The recipe's schema, continued: which data are read, and how text becomes tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from .section import Name, Section

# every byte and two special tokens
SMALLEST_VOCABULARY = 256 + 2


class Tokenizer(Section):
    """`path`: a tokenizer's folder (default: `model.path`). `vocabulary_size`: train a byte-level BPE on the data.

    `chat_template`: a Jinja file that replaces the tokenizer's own template, or `chatml`, see chatml.py. `pad_token`: a
    token of its vocabulary.
    """

    path: Name | None = None
    chat_template: Name | None = None
    pad_token: Name | None = None
    vocabulary_size: int | None = Field(None, ge=SMALLEST_VOCABULARY)


class MixtureSource(Section):
    """One data set of several. `weight`: of its rows, relative to the others'. Columns: None is what `data` says."""

    path: Name
    weight: float = Field(gt=0)
    pattern: str | None = None
    text_column: Name | None = None
    messages_column: Name | None = None
    prompt_column: Name | None = None
    completion_column: Name | None = None


class Data(Section):
    """sft reads `messages_column`, or `prompt_column` and `completion_column`; the other tasks read `text_column`.

    `mixture`: several data sets in place of `path`. `streaming`: text is tokenised while training goes on. classify
    also reads `text_pair_column` and `label_column`; `labels` names its classes in their order. dpo and reward read
    `prompt_column`, `chosen_column` and `rejected_column`; embed `anchor_column`, `positive_column` and
    `negative_columns`, None: those of the first row.
    """

    path: Name | None = None
    mixture: Annotated[tuple[MixtureSource, ...], Field(min_length=1, strict=False)] | None = None
    pattern: str | None = None
    text_column: str = "text"
    text_pair_column: Name | None = None
    label_column: Name = "label"
    labels: Annotated[tuple[Name, ...], Field(min_length=2, strict=False)] | None = None
    anchor_column: Name = "anchor"
    positive_column: Name = "positive"
    negative_columns: Annotated[tuple[Name, ...], Field(strict=False)] | None = None
    messages_column: Name | None = None
    prompt_column: Name | None = None
    completion_column: Name | None = None
    chosen_column: Name = "chosen"
    rejected_column: Name = "rejected"
    chat: bool = True
    train_on: Literal["assistant", "all"] = "assistant"
    packing: bool = True
    group_by_length: bool = False
    held_out_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    streaming: bool = False
    shuffle_buffer_mib: float = Field(64.0, gt=0)
    num_workers: NonNegativeInt = 0
    cache_dir: str | None = None

    @property
    def name(self) -> str:
        """For messages about all of the training data."""
        return self.path if self.path is not None else "data.mixture"

    def read_from(self, path: str) -> Data:
        """The same, with another path."""
        return self.model_copy(update={"path": path})

    def sources(self) -> tuple[Data, ...]:
        """What each data set of the mixture is read by; this itself where there is no mixture."""
        if self.mixture is None:
            return (self,)
        given = (source.model_dump(exclude={"weight"}, exclude_none=True) for source in self.mixture)
        return tuple(self.model_copy(update={"mixture": None, "pattern": None, **keys}) for keys in given)
