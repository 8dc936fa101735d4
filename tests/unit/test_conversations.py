"""Conversations from rows, and every way in which data cannot be used, through the function that a run calls."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from samecurve.config.schema import Recipe
from samecurve.data import builtin
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.data.schemas.conversation import Schema
from samecurve.errors import DataError
from samecurve.specs.data_names import FUNCTIONS
from samecurve.tasks import registry

GOOD = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}


def make_recipe(folder: Path, path: Path | str, **sections: dict) -> Recipe:
    values = {
        "task": "sft",
        "output_dir": "runs/x",
        "steps": 1,
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"vocabulary_size": 270},
        "data": {"path": str(path), "cache_dir": str(folder / "cache")},
        "batch": {"global_batch_size": 1, "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "evaluate": {},
    }
    changed = {key: {**values.get(key, {}), **section} for key, section in sections.items()}
    return Recipe.model_validate({**values, **changed})


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path | str, **schema) -> list[conversation.Conversation]:
    source = find_conversations(str(path), None, Schema(**schema))
    source.check()
    return list(source.documents())


def test_messages_win_over_prompt_and_completion_and_places_are_told(tmp_path):
    row = {**GOOD, "prompt": "p", "completion": "c"}
    (found,) = read(jsonl(tmp_path / "a.jsonl", row))
    assert (found.messages, found.place) == (tuple(GOOD["messages"]), f"{tmp_path}/a.jsonl:1")
    (found,) = read(tmp_path / "a.jsonl", prompt="prompt")
    assert [message["content"] for message in found.messages] == ["p", "c"]


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
    expected = str(conversation.conversation("here", {"messages": turns}, Schema()))
    assert [str(found) for found in read(jsonl(tmp_path / "a.jsonl", row))] == [expected]
    assert [str(found) for found in read(jsonl(tmp_path / "b.jsonl", {"conversations": turns}))] == [expected]
    assert [str(found) for found in read(tmp_path / "a.jsonl", messages="conversations")] == [expected]
    assert str(read(jsonl(tmp_path / "c.jsonl", {**row, **GOOD}))[0]) != expected  # messages win


def test_arguments_of_tool_calls_are_objects(tmp_path):
    def calling(arguments: object) -> dict:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]}

    as_text, as_object = read(jsonl(tmp_path / "a.jsonl", calling('{"a": [1, "b"]}'), calling({"a": [1, "b"]})))
    assert as_text.messages == as_object.messages
    assert as_text.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1, "b"]}


def test_functions_of_the_library():
    found = {c.messages[0]["content"]: c for c in read(FUNCTIONS)}
    assert 3000 < len(found) < 12000
    prompt = next(text for text in found if text.startswith("def getcallargs("))
    body = found[prompt].messages[1]["content"]
    assert prompt.endswith('"""') and body.startswith("spec = getfullargspec(func)")
    namespace: dict = {"getfullargspec": None}
    exec(builtin.function(prompt, body), namespace)
    assert namespace["getcallargs"].__doc__.startswith("Get the mapping of arguments")


def test_a_trained_tokenizer_has_a_template_and_its_markers(tmp_path, capsys):
    recipe = make_recipe(tmp_path, jsonl(tmp_path / "a.jsonl", *[GOOD] * 3))
    task = registry.load(recipe)
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
    loaded = registry.load(recipe).tokenizer
    assert loaded.apply_chat_template(GOOD["messages"], tokenize=False) == "a b<|im_end|>c<|im_end|>"


def test_the_cache_is_found_again_and_not_with_other_marks(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *[GOOD] * 3)
    recipes = [make_recipe(tmp_path, path, data={"train_on": choice}) for choice in ("assistant", "all")]
    first, other = (registry.load(recipe).train.fingerprint for recipe in recipes)
    assert first != other
    monkeypatch.setattr(conversation.ConversationSource, "_rows", lambda self: pytest.fail("read again"))
    assert registry.load(recipes[0]).train.fingerprint == first


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


def gz(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"x" * 10000)[:-9])
    return folder / "a.jsonl.gz"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


LINE = json.dumps(GOOD) + "\n"
HERE = "T/a.jsonl:2: "
CASES = {
    # the file
    "missing": (lambda folder: folder / "no.jsonl", {}, "T/no.jsonl: data.path does not exist; give a file, a folder"),
    "empty folder": (empty_folder, {}, "T/empty: no text or table file among the folder's 0 files; it is empty"),
    "empty file": (text(), {}, "T/a.jsonl: holds no row; each line of a jsonl file is one conversation"),
    "blank lines": (text("\n\n"), {}, "T/a.jsonl: holds no row"),
    "truncated": (
        text(LINE, LINE[:30]),
        {},
        HERE + "column 31: not JSON: Expecting property name enclosed in double quotes; is "
        "the end of the file cut off?",
    ),
    "truncated array": (
        text("[" + LINE + "," + LINE, name="a.json"),
        {},
        "T/a.json:3: column 1: not JSON: Expecting ',' delimiter; is the end of the file cut off?",
    ),
    "truncated gzip": (gz, {}, "T/a.jsonl.gz: could not be read: "),
    "bad UTF-8": (text(LINE, b'{"messages": "\xff"}\n'), {}, HERE + f"byte {len(LINE) + 14} (0xff) is not UTF-8"),
    "malformed JSON": (text(LINE, "{'messages': 1}\n", LINE), {}, HERE + "column 2: not JSON: Expecting property name"),
    "deep JSON": (text(LINE, "[" * 100000 + "\n"), {}, HERE + "not JSON that can be read: maximum recursion depth"),
    "not an object": (text(LINE, "[1]\n"), {}, HERE + '[1] is not a JSON object; write {"column": ...}, one per line'),
    "a text file": (
        text("a", name="a.txt"),
        {},
        "T/a.txt: conversations are the rows of a jsonl, json, parquet or csv",
    ),
    "bad parquet": (text("no", name="a.parquet"), {}, "T/a.parquet: after row 0: "),
    # columns
    "misspelt column": (
        row(mesages=[]),
        {},
        HERE + "no column 'messages', nor 'prompt' and 'completion', found: mesages; "
        "did you mean data.messages_column=mesages?",
    ),
    "no column": (
        row(text="a"),
        {},
        HERE + "no column 'messages', nor 'prompt' and 'completion', found: text; set "
        "data.messages_column, or data.prompt_column and data.completion_column",
    ),
    "half a pair": (
        row(prompt="a", completions="b"),
        {},
        HERE + "no column 'completion', found: prompt, completions; did you mean data.completion_column=completions?",
    ),
    "named column": (
        row(chat=[]),
        {"messages_column": "chats"},
        "T/a.jsonl: 2 rows cannot be used\n  T/a.jsonl:1: no column 'chats', found: messages; set",
    ),
    "csv": (
        text("question,completion\na,b\n", name="a.csv"),
        {},
        "T/a.csv:2: no column 'prompt', found: question, completion; set",
    ),
    # types and texts
    "messages are text": (row(messages="a"), {}, HERE + "'messages' is 'a', not a list of messages; write [{"),
    "no messages": (row(messages=[]), {}, HERE + "'messages' is [], not a list of messages"),
    "message is text": (row(messages=["a"]), {}, HERE + 'messages[0] is \'a\', not {"role": ..., "content": ...}'),
    "ShareGPT's other roles": (
        turn(**{"from": "bing", "value": "b"}),
        {},
        HERE + "messages[1].role is 'bing'; it is one of system, developer, user, assistant, tool",
    ),
    "no role": (turn(content="b"), {}, HERE + "messages[1] has no 'role', found: 'content'; add it"),
    "no content": (
        turn(role="assistant", text="b"),
        {},
        HERE + "messages[1] has no 'content', found: 'role', 'text'; add it",
    ),
    "content is null": (turn(role="assistant", content=None), {}, HERE + "messages[1] has no 'content', found: 'role'"),
    "content is a number": (
        turn(role="assistant", content=4),
        {},
        HERE + "messages[1].content is 4, not text; correct or",
    ),
    "parts": (
        turn(role="assistant", content=[{"type": "text"}]),
        {},
        HERE + "messages[1].content is a list of parts; only",
    ),
    "unknown role": (turn(role="gpt", content="b"), {}, HERE + "messages[1].role is 'gpt'; write 'assistant'"),
    "misspelt role": (
        turn(role="Assistant", content="b"),
        {},
        HERE + "messages[1].role is 'Assistant'; write 'assistant'",
    ),
    "another role": (
        turn(role=7, content="b"),
        {},
        HERE + "messages[1].role is 7; it is one of system, developer, user,",
    ),
    "empty answer": (
        turn(role="assistant", content=" \n"),
        {},
        HERE + "messages[1].content is empty; fill or remove the row",
    ),
    "half a character": (
        text(LINE, LINE.replace('"c"', '"c\\ud83d"')),
        {},
        HERE + "'messages[1].content' holds half a",
    ),
    "no assistant": (
        turn(role="user", content="b"),
        {},
        HERE + "'messages' has no assistant turn (roles: user, user), so "
        "nothing of it is trained; remove the row, or set data.train_on=all",
    ),
    "completion asks": (
        row(prompt="a", completion=[{"role": "user", "content": "b"}]),
        {},
        HERE + "'completion' has no assistant turn (roles: user)",
    ),
    "empty prompt": (row(prompt="", completion="b"), {}, HERE + "prompt is empty; fill or remove the row"),
    "prompt is a number": (row(prompt=1, completion="b"), {}, HERE + "prompt is 1, not text or a list of messages"),
    "tools": (row(**GOOD, tools="{"), {}, HERE + "'tools' is not JSON: Expecting property name"),
    "tool calls": (
        turn(role="assistant", tool_calls={"name": "f"}),
        {},
        HERE + "messages[1].tool_calls is {'name': 'f'}, not",
    ),
    "tool call is text": (
        turn(role="assistant", tool_calls=["f"]),
        {},
        HERE + 'messages[1].tool_calls[0] is \'f\', not {"name": ..., "arguments": ...}',
    ),
    "arguments": (
        turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "a=1"}}]),
        {},
        HERE + "messages[1].tool_calls[0].function.arguments is 'a=1', which is not JSON (Expecting value: line 1 "
        'column 1 (char 0)); write an object such as {"city": "Paris"}, {} for none',
    ),
    "arguments in a list": (
        turn(role="assistant", tool_calls=[{"name": "f", "arguments": "[1]"}]),
        {},
        HERE + "messages[1].tool_calls[0].arguments is '[1]', not an object; write {} for none",
    ),
    "weight": (
        turn(role="assistant", content="b", weight=0.5),
        {},
        HERE + "messages[1].weight is 0.5; it is 0 (not trained) or 1 (trained)",
    ),
    "weight is a truth value": (turn(role="assistant", content="b", weight=True), {}, HERE + "messages[1].weight is T"),
    "weight of a question": (
        turn(role="user", content="b", weight=1),
        {},
        HERE + "messages[1].weight is 1, but only assistant turns are trained, and this one's role is 'user'; remove",
    ),
    "no weight": (
        turn(role="assistant", content="b", weight=0),
        {},
        HERE + "'messages' has no assistant turn but with weight 0, so nothing of it is trained; remove the row, or",
    ),
    "weight where all is trained": (
        turn(role="assistant", content="b", weight=0),
        {"train_on": "all"},
        HERE + "'messages' has a turn of weight 0, but data.train_on=all trains all turns; set it to assistant, or",
    ),
    "weight of a prompt where all is trained": (
        row(prompt=[{"role": "user", "content": "a", "weight": 0}], completion="b"),
        {"train_on": "all"},
        HERE + "'completion' has a turn of weight 0, but data.train_on=all trains all turns",
    ),
    "weight in a prompt": (
        row(prompt=[{"role": "assistant", "content": "a", "weight": 1}, GOOD["messages"][0]], completion="b"),
        {},
        HERE + "'prompt' has a turn of weight 1, but a prompt is not trained; remove the weight, or give all as one",
    ),
    "messages without a template": (
        text(LINE),
        {"chat": False},
        "T/a.jsonl:1: 'messages': messages need a template; set",
    ),
    # what is there is too little
    "few rows": (
        text(LINE),
        {"batch": 5},
        "T/a.jsonl: 1 training rows of batch.sequence_length=64 are fewer than "
        "batch.global_batch_size=5; give more data, or lower one of the two",
    ),
    "nothing left": (
        text(*[LINE] * 4),
        {"length": 2},
        "T/a.jsonl: 0 training rows of batch.sequence_length=2 are fewer than batch.global_batch_size=1 (4 of 4 "
        "documents dropped: no trained token of them is within batch.sequence_length=2); raise it, or give",
    ),
    "nothing held out": (text(*[LINE] * 9), {"validation_fraction": 1e-9}, "T/a.jsonl: no document is held out"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_used_is_told_with_its_place_and_its_fix(tmp_path, name):
    write, options, message = CASES[name]
    data = {key: value for key, value in options.items() if key not in ("batch", "length")}
    batch = {"global_batch_size": options.get("batch", 1), "sequence_length": options.get("length", 64)}
    recipe = make_recipe(tmp_path, write(tmp_path), data=data, batch=batch)
    with pytest.raises(DataError) as caught:
        registry.load(recipe)
    assert str(caught.value).replace(str(tmp_path), "T").startswith(message)
    assert not list((tmp_path / "cache").glob("tokens/*")) or name in ("few rows", "nothing left", "nothing held out")


def test_the_first_problems_of_many_are_told_together(tmp_path):
    """One cause once, with the first row that has it."""
    bad, others = {"prompt": "a", "completion": ""}, [{"prompt": "a", "completion": number} for number in range(12)]
    with pytest.raises(DataError) as caught:
        read(jsonl(tmp_path / "a.jsonl", GOOD, *[bad] * 12))
    told = "completion is empty; fill or remove the row (and 11 more rows like it)"
    assert str(caught.value).replace(str(tmp_path), "T").splitlines() == [
        "T/a.jsonl: 12 rows cannot be used",
        f"  T/a.jsonl:2: {told}",
    ]
    with pytest.raises(DataError) as caught:
        read(jsonl(tmp_path / "a.jsonl", GOOD, *others, bad, bad))
    lines = str(caught.value).replace(str(tmp_path), "T").splitlines()
    assert (len(lines), lines[0], lines[-1]) == (12, "T/a.jsonl: 14 rows cannot be used", "  and 4 more")


def save_tokenizer(folder: Path, **special: str) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    rust = Tokenizer(models.WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=rust, **special).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def test_a_tokenizer_without_a_template_or_an_end(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD)
    for special, message in (({"eos_token": "</s>"}, "has no chat template; use a"), ({}, "no eos_token; name one in")):
        chosen = {"path": save_tokenizer(tmp_path, **special), "vocabulary_size": None}
        with pytest.raises(DataError, match=message) as caught:
            registry.load(make_recipe(tmp_path, path, tokenizer=chosen))
        assert str(caught.value).startswith(chosen["path"])


def test_all_rows_are_looked_at_before_the_first_is_tokenised(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    chosen = {"path": save_tokenizer(tmp_path, eos_token="</s>"), "vocabulary_size": None}
    recipe = make_recipe(
        tmp_path,
        jsonl(tmp_path / "a.jsonl", GOOD, *[{"prompt": "a", "completion": ""}] * 2),
        tokenizer={**chosen, "chat_template": str(tmp_path / "t.jinja")},
    )
    with pytest.raises(DataError, match="2 rows cannot be used"):
        registry.load(recipe)


class Ranks:
    """Two ranks, of which this process is one."""

    def __init__(self, rank: int, other: list):
        self.is_main, self._rank, self._other = rank == 0, rank, iter(other)

    def all_gather_object(self, value):
        values = [value, next(self._other)]
        return values if self.is_main else values[::-1]


def test_what_rank_0_cannot_use_is_every_ranks_error(tmp_path, monkeypatch):
    recipe = make_recipe(tmp_path, text("no")(tmp_path))
    with pytest.raises(DataError, match="not JSON"):
        registry.load_on_all_ranks(recipe, Ranks(0, [None]))
    monkeypatch.setattr(registry, "load", lambda recipe: pytest.fail("read before rank 0 had"))
    with pytest.raises(DataError, match="told by rank 0"):
        registry.load_on_all_ranks(recipe, Ranks(1, [DataError("told by rank 0")]))


def test_ranks_that_read_other_data_are_told(tmp_path):
    recipe = make_recipe(tmp_path, jsonl(tmp_path / "a.jsonl", GOOD))
    fingerprint = registry.load(recipe).train.fingerprint
    assert registry.load_on_all_ranks(recipe, Ranks(0, [None, [fingerprint, None]])).train.fingerprint == fingerprint
    with pytest.raises(DataError, match="the data or the tokenizer of rank 1 differ from those of rank 0"):
        registry.load_on_all_ranks(recipe, Ranks(0, [None, ["other", None]]))
