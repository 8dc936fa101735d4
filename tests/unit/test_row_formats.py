"""Each public format of rows: what it becomes, against encoders of others; see specs/row_formats.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of
from chat_templates import make_tokenizer as make_family
from test_chat import INST
from test_rows import CHAT, conversations, load, report, write
from transformers import PreTrainedTokenizerFast

from samecurve.data import find
from samecurve.data.chat_encoder import ChatEncoder
from samecurve.data.chat_encoder import encoder as make_encoder
from samecurve.data.conversation_encoder import TextEncoder
from samecurve.data.schemas.conversation import ChatSchema, columns_read, conversation, format_of
from samecurve.data.schemas.preference import PairSchema, pair
from samecurve.errors import DataError
from samecurve.specs.row_formats import CHAT as CHATS
from samecurve.specs.row_formats import FORMATS, PAIRS

REFERENCES = Path(__file__).with_name("references")
LLAMA_FACTORY = json.loads((REFERENCES / "llama_factory.json").read_text())
AXOLOTL = json.loads((REFERENCES / "axolotl.json").read_text())
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TALK = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALL = {"name": "f", "arguments": {"a": 1}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Every byte is a token, and ChatML's two. The template is Qwen2.5's: TRL's copy of it, Apache-2.0."""
    return tokenizer_of(template or (REFERENCES / "qwen2_5.jinja").read_text(), None, "<|im_end|>", None, *SPECIAL)


def said(row: dict, **schema) -> list[tuple]:
    """(role, content) of each turn, or the calls of one."""
    found = conversation("here", row, ChatSchema(**schema)).messages
    return [(turn["role"], turn.get("tool_calls") or turn["content"]) for turn in found]


@pytest.mark.parametrize("name", LLAMA_FACTORY)
def test_tokens_and_labels_are_those_of_llama_factory(name):
    case, tokenizer = LLAMA_FACTORY[name], make_tokenizer()
    if name.endswith("pair"):
        both = pair("here", case["row"], PairSchema())
        documents = [both.chosen, both.rejected]
    else:
        documents = [conversation("here", case["row"], ChatSchema())]
    for encoded, parts in zip(ChatEncoder(tokenizer, ChatSchema()).encode(documents), case["parts"], strict=True):
        expected = [
            (tokenizer(text.removesuffix("\n") if trained else text).input_ids, trained) for text, trained in parts
        ]
        # LLaMA-Factory also trains the line break after the end of a turn, which no model has to write
        breaks = [tokenizer("\n").input_ids if trained else [] for _, trained in parts]
        ids = [token for (tokens, _), ends in zip(expected, breaks, strict=True) for token in (*tokens, *ends)]
        marks = [
            m for (t, trained), ends in zip(expected, breaks, strict=True) for m in [trained] * len(t) + [0] * len(ends)
        ]
        assert list(encoded.tokens) == ids
        assert np.asarray(encoded.trained).tolist() == marks


@pytest.mark.parametrize("template", [*FAMILIES, "qwen2_5", "inst"])
def test_tokens_and_labels_are_those_of_axolotl(template):
    """Those of axolotl 0.19's `chat_template`, `alpaca` and `input_output`, with `eot_tokens` for Gemma.

    One difference: where the template writes a space before an answer, axolotl does not train it.
    """
    tokenizer = make_family(template) if template in FAMILIES else make_tokenizer()
    if template == "inst":
        tokenizer = tokenizer_of(INST, "<s>", "</s>", None, "[INST]", "[/INST]")  # pyright: ignore
    cases = {name: case for name, case in AXOLOTL.items() if template in case["parts"]}
    assert len(cases) >= 8
    for name, case in cases.items():
        is_alpaca = name.startswith("alpaca")
        schema = ChatSchema(format="alpaca-axolotl" if is_alpaca else None, chat=not is_alpaca)
        (encoded,) = make_encoder(tokenizer, schema).encode([conversation("here", case["row"], schema)])
        expected = [
            (token, trained) for text, trained in case["parts"][template] for token in tokenizer(text).input_ids
        ]
        assert list(encoded.tokens) == [token for token, _ in expected], name
        is_space = np.roll(np.equal(encoded.tokens, tokenizer.convert_tokens_to_ids("[/INST]")), 1)
        assert (np.asarray(encoded.trained) & ~is_space).tolist() == [trained for _, trained in expected], name


BAD_SEGMENTS = {
    "no list": ("a", "'segments' has 'a', which is no segment"),
    "no label": ([{"text": "a"}], "which is no segment"),
    "no text": ([{"label": True, "text": 3}], r"segments\[0\].text is 3, not text"),
    "nothing trained": ([{"label": False, "text": "a"}, {"label": True, "text": ""}], "no token would be trained"),
}


@pytest.mark.parametrize("name", BAD_SEGMENTS)
def test_segments_that_cannot_be_used(name):
    segments, message = BAD_SEGMENTS[name]
    with pytest.raises(DataError, match=message):
        conversation("here", {"segments": segments}, ChatSchema())


def test_segments_without_a_template_and_trained_as_a_whole(tmp_path):
    row = {"segments": [{"label": 0, "text": "<|im_start|>a"}, {"label": 1, "text": "b"}]}
    (encoded,) = TextEncoder(make_tokenizer(None), schema := ChatSchema(chat=False)).encode(
        [conversation("here", row, schema)]
    )
    assert len(encoded.tokens) == 3 and encoded.trained.tolist() == [False, False, True]
    assert conversation("here", row, ChatSchema(train_on="all")).trained == (True, True)
    other = {"segments": [{"label": 0, "text": "<|im_start|>a"}, {"label": 1, "text": "c"}]}
    assert len({str(conversation("here", one, ChatSchema())) for one in (row, other)}) == 2
    assert load(tmp_path, write(tmp_path, [row] * 9)).describe()["rows"] == "segments: segments"


TURNS = {
    "axolotl's conversation": ({"conversation": TALK}, [("user", "a"), ("assistant", "b")]),
    "ms-swift's exchanges": (
        {"system": "s", "conversation": [{"human": "a", "assistant": "b"}]},
        [("system", "s"), ("user", "a"), ("assistant", "b")],
    ),
    "xtuner's exchanges": (
        {"conversation": [{"system": "s", "input": "a", "output": "b"}, {"input": "c", "output": "d"}]},
        [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    ),
    "text parts": (
        {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, CHAT[1]]},
        [("user", "ab"), ("assistant", "c")],
    ),
    "LLaMA-Factory 1.0's parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": "b"}], "loss_weight": 1.0},
            ]
        },
        [("user", "a"), ("assistant", "b")],
    ),
    "LLaMA-Factory 1.0's calls": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL)}] * 2},
                {"role": "tool", "content": [{"type": "text", "value": "1"}]},
                CHAT[1],
            ]
        },
        [("user", "ab"), ("assistant", CALLS["tool_calls"] * 2), ("tool", "1"), ("assistant", "c")],
    ),
    "OpenAI's older calls": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
                {"role": "function", "name": "f", "content": "1"},
                CHAT[1],
            ]
        },
        [("user", "ab"), ("assistant", CALLS["tool_calls"]), ("tool", "1"), ("assistant", "c")],
    ),
    "arguments encoded twice": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps('{"a": 1}')}}]},
            ]
        },
        [("user", "ab"), ("assistant", [{"function": CALL}])],
    ),
    "ms-swift's calls, one turn": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": "I look."},
                *[{"role": "tool_call", "content": json.dumps(CALL)}] * 2,
                {"role": "tool_response", "content": "1"},
                CHAT[1],
            ]
        },
        [("user", "ab"), ("assistant", CALLS["tool_calls"] * 2), ("tool", "1"), ("assistant", "c")],
    ),
}
DIALECTS = json.loads((REFERENCES / "row_dialects.json").read_text())
TURNS |= {name: (case["row"], [tuple(turn) for turn in case["turns"]]) for name, case in DIALECTS.items()}


@pytest.mark.parametrize("name", TURNS)
def test_turns_of_each_dialect(name):
    row, expected = TURNS[name]
    assert said(row) == expected


def test_bare_functions_are_wrapped_where_llama_factory_does():
    wrapped = {"type": "function", "function": CALL}
    for columns, expected in (
        ({"conversations": TALK, "tools": json.dumps([CALL])}, wrapped),
        ({"conversations": TALK, "tools": [wrapped]}, wrapped),
        ({"messages": CHAT, "tools": [CALL]}, CALL),  # TRL gives the template what the row has
        ({"messages": CHAT, "functions": [CALL]}, wrapped),
        ({"messages": CHAT, "tools": " "}, None),
    ):
        assert conversation("here", columns, ChatSchema()).tools == (None if expected is None else (expected,))


def test_tools_of_anthropics_form_are_openais():
    row = {"messages": CHAT, "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert conversation("here", row, ChatSchema()).tools == ({"type": "function", "function": function},)


def test_tools_of_bedrocks_form_are_openais():
    row = DIALECTS["Bedrock's calls"]["row"]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    for value in (row["toolConfig"], json.dumps(row["toolConfig"])):
        read = conversation("here", {**row, "toolConfig": value}, ChatSchema())
        assert read.tools == ({"type": "function", "function": function},)
    assert "toolConfig" in columns_read(row, ChatSchema())


def test_an_object_that_a_tool_answers_needs_to_be_text():
    row = {"messages": [CHAT[0], CALLS, {"role": "tool", "content": {"a": 1}}, CHAT[1]]}
    with pytest.raises(
        DataError, match=r"messages\[2\].content is {'a': 1}, not text .write the JSON text of an object"
    ):
        conversation("here", row, ChatSchema())


def test_stanfords_prompt_is_read_only_by_its_name():
    """Expected text: PROMPT_DICT of stanford_alpaca/train.py."""
    row = {"instruction": "do {it}", "input": "i", "output": "x"}
    assert said(row)[0] == ("user", "do {it}\ni")
    text = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\ndo {it}\n\n### Input:\ni\n\n"
        "### Response:"
    )
    assert said(row, format="alpaca-stanford") == [("user", text), ("assistant", "x")]
    assert said({**row, "input": ""}, format="alpaca-stanford")[0][1].endswith("do {it}\n\n### Response:")


def test_every_format_is_recognised_by_its_columns():
    for known in FORMATS:
        if known.tasks == CHATS and not known.only_named:
            assert format_of(dict.fromkeys(known.columns + known.optional), ChatSchema()) is known


def test_variables_of_the_template_are_those_of_the_row():
    """Against transformers' apply_chat_template, which TRL calls with the column."""
    template = "{% if loud %}LOUD {% endif %}" + (REFERENCES / "qwen2_5.jinja").read_text()
    tokenizer = make_tokenizer(template)
    for variables in ({"loud": True}, {"loud": False}, None):
        row = {"messages": CHAT, "chat_template_kwargs": variables}
        (encoded,) = ChatEncoder(tokenizer, ChatSchema()).encode([conversation("here", row, ChatSchema())])
        expected = tokenizer.apply_chat_template(CHAT, return_dict=False, **(variables or {}))  # pyright: ignore
        assert list(encoded.tokens) == expected
    row = {"messages": CHAT, "chat_template_kwargs": json.dumps({"enable_thinking": True})}
    with pytest.raises(DataError, match="'chat_template_kwargs' has 'enable_thinking', .* it reads loud"):
        ChatEncoder(tokenizer, ChatSchema()).encode([conversation("here", row, ChatSchema())])


IDS = {"input_ids": [1, 2, 3, 9], "labels": [-100, 2, 3, -100], "attention_mask": [1, 1, 1, 0]}
BAD_IDS = {
    "no labels": ({"labels": None}, "no 'labels'.*data.train_on=all"),
    "another label": ({"labels": [-100, 2, 4, -100]}, r"labels\[2\] is 4, but input_ids\[2\] is 3.*not shifted"),
    "lengths": ({"labels": [1]}, "'input_ids' has 4 values, but 'labels' has 1"),
    "text": ({"input_ids": "1 2"}, "'input_ids' is '1 2', not a list of whole numbers"),
    "nothing trained": ({"labels": [1, -100, -100, -100]}, "no token would be trained"),
    "documents by length": ({"seq_lengths": [2, 2]}, "'seq_lengths' .* several documents.*each as a row of its own"),
    "documents by position": ({"position_ids": [0, 1, 0, 1]}, "'position_ids' .* several documents.*data.packing"),
    "documents by mask": ({"attention_mask": [1, 1, 2, 2]}, "'attention_mask' .* several documents"),
    "no mask": ({"completion_mask": [0, 1, -100, 0]}, "'completion_mask' has -100; write 0 or 1"),
    "nothing of the labels": ({"assistant_masks": [1, 0, 0, 1]}, "no token would be trained"),
    "another tokenizer": ({"input_ids": [1, 2, 3000, 9], "labels": [-100, 2, 3000, -100]}, "3000, but the tokenizer's"),
}


def test_tokenised_rows_are_taken_as_they_are(tmp_path):
    for encoder in (ChatEncoder(make_tokenizer(), ChatSchema()), TextEncoder(make_tokenizer(), ChatSchema(chat=False))):
        (encoded,) = encoder.encode([conversation("here", IDS, encoder.schema)])
        assert list(encoded.tokens) == [1, 2, 3] and np.asarray(encoded.trained).tolist() == [False, True, True]
        mixed = [
            conversation("here", IDS, encoder.schema),
            conversation("here", {"prompt": "a", "completion": "b"}, encoder.schema),
        ]
        first, second = encoder.encode(mixed)
        assert list(first.tokens) == [1, 2, 3] and len(second.tokens) > 1
    all_of_them = conversation("here", {"input_ids": [1, 2]}, ChatSchema(train_on="all"))
    assert all_of_them.trained == (True, True)


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_masks_of_tokenised_rows_are_those_of_trl(tmp_path, column):
    """TRL trains where all of a row's masks are 1, within the labels if there are any."""
    ids = {"input_ids": [1, 2, 3, 9]}
    for train_on in ("assistant", "all"):
        read = conversation("here", {**ids, column: [0, 0, 1, 1]}, ChatSchema(train_on=train_on))
        assert read.tokens == (1, 2, 3, 9) and read.trained == (False, False, True, True)
    assert conversation("here", {**IDS, column: [1, 0, 1, 1]}, ChatSchema()).trained == (False, False, True)
    both = {**ids, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 0]}
    assert conversation("here", both, ChatSchema()).trained == (False, False, True, False)
    train = load(tmp_path, write(tmp_path, [{**ids, column: [0, 0, 1, 1]}] * 2))
    assert train.describe()["rows"] == f"tokens: input_ids, {column}"


def test_a_tokenised_row_of_one_document_may_say_so():
    plain = conversation("here", IDS, ChatSchema())
    told = {**IDS, "position_ids": [0, 1, 2, 0], "seq_lengths": [3]}  # the last token is padding
    assert str(conversation("here", told, ChatSchema())) == str(plain)


@pytest.mark.parametrize("name", BAD_IDS)
def test_tokenised_rows_that_cannot_be_used(name):
    change, message = BAD_IDS[name]
    with pytest.raises(DataError, match=message):
        ChatEncoder(make_tokenizer(), ChatSchema()).encode([conversation("here", {**IDS, **change}, ChatSchema())])


Q, GOOD, WORSE = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "g"},
    {"role": "assistant", "content": "w"},
)


def test_weights_of_turns_and_tokens():
    """An answer's weight is that of all its tokens, with the one that ends it; tokens without a weight have 1."""
    schema = ChatSchema(weighted=True)
    encoder = ChatEncoder(make_tokenizer(), schema)
    said = [{**message, "weight": 0.25} if message["content"] == "g" else message for message in (Q, GOOD, Q, WORSE)]
    (turns,) = encoder.encode([conversation("here", {"messages": said}, schema)])
    (plain,) = ChatEncoder(make_tokenizer(), ChatSchema()).encode(
        [conversation("here", {"messages": [Q, GOOD]}, ChatSchema())]
    )
    marks, first = np.asarray(turns.trained), len(plain.tokens)
    assert set(turns.weights[:first][marks[:first]]) == {0.25} and sum(turns.weights == 0.25) == sum(plain.trained)
    assert set(turns.weights[first:]) == {1.0} and marks[first:].any()
    (tokens,) = encoder.encode([conversation("here", {**IDS, "weights": [1, 0.1, 0, 5]}, schema)])
    assert list(tokens.trained) == [False, True, False]
    assert tokens.weights.tolist() == [1, np.rint(0.1 * 2**24) / 2**24, 0]


BAD_WEIGHTS = {
    "without the key": ({"weights": [1, 1, 1, 1]}, False, "data.token_weights is false"),
    "length": ({"weights": [1]}, True, "'input_ids' has 4 values, but 'weights' has 1"),
    "negative": ({"weights": [1, -1, 1, 1]}, True, "'weights' has -1; .* 0 or a number from 1e-06"),
    "not a list": ({"weights": "1"}, True, "'weights' has '1'"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_of_tokens_that_cannot_be_used(name):
    change, weighted, message = BAD_WEIGHTS[name]
    with pytest.raises(DataError, match=message):
        conversation("here", {**IDS, **change}, ChatSchema(weighted=weighted))


PREFERENCES = {
    "preference": {"prompt": "q", "chosen": "g", "rejected": [WORSE]},
    "implicit-prompt": {"chosen": [Q, GOOD], "rejected": [Q, WORSE]},
    "chosen-messages": {
        "chosen_messages": [Q, {"role": "assistant", "content": [{"type": "text", "value": "g"}], "loss_weight": 1.0}],
        "rejected_messages": [{**Q, "loss_weight": 0.0}, WORSE],
    },
    "chosen-conversations": {
        "chosen_conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "g"}],
        "rejected_conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "w"}],
    },
    "chosen-response": {"prompt": "q", "chosen_response": "g", "rejected_response": "w"},
    "instruction-response": {"instruction": "q", "chosen_response": "g", "rejected_response": "w"},
    "sharegpt-preference": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "g"},
        "rejected": {"from": "gpt", "value": "w"},
    },
    "messages-preference": {"messages": [Q], "chosen": GOOD, "rejected": WORSE},
    "alpaca-preference": {"instruction": "q", "input": "", "chosen": "g", "rejected": "w"},
    "alpaca-ranked": {"instruction": "q", "output": ["g", "w"]},
    "question-preference": {"question": "q", "chosen": "g", "rejected": "w"},
    "paired-responses": {"question": "q", "response_j": "g", "response_k": "w"},
    "rejected-response": {"messages": [Q, GOOD], "rejected_response": "w"},
    "rejected-messages": {"messages": [Q, GOOD], "rejected_messages": [Q, WORSE]},
    "query-preference": {"query": "q", "response": "g", "rejected_response": "w"},
    "openai-preference": {"input": {"messages": [Q]}, "preferred_output": [GOOD], "non_preferred_output": [WORSE]},
    "ranked-completions": {
        "context": [Q],
        "completions": [{"rank": 1, "completion": [WORSE]}, {"rank": 0, "completion": [GOOD]}],
    },
    "ranked-answers": {"prompt": "q", "answers": [{"rank": 2, "answer": "w"}, {"rank": 1, "answer": "g"}]},
    "overall-preference": {"context": [Q], "response1": "w", "response2": "g", "overall_preference": 2},
    "better-response": {"prompt": "q", "response_0": "w", "response_1": "g", "better_response_id": 1},
    "safer-response": {"prompt": "q", "response_0": "w", "response_1": "g", "safer_response_id": "1"},
}


def test_each_preference_format_has_a_row_here():
    assert list(PREFERENCES) == [known.name for known in FORMATS if known.tasks == PAIRS]


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_of_each_format(tmp_path, name):
    found = pair("here", PREFERENCES[name], PairSchema())
    keys = "role", "content"
    both = [[{key: turn[key] for key in keys} for turn in answer.messages] for answer in (found.chosen, found.rejected)]
    assert both == [[Q, GOOD], [Q, WORSE]] and found.chosen.num_prompt == 1
    task = load(tmp_path, write(tmp_path, [PREFERENCES[name]] * 2), "dpo")
    assert task.describe()["rows"] == f"{name}: {', '.join(key for key, value in PREFERENCES[name].items() if value)}"


@pytest.mark.parametrize("name", ["overall-preference", "better-response", "safer-response"])
def test_verdicts_for_the_first_answer(name):
    column = list(PREFERENCES[name])[-1]
    found = pair("here", {**PREFERENCES[name], column: -3 if name == "overall-preference" else 0}, PairSchema())
    assert found.chosen.messages[-1]["content"] == "w" and found.rejected.messages[-1]["content"] == "g"


def test_openai_tools_are_those_of_the_input():
    row = PREFERENCES["openai-preference"]
    row = {**row, "input": {**row["input"], "tools": [{"type": "function", "function": CALL}]}}
    assert pair("here", row, PairSchema()).chosen.tools == ({"type": "function", "function": CALL},)


BAD_PREFERENCES = {
    "three answers": ({"instruction": "q", "output": ["a", "b", "c"]}, "not a list of two answers"),
    "equal ranks": (
        {"context": [Q], "completions": [{"rank": 0, "completion": [GOOD]}] * 2},
        "not two objects with a different 'rank'",
    ),
    "three ranks": (
        {"prompt": "q", "answers": [{"rank": n, "answer": str(n)} for n in range(3)]},
        "has 3 ranked answers",
    ),
    "no preference": (
        {**PREFERENCES["overall-preference"], "overall_preference": 0},
        "is 0, so neither .*bad_rows=drop",
    ),
    "no verdict": ({**PREFERENCES["better-response"], "better_response_id": 2}, "is 2, not one of 0, 1"),
    "two verdicts": (
        {**PREFERENCES["better-response"], "safer_response_id": 0},
        "data.format=better-response or data.format=safer-response",
    ),
    "two formats": ({"chosen": "g", "rejected": "w", "question": "q", "instruction": "i"}, "data.format=alpaca-prefer"),
    "unpaired": ({"prompt": "q", "completion": "g", "label": True}, "dpo.loss=kto"),
    "LLaMA-Factory's unpaired": (
        {"messages": [Q, GOOD], "label": True},
        "task=sft data.bad_rows=drop",
    ),
    "its other name": ({"messages": [Q, GOOD], "kto_tag": False}, "dpo.loss=kto"),
}


@pytest.mark.parametrize("name", BAD_PREFERENCES)
def test_preferences_that_cannot_be_used(name):
    row, message = BAD_PREFERENCES[name]
    with pytest.raises(DataError, match=message):
        pair("here", row, PairSchema())


def matches(folder: Path, rows: list[dict], **data) -> list[tuple[str, ...]]:
    load(folder, write(folder, rows), "embed", **data)
    from samecurve.config.schema import Data

    source = find.find_matches(str(folder / "a.jsonl"), Data(path="x", **data))
    return [found.texts for found in source.documents()]


def test_rows_of_bge_become_one_for_each_positive(tmp_path):
    rows = [{"query": "a", "pos": ["b", "c"], "neg": ["d", "e"]}, {"query": "f", "pos": ["g"], "neg": ["h", "i"]}]
    expected = [("a", "b", "d", "e"), ("a", "c", "d", "e"), ("f", "g", "h", "i")]
    assert matches(tmp_path, rows) == expected
    rows[1]["neg"].append("j")
    assert "'neg' has 3 texts, but the first row has 2; set data.num_negatives" in report(
        tmp_path, write(tmp_path, rows), "embed"
    )
    assert matches(tmp_path, rows, num_negatives=1) == [row[:3] for row in expected]
    (prompted := {**rows[0], "prompt": "Find it.", "type": "normal"})
    assert "prompt (2 rows have one)" in report(tmp_path, write(tmp_path, [prompted]), "embed")


def test_the_header_names_the_format(tmp_path):
    rows = [{"instruction": "a", "input": "b", "output": "c"}, {"prompt": "a", "completion": "b"}]
    assert load(tmp_path, write(tmp_path, rows[:1] * 2)).describe()["rows"] == "alpaca: instruction, input, output"
    both = str(load(tmp_path, write(tmp_path, rows)).describe()["rows"])
    assert both.startswith("alpaca (1 rows) and prompt-completion (1 rows): instruction, input, output, prompt")


def test_parts_that_are_not_trained_are_an_error(tmp_path):
    """Axolotl trains parts of a turn; a turn is trained as a whole here."""
    parts = [{"type": "text", "text": "hm", "train": False}, {"type": "text", "text": "c", "train": True}]
    path = write(tmp_path, [{"messages": [CHAT[0], {"role": "assistant", "content": parts}]}])
    assert "messages[1].content[0] has train: false, but a turn is trained as a whole" in report(tmp_path, path)
    assert said({"messages": [CHAT[0], {"role": "assistant", "content": parts[1:]}]})[1] == ("assistant", "c")


@pytest.mark.parametrize("thought", [{"type": "reasoning", "value": "hm"}, {"type": "thinking", "thinking": "hm"}])
def test_thoughts_in_parts_are_lost_where_the_template_does_not_read_them(tmp_path, thought):
    parts = [thought, {"type": "text", "value": "c"}]
    path = write(tmp_path, [{"messages": [CHAT[0], {"role": "assistant", "content": parts}]}])
    assert "1 messages have 'reasoning_content', which the chat template does not read" in report(tmp_path, path)
    assert len(conversations(path)) == 1
