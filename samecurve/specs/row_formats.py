"""Public formats of rows, recognised by their columns: the one table of what chat, preference and embedding tasks read.

docs/formats.md is written from it: `python -m scripts.pages.formats > docs/formats.md`. How a row becomes turns
is in data/schemas/, by the name in `reader`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

CHAT, PAIRS, MATCHES = "sft, distill", "dpo, reward", "embed"  # the tasks of a format
# columns that each row of the chat and preference formats may have besides
TOOLS = ("tools", "functions", "toolConfig")
SHARED = ("system", "system_prompt", "systemInstruction", *TOOLS, "chat_template_kwargs")


@dataclass(frozen=True)
class RowFormat:
    """A format of rows.

    Attributes:
        name: value of `data.format`.
        tasks: tasks that read the format.
        columns: columns that every row has, in the order in which the reader takes them.
        reader: how data/schemas/ reads it.
        optional: columns that a row may have besides.
        meaning: what the row becomes, for the documentation.
        origin: who reads or writes such rows.
        without: columns that make a row another format's.
        only_named: whether the format is read only where `data.format` names it.
        wraps_tools: whether a bare function in `tools` becomes {"type": "function", "function": ...}, as in
            LLaMA-Factory. TRL gives the template what the row has.
    """

    name: str
    tasks: str
    columns: tuple[str, ...]
    reader: str
    optional: tuple[str, ...] = ()
    meaning: str = ""
    origin: str = ""
    without: tuple[str, ...] = ()
    only_named: bool = False
    wraps_tools: bool = False


_ASKED = "user: the instruction, and {} on the next line; assistant: {}"
_PROMPTED = ("prompt",)  # the column that names the prompt by itself
_TURNS = ("messages", "conversations", "conversation", "contents")
_TOLD = (*_TURNS, "instruction", "query", "input_ids")  # columns that say more than a pair of texts
_OF_TOKENS = ("labels", "attention_mask", "weights")
_OF_TOKENS += ("completion_mask", "assistant_masks", "position_ids", "seq_lengths")  # TRL's, axolotl's
_SHAREGPT = "turns `from`/`value` or `role`/`content`; `human`, `gpt`, `function_call`, `observation`"
_LLAMA_FACTORY = "LLaMA-Factory"

FORMATS = (
    RowFormat(
        *("messages", CHAT, ("messages",), "messages"),
        meaning="the turns `role`/`content`, with `tool_calls` or `function_call`",
        origin="TRL, OpenAI, ms-swift, axolotl, LLaMA-Factory",
    ),
    RowFormat(
        *("sharegpt", CHAT, ("conversations",), "messages"),
        meaning=_SHAREGPT,
        origin="LLaMA-Factory, axolotl, FastChat, ms-swift",
        wraps_tools=True,
    ),
    RowFormat(
        *("conversation", CHAT, ("conversation",), "messages"),
        meaning="as `sharegpt`; also turns `human`/`assistant` or `input`/`output`",
        origin="axolotl, ms-swift, xtuner",
        wraps_tools=True,
    ),
    RowFormat(
        *("gemini", CHAT, ("contents",), "messages"),
        meaning="turns `role`/`parts` of the roles `user` and `model`",
        origin="Gemini, Vertex AI",
    ),
    RowFormat(
        *("prompt-completion", CHAT, ("prompt", "completion"), "pair"),
        meaning="user: `prompt`; assistant: `completion`; each may be a list of messages",
        origin="TRL, OpenAI, MLX",
    ),
    RowFormat(
        *("alpaca", CHAT, ("instruction", "output"), "instruction", ("input", "history")),
        meaning=_ASKED.format("`input`", "`output`; `history`: earlier questions and answers"),
        origin="LLaMA-Factory (its prompt), Stanford, litgpt, unsloth",
        wraps_tools=True,
    ),
    RowFormat(
        *("alpaca-stanford", CHAT, ("instruction", "output"), "stanford", ("input",)),
        meaning="user: Stanford's prompt around `instruction` and `input`; assistant: `output`",
        origin="Stanford's train.py",
        only_named=True,
    ),
    RowFormat(
        *("alpaca-axolotl", CHAT, ("instruction", "output"), "axolotl", ("input",)),
        meaning="as `alpaca-stanford`, with a line break behind the prompt; without a template by `data.chat: false`",
        origin="axolotl's `alpaca`",
        only_named=True,
    ),
    RowFormat(
        *("dolly", CHAT, ("instruction", "response"), "instruction", ("context", "input")),
        meaning=_ASKED.format("`context` or `input`", "`response`"),
        origin="Databricks, GPTeacher",
        without=_TURNS,
    ),
    RowFormat(
        *("query-response", CHAT, ("query", "response"), "instruction", ("history",)),
        meaning="user: `query`; assistant: `response`; `history`: earlier questions and answers",
        origin="ms-swift",
        wraps_tools=True,
    ),
    RowFormat(
        *("prompt-response", CHAT, ("prompt", "response"), "pair"),
        meaning="as `prompt-completion`",
        origin="HelpSteer",
        without=(*_TOLD, "completion"),
    ),
    RowFormat(
        *("question-response", CHAT, ("question", "response"), "pair"),
        meaning="as `prompt-completion`",
        origin="OpenOrca, OpenRLHF",
        without=(*_TOLD, "prompt"),
    ),
    RowFormat(
        *("question-answer", CHAT, ("question", "answer"), "pair"),
        meaning="as `prompt-completion`",
        origin="GSM8K",
        without=(*_TOLD, "prompt"),
    ),
    RowFormat(
        *("input-output", CHAT, ("input", "output"), "pair"),
        meaning="as `prompt-completion`",
        origin="NeMo, torchtune, OpenRLHF",
        without=(*_TOLD, "prompt", "question"),
    ),
    RowFormat(
        *("user-assistant", CHAT, ("user", "assistant"), "pair"),
        meaning="as `prompt-completion`",
        origin="data sets of the Hub",
        without=(*_TOLD, "prompt", "question", "input"),
    ),
    RowFormat(
        *("text-input", CHAT, ("text_input", "output"), "pair"),
        meaning="as `prompt-completion`",
        origin="Gemini API",
        without=(*_TOLD, "prompt", "question", "input"),
    ),
    RowFormat(
        *("segments", CHAT, ("segments",), "segments"),
        meaning="objects of a `text`, which is tokenised by itself and without a template, and a `label`: whether it "
        "is trained",
        origin="axolotl's `input_output`",
        without=_TOLD,
    ),
    RowFormat(
        *("tokens", CHAT, ("input_ids",), "tokens", _OF_TOKENS),
        meaning="the token ids; trained where a label is not -100, `completion_mask` and `assistant_masks` are 1; ids "
        "whose `attention_mask` is 0 are left out; several documents in a row are an error; `weights`: "
        "[Weights](data.md#weights)",
        origin="axolotl, transformers, TRL",
    ),
    RowFormat(
        *("preference", PAIRS, ("prompt", "chosen", "rejected"), "answers"),
        meaning="prompt and both answers, as text or messages",
        origin="TRL",
    ),
    RowFormat(
        *("implicit-prompt", PAIRS, ("chosen", "rejected"), "whole"),
        meaning="both begin with the prompt: their common messages, or without a template their common text",
        origin="TRL, Anthropic",
    ),
    RowFormat(
        *("chosen-messages", PAIRS, ("chosen_messages", "rejected_messages"), "whole"),
        meaning="both are conversations that begin with the same messages",
        origin="LLaMA-Factory 1.0",
    ),
    RowFormat(
        *("chosen-conversations", PAIRS, ("chosen_conversations", "rejected_conversations"), "whole"),
        meaning="both are conversations that begin with the same messages",
        origin="torchtune",
    ),
    RowFormat(
        *("chosen-response", PAIRS, ("prompt", "chosen_response", "rejected_response"), "answers"),
        meaning="as `preference`",
        origin="NeMo RL",
    ),
    RowFormat(
        *("instruction-response", PAIRS, ("instruction", "chosen_response", "rejected_response"), "instruction"),
        meaning="user: `instruction`; both answers",
        origin="Argilla, axolotl",
        without=_PROMPTED,
    ),
    RowFormat(
        *("sharegpt-preference", PAIRS, ("conversations", "chosen", "rejected"), "answers"),
        meaning="the turns before, and both answers as one message, a list or text",
        origin=_LLAMA_FACTORY,
        without=_PROMPTED,
        wraps_tools=True,
    ),
    RowFormat(
        *("messages-preference", PAIRS, ("messages", "chosen", "rejected"), "answers"),
        meaning="the turns before, and both answers as one message, a list or text",
        origin=_LLAMA_FACTORY,
        without=_PROMPTED,
    ),
    RowFormat(
        *("alpaca-preference", PAIRS, ("instruction", "chosen", "rejected"), "instruction", ("input", "history")),
        meaning="the question of `alpaca`, and both answers",
        origin=_LLAMA_FACTORY,
        without=_PROMPTED,
        wraps_tools=True,
    ),
    RowFormat(
        *("alpaca-ranked", PAIRS, ("instruction", "output"), "ranked_output", ("input", "history")),
        meaning="the question of `alpaca`; `output`: the better answer, then the worse one",
        origin=_LLAMA_FACTORY,
        without=("chosen", "rejected"),
        wraps_tools=True,
    ),
    RowFormat(
        *("question-preference", PAIRS, ("question", "chosen", "rejected"), "answers"),
        meaning="user: `question`; both answers",
        origin="Intel's orca_dpo_pairs",
        without=_PROMPTED,
    ),
    RowFormat(
        *("paired-responses", PAIRS, ("question", "response_j", "response_k"), "answers"),
        meaning="user: `question`; `response_j` is the better answer",
        origin="TRL's stack-exchange-paired",
    ),
    RowFormat(
        *("rejected-response", PAIRS, ("messages", "rejected_response"), "rejected_response"),
        meaning="the last turn is the better answer; `rejected_response`: the worse one",
        origin="ms-swift",
    ),
    RowFormat(
        *("rejected-messages", PAIRS, ("messages", "rejected_messages"), "whole"),
        meaning="both are conversations that begin with the same messages; `messages` ends with the better answer",
        origin="ms-swift",
    ),
    RowFormat(
        *("query-preference", PAIRS, ("query", "response", "rejected_response"), "instruction", ("history",)),
        meaning="user: `query`; `response` is the better answer",
        origin="ms-swift",
    ),
    RowFormat(
        *("openai-preference", PAIRS, ("input", "preferred_output", "non_preferred_output"), "openai"),
        meaning="`input`: an object with `messages` and `tools`; the outputs are lists of messages",
        origin="OpenAI",
    ),
    RowFormat(
        *("ranked-completions", PAIRS, ("context", "completions"), "ranked"),
        meaning="`context`: messages; `completions`: two objects of a `rank`, 0 for the better, and a `completion`",
        origin="NeMo RL",
    ),
    RowFormat(
        *("ranked-answers", PAIRS, ("prompt", "answers"), "ranked"),
        meaning="two objects of a `rank`, lower for the better, and an `answer`; more of them are an error",
        origin="Nectar",
    ),
    RowFormat(
        *("overall-preference", PAIRS, ("context", "response1", "response2", "overall_preference"), "judged"),
        meaning="`context`: messages; a number below 0 prefers `response1`, one above 0 `response2`, and 0 is an error",
        origin="HelpSteer3",
    ),
    RowFormat(
        *("better-response", PAIRS, ("prompt", "response_0", "response_1", "better_response_id"), "judged"),
        meaning="`better_response_id`: 0 or 1",
        origin="PKU-SafeRLHF",
    ),
    RowFormat(
        *("safer-response", PAIRS, ("prompt", "response_0", "response_1", "safer_response_id"), "judged"),
        meaning="`safer_response_id`: 0 or 1",
        origin="PKU-SafeRLHF",
    ),
    RowFormat(
        *("match", MATCHES, ("anchor", "positive"), "match"),
        meaning="a text and one that matches it; `negative`, `negative_1`, ... are hard negatives",
        origin="sentence-transformers",
    ),
    RowFormat(
        *("bge", MATCHES, ("query", "pos"), "lists", ("neg",)),
        meaning="one row for each text of `pos`, each with the texts of `neg` as hard negatives",
        origin="FlagEmbedding (BGE)",
    ),
)
NAMES = tuple(known.name for known in FORMATS)
# type checkers refuse a computed Literal, by which pydantic checks the recipe
if TYPE_CHECKING:
    RowFormatName = str
else:
    RowFormatName = Literal[NAMES]


def formats_of(tasks: str) -> tuple[RowFormat, ...]:
    """Return the formats of CHAT, PAIRS or MATCHES."""
    return tuple(known for known in FORMATS if known.tasks == tasks)


def named(name: str) -> RowFormat:
    """Return a format by its name."""
    return FORMATS[NAMES.index(name)]


def fitting(columns: Iterable[str], tasks: str) -> list[RowFormat]:
    """Return the formats that fit the columns of a row: one, none, or several that only `data.format` can tell apart.

    A format whose columns are a part of another's that fits does not count: the row has more to say.
    """
    names = set(columns)
    fit = [
        known
        for known in formats_of(tasks)
        if not known.only_named and names.issuperset(known.columns) and not names.intersection(known.without)
    ]
    return [one for one in fit if not any(set(one.columns) < set(other.columns) for other in fit)]


def choice(fit: Collection[RowFormat]) -> str:
    """Say which formats a row fits, and which key decides, for a message."""
    listed = " and ".join(f"{known.name} ({', '.join(known.columns)})" for known in fit)
    keys = " or ".join(f"data.format={known.name}" for known in fit)
    return f"the columns fit {len(fit)} formats, {listed}; set {keys}"
