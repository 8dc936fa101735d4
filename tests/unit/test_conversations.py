"""Conversations from rows, and every way in which data cannot be used, through the function that a run calls."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest
from report_cases import check_message
from tiny_recipes import jsonl, make_recipe
from transformers import PreTrainedTokenizerFast

from samecurve.data import find, sources
from samecurve.data.batches import StepBatches
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.data.schemas.conversation import ChatSchema
from samecurve.data.selection import Selection
from samecurve.errors import DataError
from samecurve.specs.data_names import FUNCTIONS
from samecurve.tasks import registry

GOOD = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}


def read(path: Path | str, *ignored: str, **schema) -> list[conversation.Conversation]:
    source = find_conversations(str(path), None, ChatSchema(**schema), Selection(ignore_columns=ignored))
    source.check()
    return list(source.documents())


def test_two_formats_that_fit_are_an_error_until_a_key_decides(tmp_path):
    row = {**GOOD, "prompt": "p", "completion": "c"}
    path = jsonl(tmp_path / "a.jsonl", row)
    formats = r"messages \(messages\) and prompt-completion \(prompt, completion\); set data.format=messages or"
    with pytest.raises(DataError, match=formats):
        read(path)
    for ignored, schema in ((("prompt",), {"format": "messages"}), (("prompt",), {"messages": "messages"})):
        (found,) = read(path, *ignored, **schema)
        assert (found.messages, found.place) == (tuple(GOOD["messages"]), f"{path}:1")
    for schema in ({"format": "prompt-completion"}, {"prompt": "prompt"}):
        (found,) = read(path, "messages", **schema)
        assert [message["content"] for message in found.messages] == ["p", "c"]


LONG = {"messages": [*GOOD["messages"], {"role": "user", "content": string.ascii_letters * 2}, *GOOD["messages"][1:]]}


@pytest.mark.parametrize("packing", [True, False])
def test_a_conversation_that_is_too_long_is_named(tmp_path, packing):
    rows = [{"messages": [{"role": "user", "content": f"{n}"}, *GOOD["messages"][1:]]} for n in range(20)]
    path, data = jsonl(tmp_path / "a.jsonl", *rows, LONG, LONG), {"truncation": "error", "packing": packing}
    # whichever part the long one is in, with 6 or 7 rows of the other before it
    for held_out in (0.0, 0.3, 0.7):
        recipe = make_recipe(tmp_path, path, data={"path": str(path), "validation_fraction": held_out, **data})
        with pytest.raises(DataError) as caught:
            registry.load_task(recipe)
        check_message(str(caught.value), f"{path}:21", "64", "first of 2", "data.truncation", "right, left or drop")
    short = jsonl(tmp_path / "b.jsonl", *rows)
    sources = [{"path": str(short), "weight": 1.0}, {"path": str(path), "weight": 1.0}]
    with pytest.raises(DataError, match=r"a.jsonl:21: longer than .* of 22 documents"):
        registry.load_task(make_recipe(tmp_path, path, data={"path": None, "mixture": sources, **data}))
    with pytest.raises(DataError, match=r"a.jsonl:21: longer than"):
        evaluate = {"path": str(path), "every_steps": 1}
        registry.load_task(make_recipe(tmp_path, short, data={"path": str(short), **data}, evaluate=evaluate))
    dropped = registry.load_task(make_recipe(tmp_path, path, data={"path": str(path), **data, "truncation": "drop"}))
    assert dropped.describe()["train"]["dropped_documents"] == 2
    assert registry.load_task(make_recipe(tmp_path, short, data={"path": str(short), **data})).train.num_dropped == 0
    only = jsonl(tmp_path / "c.jsonl", LONG)
    with pytest.raises(DataError, match="1 of 1 documents dropped: longer than batch.sequence_length=64"):
        registry.load_task(make_recipe(tmp_path, only, data={"path": str(only), **data, "truncation": "drop"}))


# The last answer has a block of thoughts, as in Qwen 3, so that a conversation of two answers becomes two rows.
THINKS_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_conversation_of_several_rows(tmp_path):
    """Counts, the place of a row that is too long, the held-out part, and the rows of one process and of two."""
    turns = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "c"}] for n in range(24)]
    rows = [{"messages": turns[n] * (1 + n % 2)} for n in range(24)]
    (tmp_path / "thinks.jinja").write_text(THINKS_LAST)
    sections = {"tokenizer": {"vocabulary_size": 270, "chat_template": str(tmp_path / "thinks.jinja")}}
    sections |= {"batch": {"global_batch_size": 4, "sequence_length": 128}}

    def load(path: Path, **data):
        return registry.load_task(
            make_recipe(tmp_path, path, data={"path": str(path), "packing": False, **data}, **sections)
        )

    path = jsonl(tmp_path / "a.jsonl", *rows)
    described = load(path).describe()
    assert (described["split_conversations"], described["rows_of_split_conversations"]) == (12, 24)
    assert described["train"]["documents"] == 36
    task = load(path, validation_fraction=0.4)
    questions = [
        {task.tokenizer.decode(part[np.array([row])].inputs["input_ids"][0])[16:20] for row in range(len(part))}
        for part in (task.train, task.validation)
    ]
    assert all(questions) and not questions[0] & questions[1]
    batch = make_recipe(tmp_path, path, **sections).batch
    worlds = [[StepBatches(task.train, 0, batch, (rank, world), 4) for rank in range(world)] for world in (1, 2)]
    for step in range(4):
        one, two = (
            np.concatenate([micro.inputs["input_ids"].numpy() for rank in world for micro in rank.at(step)])
            for world in worlds
        )
        assert sorted(one.tolist()) == sorted(two.tolist())
    long = {"messages": [*turns[0], {"role": "user", "content": string.ascii_letters * 3}, turns[0][1]]}
    with pytest.raises(DataError, match="b.jsonl:25: longer than .* first of 1"):
        load(jsonl(tmp_path / "b.jsonl", *rows, long), truncation="error")


def test_a_row_is_what_it_says_and_not_where_it_stands(tmp_path):
    first, second = read(jsonl(tmp_path / "a.jsonl", GOOD, GOOD))
    assert str(first) == str(second) and first.place != second.place
    as_prompt = {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:]}
    assert str(read(jsonl(tmp_path / "b.jsonl", as_prompt))[0]) != str(first)  # another part of it may be trained


def test_parquet_and_json_rows_are_those_of_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    call = {"messages": [GOOD["messages"][0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]}
    expected = list(map(str, read(jsonl(tmp_path / "a.jsonl", GOOD, call))))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD, call]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([GOOD, call]))
    assert list(map(str, read(tmp_path / "a.parquet"))) == expected
    assert list(map(str, read(tmp_path / "a.json"))) == expected


def test_sharegpt_is_read(tmp_path):
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"role": "system", "content": "s"}, *GOOD["messages"]]
    row = {"conversations": [{"from": roles[turn["role"]], "value": turn["content"]} for turn in turns]}
    expected = str(conversation.conversation("here", {"messages": turns}, ChatSchema()))
    assert [str(found) for found in read(jsonl(tmp_path / "a.jsonl", row))] == [expected]
    assert [str(found) for found in read(jsonl(tmp_path / "b.jsonl", {"conversations": turns}))] == [expected]
    assert [str(found) for found in read(tmp_path / "a.jsonl", messages="conversations")] == [expected]


def test_arguments_of_tool_calls_are_objects(tmp_path):
    def calling(arguments: object) -> dict:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]}

    as_text, as_object = read(jsonl(tmp_path / "a.jsonl", calling('{"a": [1, "b"]}'), calling({"a": [1, "b"]})))
    assert as_text.messages == as_object.messages
    assert as_text.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1, "b"]}


@pytest.mark.parametrize("file", ["inspect.py", pytest.param("*.py", marks=pytest.mark.full)])
def test_functions_of_the_library(file, monkeypatch):
    files = tuple(path for path in sources.builtin_files() if path.match(file))
    monkeypatch.setattr(sources, "builtin_files", lambda: files)
    found = {c.messages[0]["content"]: c for c in read(FUNCTIONS)}
    assert 50 < len(found) < 200 if file == "inspect.py" else 3000 < len(found) < 12000
    prompt = next(text for text in found if text.startswith("def getcallargs("))
    body = found[prompt].messages[1]["content"]
    assert prompt.endswith('"""') and body.startswith("spec = getfullargspec(func)")
    namespace: dict = {"getfullargspec": None}
    exec(find.function(prompt, body), namespace)
    assert namespace["getcallargs"].__doc__.startswith("Get the mapping of arguments")


def test_a_trained_tokenizer_has_a_template_and_its_markers(tmp_path, capsys):
    recipe = make_recipe(tmp_path, jsonl(tmp_path / "a.jsonl", *[GOOD] * 3))
    task = registry.load_task(recipe)
    trained, tokenised = capsys.readouterr().out.splitlines()
    assert ": 6 texts, " in trained and ": 3 documents, " in tokenised  # each row has two turns
    assert task.tokenizer.eos_token == "<|im_end|>"
    assert task.special_tokens["eos_token_id"] == task.tokenizer.eos_token_id
    task.tokenizer.save_pretrained(tmp_path / "export")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    rendered = again.apply_chat_template(GOOD["messages"], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin_of_text|><|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    described = task.describe()["train"]
    assert (described["documents"], described["trained_tokens"]) == (3, 6)


def test_a_template_of_the_users_own(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    recipe = make_recipe(tmp_path, path, tokenizer={"chat_template": str(tmp_path / "t.jinja")})
    loaded = registry.load_task(recipe).tokenizer
    assert loaded.apply_chat_template(GOOD["messages"], tokenize=False) == "a b<|im_end|>c<|im_end|>"


def test_the_cache_is_found_again_and_not_with_other_marks(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *[GOOD] * 3)
    recipes = [make_recipe(tmp_path, path, data={"train_on": choice}) for choice in ("assistant", "all")]
    first, other = (registry.load_task(recipe).train.fingerprint for recipe in recipes)
    assert first != other
    monkeypatch.setattr(conversation.ConversationSource, "_rows", lambda self: pytest.fail("read again"))
    assert registry.load_task(recipes[0]).train.fingerprint == first


def text(*lines: str | bytes, name: str = "a.jsonl"):
    """A case's file: the lines as they are."""

    def write(folder: Path) -> Path:
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        (folder / name).write_bytes(b"".join(raw))
        return folder / name

    return write


def row(**values):
    """A good row, then this one."""
    return text(json.dumps(GOOD) + "\n", json.dumps(values) + "\n")


def turn(**message):
    return row(messages=[{"role": "user", "content": "a"}, message])


LINE = json.dumps(GOOD) + "\n"
HERE = "T/a.jsonl:2"
CASES = {
    # the file
    "empty file": (text(), {}, ("T/a.jsonl", "no rows", "each line of a jsonl file", "one conversation")),
    "blank lines": (text("\n\n"), {}, ("T/a.jsonl", "no rows")),
    "truncated array": (
        text("[" + LINE + "," + LINE, name="a.json"),
        {},
        ("T/a.json:3", "JSON at column 1", "truncated"),
    ),
    "deep JSON": (text(LINE, "[" * 100000 + "\n"), {}, (HERE, "JSON", "maximum recursion depth", "remove the line")),
    "a text file": (
        text("a", name="a.txt"),
        {},
        ("T/a.txt", "conversations", "jsonl, json, parquet, csv, tsv or arrow"),
    ),
    # columns
    "misspelt column": (
        text(json.dumps({"mesages": GOOD["messages"]}) + "\n"),
        {},
        ("T/a.jsonl:1", "'messages'", "'prompt'", "'completion'", "found: mesages", "data.messages_column=mesages"),
    ),
    "no column": (
        row(text="a"),
        {},
        (
            HERE,
            "'messages'",
            "'prompt'",
            "'completion'",
            "found: text",
            "add it, or remove the row",
            "data.bad_rows=drop",
        ),
    ),
    "half a pair": (
        text(json.dumps({"prompt": "a", "completions": "b"}) + "\n"),
        {},
        ("T/a.jsonl:1", "'completion'", "found: prompt, completions", "data.completion_column=completions"),
    ),
    "named column": (
        row(chat=[]),
        {"messages_column": "chats"},
        (
            "T/a.jsonl",
            "2 of 2 rows",
            "T/a.jsonl:1",
            "'chats'",
            "found: messages",
            "name the columns with",
            "data.messages_column",
        ),
    ),
    "csv": (
        text("question,completion\na,b\n", name="a.csv"),
        {},
        ("T/a.csv:2", "'prompt'", "found: question, completion", "data.messages_column", "data.prompt_column"),
    ),
    # types and texts
    "messages are text": (row(messages="a"), {}, (HERE, "'messages'", "'a'", "list of messages", '[{"role": "user"')),
    "no messages": (row(messages=[]), {}, (HERE, "'messages'", "[]", "list of messages")),
    "message is text": (row(messages=["a"]), {}, (HERE, "messages[0]", "'a'", '{"role": ..., "content": ...}')),
    "ShareGPT's other roles": (
        turn(**{"from": "bing", "value": "b"}),
        {},
        (HERE, "messages[1].role", "'bing'", "system, developer, user, assistant, tool"),
    ),
    "no role": (turn(content="b"), {}, (HERE, "messages[1]", "'role'", "found: 'content'", "add it")),
    "no content": (
        turn(role="assistant", text="b"),
        {},
        (HERE, "messages[1]", "'content'", "found: 'role', 'text'", "add it"),
    ),
    "content is null": (turn(role="assistant", content=None), {}, (HERE, "messages[1]", "'content'", "found: 'role'")),
    "content is a number": (
        turn(role="assistant", content=4),
        {},
        (HERE, "messages[1].content", "4", "text", "correct or remove the row"),
    ),
    "parts": (
        turn(role="assistant", content=[{"type": "text"}]),
        {},
        (HERE, "messages[1].content[0]", "has no text", '{"type": "text", "text": "..."}'),
    ),
    "an image": (
        turn(role="assistant", content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
        {},
        (HERE, "messages[1].content[1]", "'image_url'", "only text", "data.bad_rows=drop"),
    ),
    "a call that is no JSON": (
        turn(**{"from": "function_call", "value": "add(1)"}),
        {},
        (HERE, "messages[1].content", "'add(1)'", "no call as JSON", '{"name": ..., "arguments": {...}}'),
    ),
    "unknown role": (turn(role="bot", content="b"), {}, (HERE, "messages[1].role", "'bot'", "write 'assistant'")),
    "misspelt role": (
        turn(role="assistent", content="b"),
        {},
        (HERE, "messages[1].role", "'assistent'", "write 'assistant'"),
    ),
    "another role": (
        turn(role=7, content="b"),
        {},
        (HERE, "messages[1].role", "7", "system, developer, user, assistant, tool"),
    ),
    "empty answer": (
        turn(role="assistant", content=" \n"),
        {},
        (HERE, "messages[1].content", "empty", "fill or remove the row"),
    ),
    "half a character": (
        text(LINE, LINE.replace('"c"', '"c\\ud83d"')),
        {},
        (HERE, "messages[1].content", "lone surrogate", "'\\ud83d'", "character 1", "correct or remove the row"),
    ),
    "no assistant": (
        turn(role="user", content="b"),
        {},
        (HERE, "'messages'", "no assistant turn", "user, user", "remove the row", "data.train_on=all"),
    ),
    "completion asks": (
        row(prompt="a", completion=[{"role": "user", "content": "b"}]),
        {},
        (HERE, "'completion'", "no assistant turn", "roles: user"),
    ),
    "empty prompt": (row(prompt="", completion="b"), {}, (HERE, "prompt", "empty", "fill or remove the row")),
    "prompt is a number": (row(prompt=1, completion="b"), {}, (HERE, "prompt", "1", "text or a list of messages")),
    "tools": (row(**GOOD, tools="{"), {}, (HERE, "'tools'", "not JSON", "correct or remove it")),
    "tool calls": (
        turn(role="assistant", tool_calls={"name": "f"}),
        {},
        (HERE, "messages[1].tool_calls", "{'name': 'f'}", "not a list", "write"),
    ),
    "tool call is text": (
        turn(role="assistant", tool_calls=["f"]),
        {},
        (HERE, "messages[1].tool_calls[0]", "'f'", '{"name": ..., "arguments": ...}'),
    ),
    "arguments": (
        turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "a=1"}}]),
        {},
        (HERE, "messages[1].tool_calls[0].function.arguments", "'a=1'", "not JSON", '{"city": "Paris"}', "{} for none"),
    ),
    "arguments in a list": (
        turn(role="assistant", tool_calls=[{"name": "f", "arguments": "[1]"}]),
        {},
        (HERE, "messages[1].tool_calls[0].arguments", "'[1]'", "not an object", "{} for none"),
    ),
    "weight": (
        turn(role="assistant", content="b", weight=0.5),
        {},
        (HERE, "messages[1].weight", "0.5", "0 (not trained)", "1 (trained)"),
    ),
    "weight is a truth value": (
        turn(role="assistant", content="b", weight=True),
        {},
        (HERE, "messages[1].weight", "True", "0 (not trained)"),
    ),
    "weight of a question": (
        turn(role="user", content="b", weight=1),
        {},
        (HERE, "messages[1].weight", "1", "assistant turns alone", "'user'", "remove the weight", "train: true"),
    ),
    "no weight": (
        turn(role="assistant", content="b", weight=0),
        {},
        (HERE, "'messages'", "weight 0", "remove the row", "weight 1"),
    ),
    "weight where all is trained": (
        turn(role="assistant", content="b", weight=0),
        {"train_on": "all"},
        (HERE, "'messages'", "weight 0", "data.train_on=all", "set it to assistant", "remove the weight"),
    ),
    "weight of a prompt where all is trained": (
        row(prompt=[{"role": "user", "content": "a", "weight": 0}], completion="b"),
        {"train_on": "all"},
        (HERE, "'completion'", "weight 0", "data.train_on=all"),
    ),
    "weight in a prompt": (
        row(prompt=[{"role": "assistant", "content": "a", "weight": 1}, GOOD["messages"][0]], completion="b"),
        {},
        (HERE, "'prompt'", "weight 1", "remove the weight", "one column of messages"),
    ),
    "messages without a template": (
        text(LINE),
        {"chat": False},
        ("T/a.jsonl:1", "'messages'", "chat template", "data.chat=true"),
    ),
    # what is there is too little
    "few rows": (
        text(LINE),
        {"batch": 5},
        ("T/a.jsonl", "1 training rows", "batch.sequence_length=64", "batch.global_batch_size=5"),
    ),
    "nothing left": (
        text(*[LINE] * 4),
        {"length": 2},
        ("T/a.jsonl", "0 training rows", "batch.sequence_length=2", "batch.global_batch_size=1", "4 of 4 documents"),
    ),
    "nothing held out": (text(*[LINE] * 9), {"validation_fraction": 1e-9}, ("T/a.jsonl", "held out")),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_used_is_told_with_its_place_and_its_fix(tmp_path, name):
    write, options, row = CASES[name]
    data = {key: value for key, value in options.items() if key not in ("batch", "length")}
    batch = {"global_batch_size": options.get("batch", 1), "sequence_length": options.get("length", 64)}
    recipe = make_recipe(tmp_path, write(tmp_path), data=data, batch=batch)
    with pytest.raises(DataError) as caught:
        registry.load_task(recipe)
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)
    assert not list((tmp_path / "cache").glob("tokens/*")) or name in ("few rows", "nothing left", "nothing held out")


def test_the_first_problems_of_many_are_told_together(tmp_path):
    """One cause once, with the first row that has it."""
    bad, others = {"prompt": "a", "completion": ""}, [{"prompt": "a", "completion": number} for number in range(12)]
    with pytest.raises(DataError) as caught:
        read(jsonl(tmp_path / "a.jsonl", GOOD, *[bad] * 12))
    told = "completion is empty; fill or remove the row (and 11 more rows like it)"
    header = (
        "T/a.jsonl: 12 of 13 rows cannot be used; correct or remove them, or set data.bad_rows=drop to train without"
    )
    lines = str(caught.value).replace(str(tmp_path), "T").splitlines()
    assert lines == [f"{header} them", f"  T/a.jsonl:2: {told}"]
    with pytest.raises(DataError) as caught:
        read(jsonl(tmp_path / "a.jsonl", GOOD, *others, bad, bad))
    lines = str(caught.value).replace(str(tmp_path), "T").splitlines()
    assert (len(lines), lines[0], lines[-1]) == (12, lines[0], "  and 4 more")
    assert lines[0].startswith("T/a.jsonl: 14 of 15 rows cannot be used; ")


def save_tokenizer(folder: Path, **special: str) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    rust = Tokenizer(models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=rust, **special).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def test_a_tokenizer_without_a_template_or_an_end(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    for special, message in (({"eos_token": "</s>"}, "no chat template; use a"), ({}, "no eos_token; name one in")):
        chosen = {"path": save_tokenizer(tmp_path, **special), "vocabulary_size": None}
        with pytest.raises(DataError, match=message) as caught:
            registry.load_task(make_recipe(tmp_path, path, tokenizer=chosen))
        assert str(caught.value).startswith(chosen["path"])


def test_all_rows_are_looked_at_before_the_first_is_tokenised(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    chosen = {"path": save_tokenizer(tmp_path, eos_token="</s>"), "vocabulary_size": None}
    recipe = make_recipe(
        tmp_path,
        jsonl(tmp_path / "a.jsonl", GOOD, *[{"prompt": "a", "completion": ""}] * 2),
        tokenizer={**chosen, "chat_template": str(tmp_path / "t.jinja")},
    )
    with pytest.raises(DataError, match="2 of 3 rows cannot be used"):
        registry.load_task(recipe)


class Ranks:
    """Two ranks, of which this process is one. other: what the other one gives."""

    def __init__(self, rank: int, *other):
        self.is_main, self._other = rank == 0, iter(other)

    def broadcast(self, value):
        return value if self.is_main else next(self._other)

    def conclude(self, value, conclusion):
        values = [value, next(self._other)]
        return conclusion(values if self.is_main else values[::-1])


def test_what_rank_0_cannot_use_is_every_ranks_error(tmp_path, monkeypatch):
    recipe = make_recipe(tmp_path, text("no")(tmp_path))
    with pytest.raises(DataError, match="invalid JSON"):
        registry.load_on_all_ranks(recipe, Ranks(0))
    monkeypatch.setattr(registry, "load_task", lambda recipe: pytest.fail("read before rank 0 had"))
    with pytest.raises(DataError, match="told by rank 0"):
        registry.load_on_all_ranks(recipe, Ranks(1, DataError("told by rank 0")))


def test_ranks_that_read_other_data_are_told(tmp_path):
    recipe = make_recipe(tmp_path, jsonl(tmp_path / "a.jsonl", GOOD))
    fingerprint = registry.load_task(recipe).train.fingerprint
    assert registry.load_on_all_ranks(recipe, Ranks(0, [fingerprint, None])).train.fingerprint == fingerprint
    with pytest.raises(DataError, match="the data or the tokenizer of rank 1 differ from those of rank 0"):
        registry.load_on_all_ranks(recipe, Ranks(0, ["other", None]))
