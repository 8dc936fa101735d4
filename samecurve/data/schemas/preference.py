"""Preference pairs in tables: the formats of specs/row_formats.py, or columns that the recipe names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.data import sources
from samecurve.data.chat_encoder import encoder
from samecurve.data.columns import Columns, rows_have_one
from samecurve.data.encoder import Encoded, Encoder
from samecurve.data.formats import no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.conversation import VERDICTS, ChatSchema, Conversation, asked, template_kwargs
from samecurve.data.schemas.messages import Turns, messages_of, shown, tools_of, turns, with_system
from samecurve.errors import DataError
from samecurve.specs.row_formats import PAIRS, SHARED, TOOLS, RowFormat, choice, fitting, named
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data

# Part of the cache key: raise it when the same pair gives other tokens or other trained marks, or is held out instead.
_VERSION = 2


@dataclass(frozen=True)
class PairSchema:
    """Columns of a preference pair.

    Attributes:
        prompt: column of the prompt. None: the row's own columns say what is read.
        chosen: column of the better answer.
        rejected: column of the worse answer.
        chat: whether texts become turns of a chat; otherwise they are concatenated without a template.
        format: name of the format of rows.
        template_kwargs: variables of the chat template.
    """

    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    chat: bool = True
    format: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Data) -> PairSchema:
        columns = data.prompt_column, data.chosen_column, data.rejected_column
        return cls(*columns, data.chat, data.format, data.chat_template_kwargs)

    @property
    def names_columns(self) -> bool:
        """Whether the recipe names columns."""
        return self.prompt is not None or (self.chosen, self.rejected) != ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same prompt. Its str() is their content without the place."""

    chosen: Conversation
    rejected: Conversation

    @property
    def place(self) -> str:
        return self.chosen.place

    @property
    def split_key(self) -> str:
        return prompt_of(self.chosen)

    def __str__(self) -> str:
        return f"{self.chosen}\0{self.rejected}"


def prompt_of(conversation: Conversation) -> str:
    """Return the prompt that rows of it share, without its system turn; "" if there is no more."""
    prompt = [turn for turn in conversation.messages[: conversation.num_prompt] if turn["role"] != "system"]
    has_text = any(turn.get("content") for turn in prompt)
    return json.dumps(prompt, ensure_ascii=False, sort_keys=True, default=str) if has_text else ""


@dataclass(frozen=True)
class PairSource(sources.TableSource):
    """Tables whose rows are preference pairs."""

    documents_are, a_line_is = "preference pairs", "one pair of answers"
    columns_are_named_by = "data.prompt_column, data.chosen_column and data.rejected_column"

    schema: PairSchema = PairSchema()

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self.schema), sort_keys=True)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        chosen = format_of(row, self.schema)
        return (*chosen.columns, *chosen.optional, *(SHARED if self.schema.chat else TOOLS))

    def format_name(self, row: dict) -> str:
        return format_of(row, self.schema).name

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        wanted = {"chosen_column": self.schema.chosen, "rejected_column": self.schema.rejected}
        prompt = nearest(row, {"prompt_column": self.schema.prompt or "prompt"})
        if row.keys() >= set(wanted.values()):
            yield prompt
        else:
            yield nearest(row, wanted)
            yield prompt and prompt | nearest(row, wanted)

    def reading(self, keys: dict[str, str]) -> PairSource:
        changes = {key.removesuffix("_column"): column for key, column in keys.items()}
        return replace(self, schema=replace(self.schema, **changes))

    def texts(self, document: Pair) -> list[str]:
        # the prompt only once, as both answers have it
        messages = (*document.chosen.messages, *document.rejected.messages[document.rejected.num_prompt :])
        return [message["content"] for message in messages if message.get("content")]

    def read(self, place: str, row: dict) -> Pair:
        return pair(place, row, self.schema)


@dataclass(frozen=True)
class ScoredPairSource(PairSource):
    """Preference pairs for a reward model. A column `margin`, which TRL's loss reads and ours does not, is refused."""

    def refuse_lost_content(self, columns: Columns, reads: Callable[[str], bool] | None = None) -> None:
        super().refuse_lost_content(columns, reads)
        margin = columns.unread.get("margin")
        if margin is not None and "margin" not in self.selection.ignore_columns:
            raise DataError(
                f"{self.name}: 'margin' ({rows_have_one(margin.num)}) is not in the loss of task=reward; remove the "
                "column, or set data.ignore_columns=[margin] to train without it"
            )


def format_of(row: Iterable[str], schema: PairSchema) -> RowFormat:
    """Return the format of a row: of the columns or the format that the recipe names, else the one that fits.

    Where none fits it is that of `chosen` and `rejected`. Where several do, `pair` refuses the row.
    """
    names = set(row)
    if schema.names_columns:
        prompt = schema.prompt or ("prompt" if "prompt" in names else None)
        both = (schema.chosen, schema.rejected)
        if prompt is None:
            return RowFormat("", PAIRS, both, "whole")
        return RowFormat("", PAIRS, (prompt, *both), "answers")
    if schema.format is not None:
        return named(schema.format)
    return next(iter(fitting(names, PAIRS)), named("implicit-prompt"))


def pair(place: str, row: dict, schema: PairSchema) -> Pair:
    """Read and check one row.

    Raises:
        DataError: with the place, the column, the value and the fix.
    """
    known = format_of(row, schema)
    if missing := [name for name in known.columns if name not in row]:
        fix = [_UNPAIRED] if row.keys() & set(VERDICTS) else []
        raise no_column(place, row, " and ".join(map(repr, missing)), *fix)
    if schema.format is None and known.name and len(fit := fitting(row, PAIRS)) > 1:
        raise DataError(f"{place}: {choice(fit)}")
    if not schema.chat and known.reader in ("rejected_response", "openai", "ranked"):
        raise DataError(f"{place}: {known.columns[0]!r} holds messages, which need a chat template; set data.chat=true")
    prompt, chosen, rejected, names = _read(place, row, known, schema)
    if chosen == rejected:
        raise DataError(
            f"{place}: {names[0]!r} and {names[1]!r} are the same ({shown(chosen[-1]['content'])}), so neither is the "
            "better one; correct or remove the row"
        )
    if prompt is None:
        # the longest common prefix of messages, or of characters
        one, other = (chosen, rejected) if schema.chat else (chosen[0]["content"], rejected[0]["content"])
        length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))
        # A space before the first different character belongs to the answers, as tokenizers join it to the word.
        length -= bool(length) and one[length - 1] == " "
        if not length:
            raise DataError(
                f"{place}: {names[0]!r} and {names[1]!r} do not begin with the same "
                f"{'message' if schema.chat else 'character'}, so they have no common prompt; correct or remove the "
                "row, or set data.prompt_column"
            )
        prompt, chosen, rejected = one[:length], one[length:], other[length:]
        if not schema.chat:
            parts = (("user", prompt), ("assistant", chosen), ("assistant", rejected))
            prompt, chosen, rejected = (({"role": role, "content": text},) for role, text in parts)
    elif repeated := _repeated(prompt, chosen, rejected):
        prompt, chosen, rejected = repeated, chosen[len(repeated) :], rejected[len(repeated) :]
    for column, answer in zip(names, (chosen, rejected), strict=True):
        check_answer(place, column, answer)
    prompt = with_system(place, row, prompt) if schema.chat else prompt
    tools = tools_of(place, row["input"] if known.reader == "openai" else row, known.wraps_tools)
    about = len(prompt), tools, template_kwargs(place, row)
    return Pair(*(Conversation(place, (*prompt, *answer), *about) for answer in (chosen, rejected)))


def _repeated(prompt: Turns, chosen: Turns, rejected: Turns) -> Turns:
    """Return the turns with which both answers repeat the prompt, () if they do not.

    Behind a system turn, or with other white space around it, it is the same prompt: distilabel writes such rows.
    """
    for begin in (prompt, chosen[:2], chosen[:1]):
        same = begin == prompt or (
            len(prompt) == 1
            and [turn["role"] for turn in begin] == ["system", "user"][-len(begin) :]
            and begin[-1]["content"].strip() == prompt[0]["content"].strip()
        )
        if same and chosen[: len(begin)] == rejected[: len(begin)] == begin:
            return begin
    return ()


# prompt (None: both answers begin with it), better answer, worse answer, names of the answers
Read = tuple[Turns | None, Turns, Turns, tuple[str, str]]


def _read(place: str, row: dict, known: RowFormat, schema: PairSchema) -> Read:
    column, *both = known.columns
    if known.reader == "rejected_response":
        (rejected,), said = both, messages_of(place, column, row[column])
        names = (f"{column}[-1]", rejected)
        return said[:-1], said[-1:], turns(place, rejected, row[rejected], "assistant", True), names
    if known.reader == "openai":
        if not isinstance(row[column], dict) or "messages" not in row[column]:
            raise DataError(f"{place}: {column!r} is {shown(row[column])}, not an object with 'messages'; correct it")
        chosen, rejected = (messages_of(place, name, row[name]) for name in both)
        return messages_of(place, f"{column}.messages", row[column]["messages"]), chosen, rejected, (both[0], both[1])
    if known.reader in ("ranked", "ranked_output"):
        given = _ranked(place, both[0], row[both[0]], known.reader == "ranked")
    elif known.reader == "judged":
        *names, verdict = both
        given = [(name, row[name]) for name in names][:: _preferred(place, verdict, row[verdict])]
    else:
        given = [(name, row[name]) for name in known.columns[-2:]]
    if known.reader == "whole" and schema.chat and any(isinstance(value, str) for _, value in given):
        raise DataError(
            f"{place}: {given[0][0]!r} and {given[1][0]!r} are text, but there is no column 'prompt'; set "
            "data.prompt_column, write messages, or set data.chat=false to take the common beginning as the prompt"
        )
    chosen, rejected = (turns(place, name, value, "assistant", schema.chat) for name, value in given)
    if known.reader == "whole":
        prompt = None
    elif known.reader in ("instruction", "ranked_output"):  # a question as in Alpaca's format
        prompt = asked(place, row, column, known.optional, schema.chat)
    else:
        prompt = turns(place, column, row[column], "user", schema.chat)
    return prompt, chosen, rejected, (given[0][0], given[1][0])


def _ranked(place: str, column: str, given: Any, by_rank: bool) -> list[tuple[str, Any]]:
    """Return (name, answer) of both answers of a list, the better one first: by its place or its `rank`."""
    listed = given if isinstance(given, list) else []
    key = column.removesuffix("s")
    if not by_rank:
        if len(listed) == 2:
            return [(f"{column}[{nth}]", text) for nth, text in enumerate(listed)]
        raise DataError(
            f"{place}: {column!r} is {shown(given)}, not a list of two answers, the better one first; correct or "
            "remove the row"
        )
    ranks = [entry["rank"] for entry in listed if isinstance(entry, dict) and type(entry.get("rank")) in (int, float)]
    if len(ranks) > 2:
        raise DataError(
            f"{place}: {column!r} has {len(ranks)} ranked answers, and which two of them are compared is not said; "
            "write a row of 'prompt', 'chosen' and 'rejected' for each pair, such as the first and the last"
        )
    if len(listed) != 2 or len(ranks) != 2 or ranks[0] == ranks[1]:
        raise DataError(
            f"{place}: {column!r} is {shown(given)}, not two objects with a different 'rank', lower for the better "
            f"one, and {'an' if key == 'answer' else 'a'} {key!r}; correct or remove the row"
        )
    order = sorted((0, 1), key=ranks.__getitem__)
    return [(f"{column}[{nth}].{key}", listed[nth].get(key)) for nth in order]


def _preferred(place: str, column: str, verdict: Any) -> int:
    """Return 1 if the first of two answers is the better one, and -1 for the second."""
    numbers = {str(number): number for number in (range(-3, 4) if column == "overall_preference" else (0, 1))}
    number = numbers.get(str(verdict))  # text in a csv file
    if number is None:
        raise DataError(f"{place}: {column!r} is {shown(verdict)}, not one of {', '.join(numbers)}; correct it")
    if column != "overall_preference":
        return 1 - 2 * number
    if not number:
        raise DataError(
            f"{place}: {column!r} is 0, so neither answer is the better one; remove the row, or set data.bad_rows=drop "
            "to leave out all such rows"
        )
    return 1 if number < 0 else -1


_UNPAIRED = (
    "rows of an answer and its label, as for TRL's and LLaMA-Factory's KTO, train with task=dpo dpo.loss=kto; task=sft "
    "data.bad_rows=drop trains on the good answers alone"
)


def check_answer(place: str, column: str, answer: Turns) -> None:
    if not answer or not any(message["content"].strip() or message.get("tool_calls") for message in answer):
        raise DataError(f"{place}: {column!r} has no answer after the prompt; add it or remove the row")
    weights = [message.get("weight", 1) for message in answer]
    if other := [weight for weight in weights if weight != 1]:
        raise DataError(
            f"{place}: {column!r} has a turn of weight {other[0]}, but pairs are compared by their whole answers; "
            "remove the weight or the row"
        )
    if answer[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in answer)
        raise DataError(
            f"{place}: {column!r} has no assistant turn right after the prompt (roles there: {roles}); correct or "
            "remove the row"
        )


class PairEncoder(Encoder):
    """Encodes a pair as one document: the chosen conversation (segment 0), then the rejected one (segment 1).

    Both conversations are encoded as for sft. As one document, both answers are on the same side of the held-out split.
    With train_on="completion" (see ChatEncoder) both completions begin at the same token, as in TRL, also if only one
    of them shares its first token with the prompt. The other value of train_on is "assistant".
    """

    masked = segmented = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        schema: PairSchema,
        train_on: str = "assistant",
        date: str | None = None,
    ):
        super().__init__(tokenizer)
        own = ChatSchema(chat=schema.chat, train_on=train_on, template_kwargs=schema.template_kwargs)
        self._one = encoder(tokenizer, own, date, splits=False)
        self._completions = train_on == "completion"
        self.identity = digest(_VERSION, self._one.identity)
        self.counts, self.rare, self.facts = self._one.counts, self._one.rare, self._one.facts
        self.renders = self._one.renders

    def reads(self, key: str) -> bool:
        return self._one.reads(key)

    def encode(self, documents: list[Pair]) -> list[Encoded]:
        encoded = self._one.encode([answer for pair in documents for answer in (pair.chosen, pair.rejected)])
        joined = []
        for chosen, rejected in zip(encoded[::2], encoded[1::2], strict=True):
            assert chosen.trained is not None and rejected.trained is not None  # both encoders of chats are masked
            trained = [np.asarray(answer.trained) for answer in (chosen, rejected)]
            if self._completions:  # from the earlier of their first trained tokens to their ends
                start = min(int(np.argmax(marks)) for marks in trained)
                trained = [np.arange(len(marks)) >= start for marks in trained]
            segments = [0] * len(chosen.tokens) + [1] * len(rejected.tokens)
            joined.append(Encoded([*chosen.tokens, *rejected.tokens], np.concatenate(trained), segments))
        return joined
