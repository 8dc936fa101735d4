"""The recipe's schema, continued: which data are read, and how text becomes tokens.

The text below each key is its meaning in docs/recipe_reference.md, which scripts/pages/recipe_reference.py writes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from samecurve.config.section import (
    LARGEST_INTEGER,
    Count,
    ImportPath,
    Name,
    Natural,
    OnDisk,
    PathName,
    Section,
    TemplatePath,
)
from samecurve.specs.data_names import Truncation
from samecurve.specs.row_formats import RowFormatName

# Every byte and two special tokens.
SMALLEST_VOCABULARY = 256 + 2
# An exbibyte, more than any machine has.
LARGEST_BUFFER_MIB = 2**40
# Processes of each rank.
MOST_WORKERS = 1024


class Tokenizer(Section):
    """The tokenizer. A recipe gives `path`, `vocabulary_size` or neither; then it is the tokenizer of `model.path`."""

    path: PathName | None = None
    """A tokenizer's folder, or its name on the hub."""
    chat_template: TemplatePath | None = None
    """Chat tasks: a Jinja file that replaces the tokenizer's template, or `chatml`, which also adds ChatML's two tokens
    where they are missing."""
    template_date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Chat tasks: the day (YYYY-MM-DD) that the chat template takes for today, if it writes the date. null: the day of
    the run's first start, also where the run is resumed on a later day."""
    pad_token: Name | None = None
    """Tasks `classify`, `reward`, `embed` and `mlm`: the padding token of a tokenizer that names none. It must be in
    the vocabulary and in no text; so it may be the `eos_token` only where no text ends with it. Its embedding is not
    trained."""
    vocabulary_size: int | None = Field(default=None, ge=SMALLEST_VOCABULARY, le=LARGEST_INTEGER)
    """Train a byte-level BPE of this size on the training data."""


class MixtureSource(Section):
    """One data set of `data.mixture`. A column that is null takes the value of `data`."""

    path: PathName
    """Where the data are; like `data.path`."""
    weight: float = Field(gt=0)
    """The share of its rows, relative to the weights of the other sources."""
    split: Name = "train"
    """Like `data.split`."""
    config: Name | None = None
    """Like `data.config`, for this source alone."""
    revision: Name | None = None
    """Like `data.revision`, for this source alone."""
    pattern: Annotated[str, OnDisk] | None = None
    """Like `data.pattern`, for this source alone."""
    text_column: Name | None = None
    """Like `data.text_column`."""
    messages_column: Name | None = None
    """Like `data.messages_column`."""
    prompt_column: Name | None = None
    """Like `data.prompt_column`."""
    completion_column: Name | None = None
    """Like `data.completion_column`."""
    format: RowFormatName | None = None
    """Like `data.format`."""
    max_samples: Count | None = None
    """Like `data.max_samples`, for this source alone."""


class Data(Section):
    """The training data and how rows are made of them. A key that the task does not read is an error."""

    path: PathName | None = None
    """A file, a folder, a data set of the hub (`OWNER/NAME`), or a `builtin:` name. With `streaming` also a URL."""
    source: ImportPath | None = None
    """In place of `path`: the import path `module:function` of a function that returns the rows, see
    [Extending](extending.md). They are cached until the module or the options change."""
    source_options: dict[str, Any] = {}
    """Keyword arguments of the function. The content of a file that one of them names is part of the cache's key."""
    split: Name = "train"
    """Hub: the split that is trained on."""
    config: Name | None = None
    """Hub: the configuration (subset) of a data set that has several."""
    revision: Name | None = None
    """Hub: a branch, tag or commit. null: `main`."""
    mixture: Annotated[tuple[MixtureSource, ...], Field(min_length=1, strict=False)] | None = None
    """Several data sets in place of `path`, for `pretrain`, `continue_pretrain` and `sft`."""
    pattern: Annotated[str, OnDisk] | None = None
    """Pattern of the files to read in a folder, such as `**/*.md`. null: those with the suffix of a text or a table."""
    text_column: str = "text"
    """The text of a table's row (`pretrain`, `continue_pretrain`, `classify`, `mlm`), or `process_reward`'s prompt."""
    words_column: Name = "tokens"
    """`token_classify`: the list of a text's words. `process_reward`: the list of a solution's steps."""
    text_pair_column: Name | None = None
    """`classify`: a second text, where two are compared."""
    label_column: Name = "label"
    """`classify`: the class, as a name or a whole number from 0, or what `classify.problem_type` says.
    `token_classify`: a list, the class of each word. `process_reward`: a list, whether each step is right."""
    labels: Annotated[tuple[Name, ...], Field(min_length=2, strict=False)] | None = None
    """`classify`, `token_classify`: the names of the classes in their order. null: those that a data set of the hub
    gives its numbers, else those in the data, sorted. Numbers in the data are places from 0, or names if any name here
    is a number."""
    anchor_column: Name = "anchor"
    """`embed`: a text, such as a question."""
    positive_column: Name = "positive"
    """`embed`: the text that matches the anchor."""
    negative_columns: Annotated[tuple[Name, ...], Field(strict=False)] | None = None
    """`embed`: hard negatives. null: the columns `negative`, `negative_1`, ... of the first row."""
    num_negatives: Natural | None = None
    """`embed`: how many of a row's list `neg` are read, the first ones. null: all; each row has as many as the first
    row."""
    messages_column: Name | None = None
    """`sft`, `distill`: a list of `{role, content}` or of ShareGPT's `{from, value}`. An assistant's turn with
    `weight: 0` or `train: false` is not trained. null: the columns of the row say its [format](formats.md)."""
    prompt_column: Name | None = None
    """`sft`, `distill`, `dpo`, `reward`: the prompt, as text or as a list of messages. null: `prompt`."""
    completion_column: Name | None = None
    """`sft`, `distill`: the answer to the prompt. null: `completion`."""
    chosen_column: Name = "chosen"
    """`dpo`, `reward`: the preferred answer. It begins with the prompt where there is no prompt column."""
    rejected_column: Name = "rejected"
    """`dpo`, `reward`: the other answer."""
    format: RowFormatName | None = None
    """`sft`, `distill`, `dpo`, `reward`, `embed`: the [format of rows](formats.md). null: the columns of each row say
    it. Needed where they fit two formats, and for Stanford's Alpaca."""
    ignore_columns: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Columns, and keys of messages, with content that is not trained on. Without this key such content is an error."""
    max_samples: Count | None = None
    """Read only so many rows, the first ones, of the training data. null: all. `path: my.jsonl#500` sets it to 500."""
    bad_rows: Literal["stop", "drop"] = "stop"
    """Rows that cannot be used: `stop` ends the run, `drop` trains without them and lists them in `bad_rows.jsonl`."""
    chat: bool = True
    """Chat tasks: render prompt and answer with the chat template. false: concatenate them as they are."""
    train_on: Literal["assistant", "completion", "all"] = "assistant"
    """`sft`, `distill`, `dpo`: which tokens are trained. `assistant`: each answer up to the token that ends it.
    `completion`: everything after the prompt, as in TRL's DPO, including what the template writes after that token.
    `all` (not `dpo`): prompts and markers, too."""
    token_weights: bool = False
    """`sft`: weigh the loss by any numbers, of an assistant's turn (`weight`) or of tokens (a list `weights` beside
    `input_ids`). The loss of a step is the sum of weight times loss over the sum of weights. Not with
    `loss.implementation: liger`. [Weights](data.md#weights)."""
    reasoning: Literal["as_inference", "keep"] = "as_inference"
    """`sft`, `distill`: conversations whose earlier answers the chat template renders differently once others follow,
    mostly without their reasoning. `as_inference`: a row for each such answer, as the model sees it when it writes that
    answer. `keep`: one row with all of it; a known family's template gets a variant for that, and another one that
    leaves reasoning out is an error."""
    chat_template_kwargs: dict[str, Any] = {}
    """Chat tasks: variables of the chat template, such as `{enable_thinking: false}`, in training, `chat` and
    `generate`. A row's column of this name overrides them."""
    packing: bool = True
    """Causal models: pack documents into full rows, without attention across documents. false: one document per row,
    truncated and padded. The other tasks need false."""
    truncation: Truncation = "right"
    """Conversations, pairs, labelled and matching texts, and texts without packing that are longer than a row: `right`
    keeps the first tokens (TRL's `keep_start`), `left` the last ones, whatever they are (`keep_end`): it cuts off a
    system prompt and the token that begins a text, but `classify` and `embed` keep the tokenizer's special tokens.
    `drop` leaves such documents out, and `error` stops and names the first."""
    group_by_length: bool = False
    """Without packing: put rows of similar length into one step and pad to the longest of them."""
    validation_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The fraction of documents, chosen by their content, that is evaluated on and never trained on; at least one of
    several documents, unless they are streamed. Rows with the same prompt, anchor or first text of a pair are on one
    side. Ignored with `evaluate.path` or `evaluate.split`."""
    streaming: bool = False
    """`pretrain`, `continue_pretrain`: tokenize during training instead of ahead of it."""
    shuffle_buffer_mib: float = Field(default=64.0, gt=0, le=LARGEST_BUFFER_MIB)
    """Streaming: the MiB of text that are tokenized and shuffled together, for each source."""
    num_workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """Processes per device that prepare rows. 0: a thread of the training process. The order of rows stays the same."""
    cache_dir: PathName | None = None
    """Where tokens and trained tokenizers are cached. null: `$SAMECURVE_CACHE`, else `~/.cache/samecurve`."""

    @property
    def name(self) -> str:
        """For messages about all of the training data."""
        return self.path or self.source or "data.mixture"

    def sources(self) -> tuple[Data, ...]:
        """Settings that read each data set of the mixture; these settings alone without a mixture."""
        if self.mixture is None:
            return (self,)
        given = (source.model_dump(exclude={"weight"}, exclude_none=True) for source in self.mixture)
        own = dict.fromkeys(("mixture", "pattern", "config", "revision", "max_samples"))
        return tuple(self.model_copy(update={**own, **keys}) for keys in given)
