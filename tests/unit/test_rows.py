"""Rows of tables: columns that are read, content that would be lost, bad rows, hints, Arrow's nulls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import chat_templates
import pytest
from tiny_recipes import recipe_file
from transformers import PreTrainedTokenizerFast

from samecurve.config import loader
from samecurve.data import chat_encoder, sources
from samecurve.data.chat_encoder import ChatEncoder
from samecurve.data.columns import Columns
from samecurve.data.find import find_conversations
from samecurve.data.formats import parquet_rows
from samecurve.data.row_checks import write_bad_rows
from samecurve.data.schemas import conversation
from samecurve.data.schemas.conversation import ChatSchema
from samecurve.data.selection import Selection
from samecurve.data.token_store import load_corpus
from samecurve.data.tokenizer import train_tokenizer
from samecurve.errors import DataError
from samecurve.metrics import console
from samecurve.tasks import registry

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
LONG = "a text of five words"


def write(folder: Path, rows: Sequence[dict | str], name: str = "a.jsonl") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def load(folder: Path, path: Path, task: str = "sft", **data):
    """The task that a run would load, with a tokenizer that is trained on the data."""
    blocks = {"model": {"config": {"model_type": "bert"}}} if task in ("classify", "embed") else {}
    blocks["batch"] = {"global_batch_size": 2 if task == "embed" else 1, "sequence_length": 128}
    data |= {} if task in ("sft", "pretrain") else {"packing": False}
    return registry.load_task(loader.load_recipe(recipe_file(folder, path, task, data=data, **blocks), []))


def conversations(path: Path, **schema) -> list[str]:
    """The content of each conversation."""
    source = find_conversations(str(path), None, ChatSchema(**schema))
    source.check()
    return [json.dumps([[m["role"], m["content"]] for m in found.messages]) for found in source.documents()]


def report(folder: Path, *arguments, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, *arguments, **settings)
    return str(caught.value).replace(str(folder), "T")


ALPACA = {
    "system and history": (
        {"instruction": "q", "output": "x", "system": "s", "history": [["a", "b"]]},
        [["system", "s"], ["user", "a"], ["assistant", "b"], ["user", "q"], ["assistant", "x"]],
    ),
    "dolly": ({"instruction": "q", "context": "c", "response": "x"}, [["user", "q\nc"], ["assistant", "x"]]),
}


@pytest.mark.parametrize("name", ALPACA)
def test_alpaca_is_read_as_llama_factory_reads_it(tmp_path, name):
    """Expected values: AlpacaDatasetConverter of LLaMA-Factory, src/llamafactory/data/converter.py, by hand."""
    row, expected = ALPACA[name]
    assert conversations(write(tmp_path, [row])) == [json.dumps(expected)]


@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
def test_answers_in_the_history_are_trained(tmp_path, train_on):
    row, _ = ALPACA["system and history"]
    source = find_conversations(str(write(tmp_path, [row])), None, ChatSchema(train_on=train_on))
    markers = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
    trained = train_tokenizer(source, 0.0, 260, markers)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
    tokenizer.chat_template = chat_encoder_template()
    (row,) = chat_encoder.ChatEncoder(tokenizer, source.schema).rows(next(source.documents()))
    text, trained = row.text, [row.text[start:end] for start, end in row.spans]
    expected = {"assistant": ["b<|im_end|>", "x<|im_end|>"], "completion": ["x<|im_end|>\n"], "all": [text]}
    assert trained == expected[train_on]


def chat_encoder_template() -> str:
    from samecurve.data.tokenizer import CHAT_TEMPLATE

    return CHAT_TEMPLATE.replace("{{ bos_token }}", "")


def test_a_system_column_is_the_first_turn(tmp_path):
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}
    expected = json.dumps([["system", "s"], ["user", "a"], ["assistant", "b"]])
    assert conversations(write(tmp_path, [row])) == [expected]
    twice = {"messages": [{"role": "system", "content": "t"}, *CHAT], "system": "s"}
    with pytest.raises(DataError, match="'system' \\('s'\\) and a message of the role 'system' \\('t'\\); keep one"):
        conversations(write(tmp_path, [twice]))


def test_train_false_is_weight_zero(tmp_path):
    """axolotl's flag of one turn."""

    def of(**flag: object) -> list:
        turns = [CHAT[0], {**CHAT[1], "content": "wrong", **flag}, CHAT[0], {**CHAT[1], "content": "right"}]
        source = find_conversations(str(write(tmp_path, [{"messages": turns}])), None, ChatSchema())
        source.check()
        return list(source.documents())

    assert of(train=False)[0].messages == of(weight=0)[0].messages != of()[0].messages
    assert of(loss=False)[0].messages == of(weight=0)[0].messages  # ms-swift's
    assert of(loss_scale=0.0)[0].messages == of(weight=0)[0].messages
    with pytest.raises(DataError, match=r"weight is 2; write 0 .* data.token_weights=true"):
        of(loss_scale=2.0)
    for flags, expected in (({}, "wrong<|im_end|>right<|im_end|>"), ({"train": False}, "right<|im_end|>")):
        of(**flags)
        task = load(tmp_path, tmp_path / "a.jsonl")
        stream = task.train.stream
        assert task.tokenizer.decode(stream.tokens[stream.trained > 0]) == expected
    for flag, message in (("no", "train is 'no'; write true or false"), (True, "train: true and weight: 0; keep one")):
        with pytest.raises(DataError, match=message):
            of(train=flag, weight=0)


# without {% generation %} marks, and with them
MARKED = chat_templates.CHATML.replace("message['content'] + '<|im_end|>\n' }}", "'' }}{% if message['role'] == "
    "'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}")  # fmt: skip


@pytest.mark.parametrize(
    ("family", "template", "end"),
    [
        ("chatml", None, "<|im_end|>"),
        ("chatml", MARKED, "<|im_end|>"),
        ("llama3", None, "<|eot_id|>"),
        ("gemma", None, ""),
    ],
)
def test_turns_of_others_are_trained_as_axolotl_does(family, template, end):
    """Their content, and the eos_token behind it: Gemma's turns end with another token."""
    tokenizer = chat_templates.make_tokenizer(family)
    tokenizer.chat_template = template or tokenizer.chat_template
    turns = [("human", "one", False), ("gpt", "two", None), ("human", " three ", True), ("gpt", "four", None)]
    row = [{"from": role, "value": text, "train": flag} for role, text, flag in turns]
    said = conversation.conversation("here", {"conversations": row}, ChatSchema())
    (encoded,) = ChatEncoder(tokenizer, ChatSchema()).encode([said])
    trained = tokenizer.decode([t for t, is_trained in zip(encoded.tokens, encoded.trained, strict=True) if is_trained])
    three = " three " if family == "chatml" else "three"  # the other templates trim
    closed = chat_templates.END_OF_TURN[family]
    assert trained == f"two{closed}{three}{end}four{closed}"


def turn(**message: object) -> list[dict]:
    """A row whose answer has further keys."""
    return [{"messages": [CHAT[0], {**CHAT[1], **message}]}]


THOUGHTS = ["1 messages have 'reasoning_content'", "template does not read", "ignore_columns=[reasoning_content]"]
WORSE = [CHAT[0], {**CHAT[1], "content": "d", "thinking": "x"}]
LOST = {
    "columns that the recipe names leave one out": (
        "sft",
        [{"instruction": "do", "input": text, "output": "x"} for text in ("it", "")],
        {"prompt_column": "instruction", "completion_column": "output"},
        ["input (1 row has one)", "remove data.prompt_column and data.completion_column", "ignore_columns=[input]"],
    ),
    "images": ("sft", [{"messages": CHAT, "images": ["a.png"]}], {}, ["images (1 row has one)"]),
    "thinking": ("sft", [{"messages": CHAT, "thinking": "x"}], {}, ["thinking (1 row has one)"]),
    "documents": ("sft", [{"messages": CHAT, "documents": ["a"]}], {}, ["documents (1 row has one)"]),
    "text by another name": ("sft", [{"messages": CHAT, "remark": LONG}] * 3, {}, ["remark (3 rows have one)"]),
    "dpo": ("dpo", [{**PAIR, "context": "x"}], {}, ["context (1 row has one)", "read: prompt, chosen, rejected"]),
    "reward": ("reward", [{**PAIR, "images": ["x"]}], {}, ["images (1 row has one)"]),
    "classify": ("classify", [{"text": "a", "label": "x", "title": LONG}], {"labels": ["x", "y"]}, ["title (1 row"]),
    "embed": ("embed", [{"anchor": "a", "positive": "b", "context": "c"}], {}, ["context (1 row has one)"]),
    "a turn's thoughts": ("sft", turn(reasoning_content="x"), {}, THOUGHTS),
    "a turn's images": ("sft", turn(images=["x"]), {}, ["1 messages have 'images'"]),
    "a turn's thoughts in a pair": ("dpo", [{"chosen": CHAT, "rejected": WORSE}], {}, ["1 messages have 'thinking'"]),
    "ignored, and read": (
        "sft",
        [{"instruction": "a", "input": "b", "output": "c"}],
        {"ignore_columns": ["input"]},
        ["data.ignore_columns names 'input', which is read"],
    ),
}


@pytest.mark.parametrize(
    "bad", [{"label": False}, {"kto_tag": "False"}, {"label": 0}, {"label": "0"}, {"label": "FALSE"}]
)
def test_answers_that_unpaired_rows_call_bad_are_not_trained(tmp_path, bad):
    ((column, value),) = bad.items()
    rows = [{"prompt": "a", "completion": "good", column: True}, {"prompt": "a", "completion": "worse", **bad}]
    path = write(tmp_path, [*rows, {"prompt": "b", "completion": "none", column: 2}])
    fix = rf"a.jsonl:2: '{column}' is {value!r}, so .* bad one; .*data.bad_rows=drop .*data.ignore_columns=\[{column}\]"
    with pytest.raises(DataError, match=fix):
        load(tmp_path, path)
    for ignored, num_read in ([], 2), ([column], 3):
        train = load(tmp_path, path, bad_rows="drop", ignore_columns=ignored).train
        assert len(train.stream.offsets) == num_read + 1


@pytest.mark.parametrize("name", LOST)
def test_content_that_is_not_read_is_an_error(tmp_path, name):
    task, rows, data, fragments = LOST[name]
    path = write(tmp_path, rows)
    text = report(tmp_path, path, task, **data)
    assert text.startswith("T/a.jsonl: ") and all(fragment in text for fragment in fragments), text
    ignored = re.search(r"data\.ignore_columns=\[(\w+)\]", text)
    if ignored and task != "embed":  # the hint is true when followed; embed wants two rows
        load(tmp_path, path, task, **data, ignore_columns=[ignored[1]])
        # and the cache, which now has the tokens, does not silence the error
        assert report(tmp_path, path, task, **data) == text


NOT_CONTENT = {
    "an id and a category": {
        "messages": CHAT,
        "id": "0f3a",
        "category": "closed_qa",
        "score": 0.5,
        "url": "https://x.y/z",
    },
    "nothing in it": {"messages": CHAT, "images": [], "context": "", "thinking": None, "functions": {}},
    "the first question again": {"messages": [{"role": "user", "content": LONG}, CHAT[1]], "prompt": LONG},
    "the rendered row": {"instruction": LONG, "output": "yes", "text": f"Q: {LONG} A: yes"},
}


@pytest.mark.parametrize("name", NOT_CONTENT)
def test_columns_without_content_are_only_listed(tmp_path, name):
    described = load(tmp_path, write(tmp_path, [NOT_CONTENT[name]] * 2)).describe()
    if name == "an id and a category":
        counts = ", ".join(f"{column} (2 rows have one)" for column in ("id", "category", "score", "url"))
        assert described["rows"] == f"messages: messages; not read: {counts}"
    assert described["rows"].split(":")[0] in ("messages", "alpaca")


def test_text_is_read_from_one_column_and_the_others_are_listed(tmp_path):
    task = load(tmp_path, write(tmp_path, [{"text": LONG * 40, "body": LONG}] * 3), "pretrain")
    assert task.describe()["rows"] == "read: text; not read: body (3 rows have one)"


def test_a_template_that_reads_a_key_takes_it(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write(tmp_path, [{"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "x"}]}])
    assert "reasoning_content" in report(tmp_path, path)
    values = json.loads((tmp_path / "recipe.yaml").read_text())
    values["tokenizer"]["chat_template"] = str(tmp_path / "t.jinja")
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    assert len(registry.load_task(loader.load_recipe(str(tmp_path / "recipe.yaml"), [])).train) == 1


HINTS = {
    "messages": ("sft", {"talks": CHAT, "images": []}, {}),
    "prompt and completion": ("sft", {"prompts": "a", "completions": "b"}, {}),
    "messages named wrongly": ("sft", {"messages": CHAT}, {"messages_column": "chats"}),
    "two answers": ("dpo", {"prompt": "p", "choosen": "a", "rejectd": "b"}, {}),
    "a question": ("dpo", {"prompts": "p", "choosen": "a", "rejectd": "b"}, {}),
    "label": ("classify", {"texts": "a", "labels": "x"}, {"labels": ["x", "y"]}),
    "anchor": ("embed", {"anchors": "a", "positives": "b"}, {}),
    "text": ("pretrain", {"texts": LONG * 40}, {}),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_true_when_it_is_followed(tmp_path, name):
    task, row, data = HINTS[name]
    rows = [{key: f"{value}{n}" if key == "anchors" else value for key, value in row.items()} for n in range(3)]
    text = report(tmp_path, write(tmp_path, rows), task, **data)
    hint = re.search(r"did you mean (.*)\?", text)
    assert hint, text
    named = dict(setting.removeprefix("data.").split("=") for setting in hint[1].split())
    assert len(load(tmp_path, tmp_path / "a.jsonl", task, **{**data, **named}).train)


NO_HINTS = {
    "an image": ("sft", {"image": "a.png", "text": "b"}),
    "a sender": ("sft", {"from": "human", "value": "b"}),
    "one of two answers": ("dpo", {"prompt": "p", "reject": "b", "other": "c"}),
    "it would lose content": ("sft", {"prompts": "a", "completions": "b", "context": "c"}),
    "a list of numbers": ("sft", {"messages_ids": [1, 2]}),
}


@pytest.mark.parametrize("name", NO_HINTS)
def test_no_hint_names_a_column_of_another_type(tmp_path, name):
    task, row = NO_HINTS[name]
    text = report(tmp_path, write(tmp_path, [row] * 2), task)
    assert "did you mean" not in text and "name the columns with data." in text


def test_no_hint_for_one_row_renames_the_others(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}] * 3 + [{"prompt": "a", "completions": "b"}]
    text = report(tmp_path, write(tmp_path, rows))
    assert text.startswith("T/a.jsonl:4: no column") and "=completions" not in text


def test_advice_for_a_file_of_one_object_is_true(tmp_path):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    whole = {"id": 1, "conversations": turns}
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=1))
    assert "between [ and ]" in report(tmp_path, tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps([whole]))
    assert len(load(tmp_path, tmp_path / "a.json").train) == 1


FOREIGN = {"input_ids": [1, 9999], "labels": [1, 9999]}  # an id that only another tokenizer has
BAD = {
    "an empty answer": ("sft", {"messages": CHAT}, {"messages": [CHAT[0], {**CHAT[1], "content": ""}]}, "is empty"),
    "invalid JSON": ("sft", {"messages": CHAT}, '{"messages": [', "invalid JSON at column 15"),
    "no object": ("sft", {"messages": CHAT}, "[1]", "is not a JSON object"),
    "an encoder that refuses": ("sft", {"messages": CHAT}, FOREIGN, "the tokenizer's ids end at"),
    "equal answers": ("dpo", PAIR, {**PAIR, "rejected": "good"}, "are the same"),
    "an unknown class": (
        "classify",
        {"text": "a", "label": "x"},
        {"text": "a", "label": "z"},
        "not one of the classes",
    ),
    "an empty anchor": ("embed", {"anchor": "a", "positive": "b"}, {"anchor": "", "positive": "c"}, "is empty"),
    "no text": ("pretrain", {"text": LONG * 40}, {"body": "x"}, "no column 'text'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_stop_or_are_dropped(tmp_path, name):
    """Dropping gives the tokens of a file without the bad rows, and a line for each."""
    task, good, bad, reason = BAD[name]
    data = {"labels": ["x", "y"]} if task == "classify" else {}
    good_rows = [{**good, "anchor": f"a{n}"} if "anchor" in good else good for n in range(4)]
    path = write(tmp_path, [*good_rows[:3], bad, bad, good_rows[3]])
    text = report(tmp_path, path, task, **data)
    assert text.startswith("T/a.jsonl: 2 of 6 rows cannot be used; correct or remove them, or set data.bad_rows=drop")
    assert reason in text
    task_of_good = load(tmp_path, path, task, **data, bad_rows="drop")
    described = task_of_good.describe()
    assert described["bad_rows"] == 2
    assert str(described["first_bad_rows"]).startswith(f"{path}:4: ") and reason in str(described["first_bad_rows"])
    write_bad_rows(task_of_good.bad_rows, tmp_path / "bad_rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"]) for line in lines] == [(str(path), 4), (str(path), 5)]
    assert all(reason in line["reason"] for line in lines)
    (tmp_path / "b").mkdir()
    clean = load(tmp_path, write(tmp_path / "b", good_rows), task, **data)
    assert clean.train.stream.tokens.tolist() == task_of_good.train.stream.tokens.tolist()
    assert clean.train.fingerprint != task_of_good.train.fingerprint and "bad_rows" not in clean.describe()
    assert report(tmp_path, path, task, **data) == text  # whatever the cache has


def test_all_rows_bad_is_an_error_in_any_case(tmp_path):
    path = write(tmp_path, [{"prompt": "a", "completion": ""}] * 3)
    for choice in ("stop", "drop"):
        text = report(tmp_path, path, bad_rows=choice)
        assert text.startswith("T/a.jsonl: 3 of 3 rows cannot be used\n") and "drop" not in text


def test_a_broken_file_is_not_dropped(tmp_path):
    path = write(tmp_path, ["text", "a", '"b'], "a.csv")
    with pytest.raises(DataError, match="a.csv:3: the row is not valid csv"):
        sources.find_source(str(path), selection=Selection(drop_bad_rows=True)).check()
    rows = ["text,id", "a,1", "b", "c,3"]
    kept = sources.find_source(str(write(tmp_path, rows, "b.csv")), selection=Selection(drop_bad_rows=True))
    assert list(kept.documents()) == ["a", "c"]


def test_many_bad_rows_end_the_encoding_early(tmp_path, monkeypatch):
    from samecurve.data import token_store

    monkeypatch.setattr(token_store, "_ENOUGH_BAD_ROWS", 4)
    monkeypatch.setattr(token_store, "_BATCH_CHARACTERS", 1)
    task = load(tmp_path, write(tmp_path, [{"messages": CHAT}]))
    rows = [{"messages": CHAT}, *[FOREIGN] * 9]
    source = find_conversations(str(write(tmp_path, rows)), None, ChatSchema())
    with pytest.raises(DataError, match="4 of the first 5 rows cannot be used"):
        load_corpus(source, chat_encoder.ChatEncoder(task.tokenizer, ChatSchema()), 0.0, tmp_path / "cache")


def test_nulls_of_arrow_are_not_trained(tmp_path):
    """Two tools with different arguments: Arrow gives each object the keys of both."""
    import pyarrow
    import pyarrow.parquet

    def row(key: str) -> dict:
        call = {"type": "function", "function": {"name": f"f_{key}", "arguments": {key: "v", "list": ["x"]}}}
        schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        tool = {"type": "function", "function": {"name": f"f_{key}", "parameters": schema}}
        turns = [CHAT[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}, CHAT[1]]
        return {"messages": turns, "tools": [tool]}

    rows = [row("town"), row("room")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        find_conversations(str(path), None, ChatSchema()) for path in (tmp_path / "a.parquet", write(tmp_path, rows))
    ]
    parquet, jsonl = ([*map(str, source.documents())] for source in found)
    assert parquet == jsonl and "null" not in "".join(parquet)
    # a null that the author of a jsonl file wrote stays
    rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["list"] = None
    source = find_conversations(str(write(tmp_path, rows)), None, ChatSchema())
    assert '"list": null' in str(next(source.documents()))


def test_the_header_has_a_line_for_the_columns(tmp_path):
    described = load(tmp_path, write(tmp_path, [{"messages": CHAT, "id": 1}] * 2)).describe()
    assert ("rows", "messages: messages; not read: id (2 rows have one)") in console._data(described)


@pytest.mark.parametrize(
    ("value", "read", "lost"),
    [
        ("2", "so it is 2.", False),  # an answer beside the solution that ends in it
        ("x", "the text", True),  # part of a word
        ("Berlin", "So it is Paris.", True),
    ],
)
def test_a_text_that_stands_in_another_is_not_lost(value, read, lost):
    columns = Columns()
    columns.add({"messages": read, "answer": value}, {"messages"})
    assert columns.unread["answer"].is_content("answer") is lost


def test_a_column_that_repeats_others_in_most_rows_is_not_lost():
    columns = Columns()
    for index in range(3):
        columns.add({"messages": "one two", "prompt": "one two" if index else "one  two"}, {"messages"})
    assert not columns.unread["prompt"].is_content("prompt")


def test_a_template_reads_keys_of_messages_alone(tmp_path):
    write(tmp_path, [{"messages": CHAT}])
    tokenizer = load(tmp_path, tmp_path / "a.jsonl").tokenizer
    tokenizer.chat_template = "{% if enable_thinking and role %}{{ m.thinking }}{{ m['name'] }}{% endif %}"
    encoder = ChatEncoder(tokenizer, ChatSchema())
    # transformers gives a message's reasoning by each of its names
    assert all(map(encoder.reads, ("thinking", "reasoning_content", "reasoning", "name")))
    assert not encoder.reads("enable_thinking") and not encoder.reads("role")


def test_json_columns_of_parquet_are_read_as_datasets_does(tmp_path):
    import datasets

    arguments = {"role": datasets.Value("string"), "arguments": datasets.Json()}
    rows = [{"turns": [{"role": "a", "arguments": {"x": 1}}, {"role": "b", "arguments": [1, "2"]}]}]
    made = datasets.Dataset.from_list(rows, features=datasets.Features({"turns": datasets.List(arguments)}))
    made.to_parquet(tmp_path / "a.parquet")
    assert [row for _, row in parquet_rows(tmp_path / "a.parquet")] == rows
