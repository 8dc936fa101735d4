from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_cases import check_message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from samecurve.data import time_limit
from samecurve.data.chat_encoder import ChatEncoder, TextEncoder, end_tokens
from samecurve.data.encoder import encoded
from samecurve.data.row_checks import BadRow
from samecurve.data.schemas.conversation import ChatSchema, conversation
from samecurve.data.schemas.messages import REASONING
from samecurve.data.schemas.preference import PairEncoder, PairSchema, pair
from samecurve.data.tokenizer import CHAT_TEMPLATE
from samecurve.errors import ConfigurationError, DataError
from samecurve.export.config_files import write_generation_config
from samecurve.inference.generator import TextGenerator

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
UNMARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2 and Mistral have it: an answer begins right behind the question, and the prompt needs no more.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# As Qwen 3 has it: thoughts are left out of the turns before the last.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "43"},
    {"role": "assistant", "content": "done"},
]
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) }}{% endfor %}"
UNMARKED_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
# As Mistral has it.
INST_CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}" + CALLS + "{{ eos_token }}"
    "{% else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi  there 🙂"},
    {"role": "assistant", "content": "  héllo 🙂\n\n"},
    {"role": "user", "content": "\n2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def rust() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        ["assistant user system be brief hello there [INST] [/INST] 4\n\n x\n\t\t4"] * 3, trainer
    )
    return tokenizer


@pytest.fixture
def make(rust):
    def make(template: str | None = CHAT_TEMPLATE, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
        copy = Tokenizer.from_str(rust.to_str())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, bos_token=SPECIAL[0], eos_token=eos)
        tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL[2:]})
        tokenizer.chat_template = template
        return tokenizer

    return make


def encode(tokenizer, row: dict | list, **schema) -> tuple[list[int], list[bool]]:
    schema = ChatSchema(**schema)
    row = {"messages": row} if isinstance(row, list) else row
    encoder = (ChatEncoder if schema.chat else TextEncoder)(tokenizer, schema)
    (encoded,) = encoder.encode([conversation("here", row, schema)])
    return list(encoded.tokens), encoded.trained.tolist()


def trained_text(tokenizer, row: dict | list, **schema) -> list[str]:
    """The runs of trained tokens, decoded."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(*encode(tokenizer, row, **schema), strict=True):
        runs[-1].append(token) if trained else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_the_ids_are_those_of_transformers(make):
    for template in (CHAT_TEMPLATE, UNMARKED):
        tokenizer = make(template)
        assert encode(tokenizer, TURNS)[0] == tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]


def test_the_marks_are_those_of_transformers(make):
    tokenizer = make()
    expected = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    tokens, trained = encode(tokenizer, TURNS)
    assert (tokens, [int(mark) for mark in trained]) == (expected["input_ids"], expected["assistant_masks"])
    assert 0 < sum(trained) < len(trained)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED])
def test_every_answer_is_trained_with_its_end_and_nothing_else(make, template):
    assert trained_text(make(template), TURNS) == ["  héllo 🙂\n\n<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize("template", [MARKED_CALLS, UNMARKED_CALLS, INST_CALLS])
def test_tool_calls_are_trained_with_their_end_and_nothing_else(make, template):
    call = '<call>{"name": "f", "arguments": {"a": 1}}<|im_end|>'
    assert trained_text(make(template), CALLING) == [call, call, "done<|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED])
def test_a_turn_of_weight_0_is_not_trained(make, template):
    def weighted(*weights: int | None) -> list[dict]:
        given = iter(weights)
        return [turn | {"weight": next(given)} if turn["role"] == "assistant" else turn for turn in TURNS]

    assert trained_text(make(template), weighted(0, 1)) == ["4<|im_end|>"]
    assert trained_text(make(template), weighted(1, 0)) == ["  héllo 🙂\n\n<|im_end|>"]
    assert encode(make(template), weighted(1, None)) == encode(make(template), TURNS)
    row = {"prompt": TURNS[:2], "completion": [*weighted(0, 1)[2:]]}
    assert trained_text(make(template), row) == ["4<|im_end|>"]
    shown = "{% for m in messages %}{{ m | tojson }}{% endfor %}"  # the weight is no part of the conversation
    plain, with_weights = (ChatEncoder(make(shown), ChatSchema(train_on="all")) for _ in range(2))
    given = [conversation("here", {"messages": turns}, ChatSchema()) for turns in (TURNS, weighted(0, 1))]
    assert plain.rows(given[0])[0].text == with_weights.rows(given[1])[0].text


def test_a_turn_of_weight_0_where_thoughts_are_forgotten(make):
    """What stands before a weightless turn, and up to the next answer, is the same whatever follows."""
    marked = FORGETFUL.replace("{{ m['content'] if", "{% generation %}{{ m['content'] if").replace(
        "{{ '<|im_end|>\n' }}", "{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    turns = [*TURNS[:2], {"role": "assistant", "content": "think|one", "weight": 0}, *TURNS[3:]]
    for template in (FORGETFUL, marked):
        assert trained_text(make(template), turns)[-1] == "4<|im_end|>"
        assert "one" not in "".join(trained_text(make(template), turns))


def test_an_answer_that_begins_right_behind_the_question(make):
    tokenizer = make(INST, eos="<|end_of_text|>")
    assert trained_text(tokenizer, TURNS[1:]) == ["   héllo 🙂\n\n<|end_of_text|>", " 4<|end_of_text|>"]


# As Command A has it: the prompt for the next answer always stands at the end.
UNASKED = UNMARKED.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
# and the answer ends with two special tokens
UNASKED_RESPONSE = UNASKED.replace(
    "m['content'] +", "m['content'] + ('<|end_of_text|>' if m['role'] != 'user' else '') +"
)


@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
@pytest.mark.parametrize("template", [UNASKED, UNASKED_RESPONSE, UNASKED.replace("<|im_end|>", "<|end_of_text|>")])
@pytest.mark.parametrize("num_turns", [2, 4])
def test_an_unasked_prompt_is_not_trained(make, template, train_on, num_turns):
    turns = TURNS[1 : 1 + num_turns]
    row = {"prompt": turns[:-1], "completion": turns[-1:]} if train_on == "completion" else turns
    asked = template + "{% endif %}"
    asked = asked.replace("{{ '<|im_start|>assistant", "{% if add_generation_prompt %}{{ '<|im_start|>assistant")
    expected = trained_text(make(asked), row, train_on=train_on)
    assert expected[-1].rstrip("\n").endswith(("<|im_end|>", "<|end_of_text|>"))
    assert trained_text(make(template), row, train_on=train_on) == [
        *expected[:-1],
        expected[-1] if train_on == "assistant" else expected[-1].removesuffix("\n"),
    ]


def test_the_date_of_a_template(make):
    dated = "{{ strftime_now('%d %b %Y %H:%M') }}" + UNMARKED
    first, second, alike = (ChatEncoder(make(dated), ChatSchema(), f"2024-07-{day}") for day in (26, 27, 26))
    said = conversation("here", {"messages": TURNS[1:3]}, ChatSchema())
    assert first.rows(said)[0].text.startswith("26 Jul 2024 00:00<|im_start|>")
    assert first.identity == alike.identity != second.identity
    undated = [ChatEncoder(make(UNMARKED), ChatSchema(), day).identity for day in ("2024-07-26", None)]
    assert undated[0] == undated[1]
    today = ChatEncoder(make(dated), ChatSchema()).rows(said)[0].text
    assert today.startswith(datetime.now().strftime("%d %b %Y"))


def test_an_end_of_turn_behind_the_mark_is_trained_too(make):
    end, mark = "{{- '<|im_end|>' }}", "{%- endgeneration %}"
    template = CHAT_TEMPLATE.replace(f"{end}\n{mark}", f"{mark}\n{end}")
    assert template != CHAT_TEMPLATE
    assert trained_text(make(template), TURNS[-2:]) == ["4<|im_end|>"]


def test_chatml_writes_tools_and_trains_calls(make):
    """Of LLaMA-Factory's roles: a call by the model, and what the function returned."""
    turns = [("system", "be brief"), ("human", "add 1"), ("function_call", '{"name": "add", "arguments": {"a": 1}}')]
    turns += [("observation", "2"), ("gpt", "2")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    row["tools"] = json.dumps([{"name": "add", "parameters": {"type": "object"}}])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained_text(make(), row, messages="conversations") == [call, "2<|im_end|>"]
    text = make().decode(encode(make(), row, messages="conversations")[0])
    assert text.count("<|im_start|>system") == 1 and "be brief\n\nFunctions" in text and '"name": "add"' in text


def test_all_turns_by_option(make):
    tokens, trained = encode(make(), TURNS, train_on="all")
    assert all(trained) and tokens == encode(make(), TURNS)[0]
    assert sum(encode(make(), TURNS[:2], train_on="all")[1]) > 10  # no answer is needed then


def test_prompt_and_completion_as_text_are_turns(make):
    row = {"prompt": "a", "completion": "b"}
    as_messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert encode(make(), row) == encode(make(), as_messages)
    assert encode(make(), {"question": "a", "answer": "b"}, prompt="question", completion="answer") == encode(
        make(), row
    )


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED])
def test_answers_inside_a_prompt_are_not_trained(make, template):
    row = {"prompt": TURNS[:4], "completion": TURNS[4:]}
    assert trained_text(make(template), row) == ["4<|im_end|>"]
    assert encode(make(template), row)[0] == encode(make(template), TURNS)[0]


def test_text_without_a_template(make):
    row, tokenizer = {"prompt": "a <|im_end|>", "completion": " b"}, make(None)
    tokens, trained = encode(tokenizer, row, chat=False)
    assert tokenizer.decode(tokens) == "<|begin_of_text|>a <|im_end|> b<|im_end|>"
    assert tokens.count(tokenizer.eos_token_id) == 1  # the prompt's own is text
    assert tokenizer.decode([t for t, mark in zip(tokens, trained, strict=True) if mark]) == " b<|im_end|>"
    assert encode(tokenizer, row, chat=False, train_on="all")[1] == [False] + [True] * (len(tokens) - 1)


def test_empty_keys_that_arrow_adds_are_not_seen_by_the_template(make):
    padded = [{**turn, "tool_calls": None, "name": None} for turn in TURNS]
    assert encode(make(), padded) == encode(make(), TURNS)


@pytest.mark.parametrize("key", ["tool_calls", *REASONING])
def test_empty_keys_of_an_answer_are_not_seen_by_the_template(make, key):
    """DeepSeek V3.1's template writes calls where `tool_calls` is defined, and no content beside them."""
    shown = "{{ '' if m.KEY is defined else m.content }}".replace("KEY", key)
    template = UNMARKED.replace(" + m['content'] + '<|im_end|>", "}}" + shown + "{{ '<|im_end|>")
    empty = [{**turn, key: [] if key == "tool_calls" else " "} for turn in TURNS]
    assert encode(make(template), empty) == encode(make(template), TURNS)
    with pytest.raises(DataError, match=r"'?messages.1..content is empty"):
        encode(make(template), [TURNS[1], {"role": "assistant", "content": "", "tool_calls": []}])


def test_of_two_reasonings_the_blank_one_is_not_seen(make):
    reads = UNMARKED.replace("{% endfor", "{{ m.reasoning_content or '' }}{% endfor")
    blank = [{**turn, "reasoning_content": "", "reasoning": "why"} for turn in ASK]
    assert encode(make(reads), blank) == encode(make(reads), [{**turn, "reasoning": "why"} for turn in ASK])


def test_what_is_trained_but_never_asked_for_is_counted(make):
    encoder = ChatEncoder(make(), ChatSchema())
    odd = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "\t\t4"}]  # "\n\t" is one token
    encoder.encode([conversation("here", {"messages": messages}, ChatSchema()) for messages in (TURNS, odd)])
    counts = {name: count for name, count in encoder.counts.items() if count}
    assert counts == {"answers_begun_inside_a_token": 1, "messages_with_special_tokens": 1}
    assert trained_text(make(), odd) == ["\n\t\t4<|im_end|>"]  # as transformers marks it, and no token less


def test_offsets_are_not_trimmed(make):
    """GPT-2's and Llama 3's post-processors leave spaces out of a token's offsets."""
    tokenizer = make(None)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trained_text(tokenizer, {"prompt": "a", "completion": "b "}, chat=False) == ["b <|im_end|>"]


def test_identity_holds_whatever_changes_tokens_or_marks(make):
    encoders = [ChatEncoder(make(), ChatSchema()), ChatEncoder(make(), ChatSchema(train_on="all"))]
    encoders += [ChatEncoder(make(UNMARKED), ChatSchema()), ChatEncoder(make(eos="<|end_of_text|>"), ChatSchema())]
    encoders += [
        TextEncoder(make(), ChatSchema(chat=False)),
        TextEncoder(make(), ChatSchema(chat=False, train_on="all")),
    ]
    assert len({encoder.identity for encoder in encoders}) == 6
    assert ChatEncoder(make(), ChatSchema()).identity == encoders[0].identity


TOOL_CALL = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
STRICT = "{{ raise_exception('roles must alternate') }}"
HEADLESS = UNMARKED.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "")
HEADLESS_CALLS = UNMARKED_CALLS.partition("{% if add_generation")[0]
ERRORS = [
    (
        UNASKED.replace("'<|im_end|>", "('<|end_of_text|>' if loop.last else '') + '"),
        TURNS[1:3],
        ("here", "question and an answer alike", "the prompt for the next", "tokenizer.chat_template", "chatml"),
    ),
    (
        HEADLESS_CALLS,
        CALLING,
        (
            "here",
            "message 1",
            "no generation prompt",
            "'<|im_start|>assistant",
            "tokenizer.chat_template",
            "chatml",
        ),
    ),
    (
        None,
        TURNS,
        (
            "the tokenizer",
            "no chat template",
            "chat model's tokenizer",
            "tokenizer.chat_template",
            "chatml",
            "data.chat=false",
        ),
    ),
    (
        STRICT,
        TURNS,
        ("here", "cannot render", "roles must alternate", "correct or remove the row", "tokenizer.chat_template"),
    ),
    (
        UNMARKED_CALLS.replace("{{ '<call>'", "{{ '' if m.content else '<call>'"),
        [CALLING[0], {**CALLING[1], "content": "I look."}],
        ("here", "message 1", "leaves out the call of 'f'", "remove the text", "tokenizer.chat_template", "chatml"),
    ),
    (HEADLESS, TURNS, ("here", "message 2", "no generation prompt", "'<|im_start|>assistant'", "chatml")),
    (
        "{{ messages[-1]['content'] }}",
        TURNS[1:],
        ("here", "message 1", "differently", "tokenizer.chat_template", "chatml"),
    ),
    (
        "{% for m in messages if m.role != 'system' %}{{ m['content'] + '<|im_end|>' }}{% endfor %}",
        TURNS,
        ("here", "leaves out messages of the role 'system'", "first user turn", "tokenizer.chat_template", "chatml"),
    ),
    (
        "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}",
        TURNS,
        (
            "here",
            "no special token",
            "'  héllo 🙂\\n\\n\\n'",
            "never learn to stop",
            "tokenizer.chat_template",
            "none begins the next turn",
            "chatml",
        ),
    ),
    (
        "{% generation %}{% endgeneration %}x",
        TURNS[1:],
        ("here", "marks no text", "no token would be trained", "chatml"),
    ),
    (UNMARKED, TOOL_CALL, ("here", "tool_calls", "does not render", "tokenizer.chat_template")),
    (  # as DeepSeek R1's, which otherwise writes an empty answer
        UNMARKED_CALLS.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])"),
        TOOL_CALL,
        ("here", "tool_calls", "does not render", "tokenizer.chat_template"),
    ),
    (  # as gpt-oss's
        UNMARKED_CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        [CALLING[0], {"role": "assistant", "tool_calls": [CALL, CALL]}],
        ("here", "2 calls of tools", "renders one only", "turns of their own", "chatml"),
    ),
    (  # as Idefics 3's
        UNMARKED.replace("m['content']", "(m['content'] if m['content'] is not string else '')"),
        TURNS[1:],
        ("here", "leaves out contents that are texts", "lists of parts", "tokenizer.chat_template"),
    ),
    (
        "{{ messages[0].role[:0] }}" + UNMARKED,
        TURNS[2:],
        ("here", "message 0", "begins with an answer", '"weight": 0'),
    ),
    (
        UNMARKED,
        {"messages": TURNS, "tools": json.dumps([{"name": "f"}])},
        ("here", "tools", "does not render", "tokenizer.chat_template"),
    ),
]


def test_texts_that_the_template_leaves_out_are_an_error_whatever_is_trained(make):
    template = UNMARKED.replace("m['content']", "(m['content'] if m['content'] is not string else '')")
    with pytest.raises(DataError, match="here: the chat template leaves out contents that are texts"):
        encode(make(template), TURNS[1:], train_on="all")


@pytest.mark.parametrize(("template", "row", "told"), ERRORS)
def test_what_cannot_be_marked_exactly_is_an_error(make, template, row, told):
    with pytest.raises(DataError) as caught:
        encode(make(template), row)
    check_message(str(caught.value), *told)


ASK = [turn for turn in TURNS if turn["role"] != "system"]
THINKING = [ASK[0], {"role": "assistant", "content": "think|one"}, *ASK[2:]]
_TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# In the manner of Phi 3: the end of text stands at the end of the conversation, behind the turn's own end.
CLOSED = (
    _TURN
    + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    + _ASKED.replace("{% endif", "{% else %}{{ eos_token }}{% endif")
)
# Metharme: and the turns have no end of their own.
ONLY_CLOSED = CLOSED.replace("<|im_end|>\n", "")
# gpt-oss: the last answer ends with another token than those before it.
OTHER_END = (
    _TURN
    + "{{ m.content + ('<|end_of_text|>' if loop.last and m.role == 'assistant' else '<|im_end|>') }}{% endfor %}"
    + _ASKED
)
# Qwen 3: the last answer has a block of thoughts, which may be empty. preserve_thinking keeps it in the others.
THINKS = (
    _TURN
    + "{% if m.role == 'assistant' and (loop.last or preserve_thinking) %}{{ '<think>' + (m.reasoning_content or '') + "
    "'</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _ASKED
)
# Nemotron 3: the generation prompt begins thoughts, and an answer without any closes them at once.
UNLIKE = UNMARKED.replace(
    "+ m['content'] +", "+ ('<think></think>' if m.role == 'assistant' else '') + m['content'] +"
).replace("assistant\n' }}", "assistant\n<think>\n' }}")
# GLM 4: a turn ends where the next one begins.
NEXT_ROLE = (
    "{% set begin = {'user': '<|im_start|>', 'assistant': '<|begin_of_text|>', 'tool': '<|im_end|>'} %}"
    "{% for m in messages %}{{ begin[m.role] + '\n' + m.content }}"
    + CALLS
    + "{% endfor %}{% if add_generation_prompt %}{{ begin['assistant'] }}{% endif %}"
)
# Mistral 3: the system prompt is in the last question, and gone as soon as its answer follows.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + (messages[0].content + '\n' if loop.last and "
    "messages[0].role == 'system' else '') + m.content + '<|im_end|>' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# template, conversation, trained texts of each row, and of how many messages it is the text
ROWS = {
    "reasoning is dropped": (FORGETFUL, THINKING, {2: ["think|one<|im_end|>"], 4: ["4<|im_end|>"]}),
    "an empty block of thoughts": (
        *(THINKS, ASK),
        {2: ["<think></think>  héllo 🙂\n\n<|im_end|>"], 4: ["<think></think>4<|im_end|>"]},
    ),
    "no trained turn reads differently": (
        *(FORGETFUL, [{**turn, **({"weight": 0} if turn["content"] == "think|one" else {})} for turn in THINKING]),
        {4: ["4<|im_end|>"]},
    ),
    "three turns in two rows": (
        *(FORGETFUL, [*ASK, ASK[0], {"role": "assistant", "content": "t|a"}, ASK[2], ASK[3]]),
        {6: ["t|a<|im_end|>"], 8: ["  héllo 🙂\n\n<|im_end|>", "4<|im_end|>", "4<|im_end|>"]},
    ),
    "the last turn is a question": (
        *(FORGETFUL, [*ASK, ASK[0]]),
        {5: ["  héllo 🙂\n\n<|im_end|>", "4<|im_end|>"]},
    ),
    "a closing token": (CLOSED, ASK, {4: ["  héllo 🙂\n\n<|im_end|>", "4<|im_end|>\n<|end_of_text|>"]}),
    "only a closing token": (ONLY_CLOSED, ASK, {2: ["  héllo 🙂\n\n<|end_of_text|>"], 4: ["4<|end_of_text|>"]}),
    "another end": (OTHER_END, ASK, {2: ["  héllo 🙂\n\n<|end_of_text|>"], 4: ["4<|end_of_text|>"]}),
    "unlike the prompt": (
        *(UNLIKE, ASK),
        {4: ["<think></think>  héllo 🙂\n\n<|im_end|>", "<think></think>4<|im_end|>"]},
    ),
}


def rendered(tokenizer, turns: list[dict], **schema) -> list[tuple[str, list[str]]]:
    """Each row's text, and its trained texts."""
    encoder = ChatEncoder(tokenizer, ChatSchema(**schema))
    document = conversation("here", {"messages": turns}, ChatSchema())
    (first,) = encoder.encode([document])
    rows = encoder.rows(document)
    assert [list(one.tokens) for one in (first, *first.more)] == [
        tokenizer(row.text, add_special_tokens=False)["input_ids"] for row in rows
    ]
    return [(row.text, [row.text[start:end] for start, end in row.spans]) for row in rows]


@pytest.mark.parametrize("name", ROWS)
def test_each_answer_is_trained_once_as_inference_sees_it(make, name):
    template, turns, expected = ROWS[name]
    tokenizer = make(template, eos="<|end_of_text|>" if template in (CLOSED, ONLY_CLOSED) else "<|im_end|>")
    plain = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    texts = [tokenizer.apply_chat_template(plain[:count], tokenize=False) for count in expected]
    assert rendered(tokenizer, turns) == list(zip(texts, expected.values(), strict=True))


def test_the_next_turn_ends_an_answer(make):
    tokenizer = make(NEXT_ROLE, eos="<|end_of_text|>")
    assert rendered(tokenizer, ASK)[0][1] == ["\n  héllo 🙂\n\n<|im_start|>", "\n4<|im_start|>"]
    call = '\n<call>{"name": "f", "arguments": {"a": 1}}<|im_end|>'
    assert rendered(tokenizer, CALLING)[0][1] == [call, call, "\ndone<|im_start|>"]
    assert rendered(tokenizer, CALLING[:2])[0][1] == [call]
    names = ("<|end_of_text|>", "<|im_start|>", "<|im_end|>")
    assert end_tokens(tokenizer, None) == tokenizer.convert_tokens_to_ids(list(names))


def test_a_system_prompt_that_moves_is_where_inference_has_it(make):
    tokenizer = make(LATE_SYSTEM)
    first, second = rendered(tokenizer, TURNS)
    for (text, spans), count, answer in ((first, 2, "   héllo 🙂\n\n<|im_end|>"), (second, 4, " 4<|im_end|>")):
        prompt = tokenizer.apply_chat_template(TURNS[:count], tokenize=False, add_generation_prompt=True)
        assert "be brief" in prompt and (text, spans) == (prompt + answer, [answer])


def test_a_system_prompt_that_only_inference_has(make):
    """In the manner of Muse Glimmer, whose turns name their reader behind the generation prompt."""
    system = "{{ '<|im_start|>system\nhelp<|im_end|>\n' if add_generation_prompt and messages[0].role != 'system' }}"
    turn = UNMARKED.replace("m['role'] +", "m['role'] + (' to=user' if m['role'] == 'assistant' else '') +")
    tokenizer = make(system + turn.replace("assistant\n'", "assistant'"))
    prompt = tokenizer.apply_chat_template(ASK[:3], tokenize=False, add_generation_prompt=True)
    answers = [" to=user\n  héllo 🙂\n\n<|im_end|>", " to=user\n4<|im_end|>"]
    assert prompt.startswith("<|im_start|>system\nhelp") and answers[0] in prompt
    assert rendered(tokenizer, ASK) == [(prompt + answers[1] + "\n", answers)]


def test_calls_that_read_differently_once_others_follow(make):
    """In the manner of Apriel: ids of calls, and the end of a turn, are written only where another turn follows."""
    tokenizer = make(
        UNMARKED_CALLS.replace("(c.function | tojson)", "('' if loop_last else '1') + (c.function | tojson)")
        .replace("{% for m in messages %}", "{% for m in messages %}{% set loop_last = loop.last %}")
        .replace("{{ '<|im_end|>\n' }}", "{{ '' if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}")
    )
    call = '<call>{"name": "f", "arguments": {"a": 1}}'
    rows = rendered(tokenizer, [*CALLING[:3], CALLING[5]])
    assert [spans for _, spans in rows] == [[call + "<|im_end|>"], ["done<|im_end|>"]]
    assert call.replace("{", "1{", 1) + "<|im_end|>" in rows[1][0]


# As vLLM's for Llama 4: a line break before the prompt, and none before the turn.
SPACED = UNMARKED.replace("<|im_end|>\n' }}", "<|im_end|>' }}").replace(
    "{{ '<|im_start|>assistant", "{{ '\n<|im_start|>assistant"
)
# DeepSeek V3.2: behind a result of a tool the prompt and the turn share nothing but white space.
SHARED_SPACE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '\n\n</think>' + m.content }}"
    + CALLS
    + "{{ eos_token }}{% else %}"
    "{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}{{ '\n\n<think></think>' if add_generation_prompt }}"
)


@pytest.mark.parametrize(("template", "answer"), [(SPACED, "4<|im_end|>"), (SHARED_SPACE, "</think>4<|im_end|>")])
def test_a_reference_mark_in_an_earlier_turn(make, template, answer):
    """U+203B begins most footnotes in Japanese."""
    tokenizer = make(template)
    marked = [{**ASK[0], "content": "※ hi"}, *ASK[1:]]
    assert rendered(tokenizer, marked)[-1][1] == rendered(tokenizer, ASK)[-1][1]
    trained = [{**turn, "train": True} if turn["role"] == "user" else turn for turn in marked]
    assert rendered(make(UNMARKED), trained)[-1][1][-2:] == ["※ hi<|im_end|>", "\n2+2?<|im_end|>"]


@pytest.mark.parametrize(("template", "answer"), [(SPACED, "4<|im_end|>"), (SHARED_SPACE, "</think>4<|im_end|>")])
def test_white_space_between_the_prompt_and_the_turn(make, template, answer):
    tokenizer = make(template)
    text, spans = rendered(tokenizer, ASK)[-1]
    prompt = tokenizer.apply_chat_template(ASK[:3], tokenize=False, add_generation_prompt=True)
    assert spans[-1] == answer and text == prompt.removesuffix("<think></think>") + answer


@pytest.mark.parametrize("content", ["", "I look."])
def test_white_space_before_calls_is_another_one(make, content):
    """In the manner of vLLM's for DeepSeek V3.1."""
    opening = "(' ' if m.tool_calls else '  ' if m.role == 'assistant' else '') + '<|im_start|>' + "
    tokenizer = make(UNMARKED_CALLS.replace("'<|im_start|>' + ", opening).replace("<|im_end|>\n", "<|im_end|>"))
    text, spans = rendered(tokenizer, [CALLING[0], {**CALLING[1], "content": content}])[0]
    prompt = tokenizer.apply_chat_template(CALLING[:1], tokenize=False, add_generation_prompt=True)
    answer = content + '<call>{"name": "f", "arguments": {"a": 1}}<|im_end|>'
    assert (text, spans) == (prompt + answer, [answer])


def test_words_in_the_end_of_a_turn_are_trained(make):
    """In the manner of Kimi K3, whose tags are special tokens around a name."""
    tokenizer = make(UNMARKED.replace("<|im_end|>\n", "<|im_start|>answer<|im_end|>\n"))
    assert rendered(tokenizer, ASK)[0][1][-1] == "4<|im_start|>answer<|im_end|>"


def test_thoughts_before_a_call_are_where_inference_has_them(make):
    """In the manner of gpt-oss: the prompt has no channel, and a last answer drops the thoughts of the calls before."""
    thought = "('' if messages[-1].role == 'assistant' and not messages[-1].tool_calls else m.reasoning_content)"
    channel = f"('/call ' + {thought} if m.tool_calls else '/final ' if m.role == 'assistant' else ' ')"
    tokenizer = make(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + "
        + channel
        + " + m.content }}"
        + CALLS
        + "{{ '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    turns = [CALLING[0], {**CALLING[1], "content": "", "reasoning_content": "why"}, CALLING[2], CALLING[5]]
    ((text, spans),) = rendered(tokenizer, turns)
    prompt = tokenizer.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True)
    assert "why" in prompt and text == prompt + "/final done<|im_end|>"
    assert spans == ['/call why<call>{"name": "f", "arguments": {"a": 1}}<|im_end|>', "/final done<|im_end|>"]


def test_a_kept_conversation_is_one_row(make):
    with pytest.raises(DataError, match="message 1: data.reasoning=keep .* set data.reasoning=as_inference") as caught:
        rendered(make(THINKS), ASK, reasoning="keep")
    assert "data.chat_template_kwargs={preserve_thinking: true}" in str(caught.value)
    thinking = [{**turn, "thinking": "why"} if turn["role"] == "assistant" else turn for turn in ASK]
    ((text, spans),) = rendered(make(THINKS), thinking, reasoning="keep", template_kwargs={"preserve_thinking": True})
    assert text.count("<think>why</think>") == 2 and spans[1] == "<think>why</think>4<|im_end|>"
    ((text, spans),) = rendered(make(OTHER_END), ASK, reasoning="keep")
    assert spans == ["  héllo 🙂\n\n<|im_end|>", "4<|end_of_text|>"]


@pytest.mark.parametrize("name", REASONING)
def test_a_template_gets_reasoning_by_every_name_that_is_read(make, monkeypatch, name):
    """Whatever transformers adds: 5.17 adds nothing."""
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", lambda chat: chat, raising=False)
    for read in ("reasoning_content", "thinking"):
        reads = UNMARKED.replace("{% endfor", "{{ m." + read + " or '' }}{% endfor")
        ((text, _),) = rendered(make(reads), [{**turn, name: "why so"} for turn in ASK])
        assert text.count("why so") == len(ASK)


def test_of_two_reasonings_a_template_gets_the_one_that_transformers_gives_it(make):
    tokenizer = make(UNMARKED.replace("{% endfor", "{{ m.reasoning_content or '' }}{% endfor"))
    turns = [{**turn, "reasoning": "why", "thinking": "because"} for turn in ASK]
    ((text, _),) = rendered(tokenizer, turns)
    assert "because" in text and text.startswith(tokenizer.apply_chat_template(turns, tokenize=False))


def test_variables_of_the_template(make):
    template = (
        "{% if not brief is defined %}{% set brief = false %}{% endif %}{% if brief %}{{ 'brief' }}{% endif %}"
        + UNMARKED
    )
    row = {"messages": ASK, "chat_template_kwargs": {"brief": False}}
    encoders = [ChatEncoder(make(template), ChatSchema(template_kwargs=values)) for values in ({}, {"brief": True})]
    assert encoders[0].identity != encoders[1].identity
    texts = [encoders[1].rows(conversation("here", one, ChatSchema()))[0].text for one in ({"messages": ASK}, row)]
    assert [text.startswith("brief") for text in texts] == [True, False]
    recipe = SimpleNamespace(data=SimpleNamespace(chat_template_kwargs={"brief": True}))
    generator = TextGenerator(Path(), None, make(template), recipe, True, [])  # pyright: ignore[reportArgumentType]
    assert generator.render(ASK[:1]) == "brief<|im_start|>user\nhi  there 🙂<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigurationError, match="data.chat_template_kwargs: found 'breif', .* write 'brief'"):
        ChatEncoder(make(template), ChatSchema(template_kwargs={"breif": True}))
    with pytest.raises(DataError, match="here: 'chat_template_kwargs' has 'long', .* it reads brief"):
        encode(make(template), {**row, "chat_template_kwargs": {"long": True}})


def test_reasoning_that_the_template_leaves_out_is_counted(make):
    only_with_calls = "{% if m.tool_calls %}{{ m.reasoning_content }}{% endif %}"
    for template, count in ((UNMARKED.replace("{% endfor", only_with_calls + "{% endfor"), 2), (THINKS, 0)):
        encoder = ChatEncoder(make(template), ChatSchema())
        turns = [{**turn, "reasoning": "why so"} if turn["role"] == "assistant" else turn for turn in ASK]
        encoder.encode([conversation("here", {"messages": turns}, ChatSchema())])
        assert encoder.counts["answers_without_their_reasoning"] == count


@pytest.mark.parametrize("opening", ["<think>", "\n<think>\n", ""])
def test_reasoning_in_the_content_that_the_template_leaves_out_is_counted(make, opening):
    """As DeepSeek R1's template, whose generation prompt may write the opening."""
    turns = [{**turn} for turn in ASK]
    turns[1]["content"] = f"{opening}why so</think>4"
    for template, count in ((UNMARKED.replace("m['content']", "m['content'].split('</think>')[-1]"), 1), (UNMARKED, 0)):
        encoder = ChatEncoder(make(template), ChatSchema())
        encoder.encode([conversation("here", {"messages": turns}, ChatSchema())])
        assert encoder.counts["answers_without_their_reasoning"] == count


def test_text_left_out_beside_calls_is_counted(make):
    """As Llama 3.1's and 3.2's templates do."""
    turns = [CALLING[0], {**CALLING[1], "content": "I look."}, *CALLING[2:]]
    for template in (UNMARKED_CALLS, MARKED_CALLS):
        for kept, count in ((True, 0), (False, 1)):
            source = template if kept else template.replace("m['content']", "('' if m.tool_calls else m.content)")
            encoder = ChatEncoder(make(source), ChatSchema())
            encoder.encode([conversation("here", {"messages": turns}, ChatSchema())])
            assert encoder.counts["calls_without_their_text"] == count


def test_every_stop_id_of_the_start_model_stays(make, tmp_path):
    """gpt-oss has three: the ends of an answer, of a text and of a call."""
    tokenizer = make(OTHER_END, eos="<|end_of_text|>")
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end_of_text|>", "<|im_start|>"])
    write_generation_config(GenerationConfig(eos_token_id=ids), tokenizer, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == ids


@pytest.mark.parametrize("unknown", ["", "{{ raise_exception('no') }}"])
def test_a_developer_is_the_system_where_a_template_knows_no_other(make, unknown):
    def knowing(*roles: str) -> str:
        known = UNMARKED.replace("{{ '<|im_start|>'", "{% if m.role in ROLES %}{{ '<|im_start|>'", 1)
        return known.replace("ROLES", str(roles)).replace(
            "{% endfor", "{% else %}" + unknown + "{% endif %}{% endfor", 1
        )

    developer = [{**TURNS[0], "role": "developer"}, *TURNS[1:]]
    encoder = ChatEncoder(make(knowing("system", "user", "assistant")), ChatSchema())
    one, other = (conversation("here", {"messages": turns}, ChatSchema()) for turns in (TURNS, developer))
    assert encoder.rows(one) == encoder.rows(other) and encoder.counts["developer_messages_as_system"] == 1
    assert rendered(make(UNMARKED), developer)[0][0].startswith("<|im_start|>developer")
    with pytest.raises(
        DataError, match="cannot render .* no" if unknown else "leaves out messages of the role 'developer'"
    ):
        rendered(make(knowing("user", "assistant")), developer)


def test_a_pair_has_one_prompt(make):
    answers = {"chosen": ASK[1:], "rejected": [{"role": "assistant", "content": "no"}]}
    for train_on, prompt in (("assistant", ASK[:1]), ("completion", ASK[:1]), ("assistant", ASK[:3])):
        row = {"prompt": prompt, **answers, **({"chosen": ASK[3:]} if len(prompt) > 1 else {})}
        encoder = PairEncoder(make(THINKS), PairSchema(), train_on)
        if train_on == "assistant" and len(prompt) == 1:
            with pytest.raises(DataError, match="here: .* they are compared or scored as one text; set data.train_on="):
                encoder.encode([pair("here", row, PairSchema())])
        else:
            (encoded,) = encoder.encode([pair("here", row, PairSchema())])
            assert not encoded.more


def test_text_behind_the_end_of_an_answer_is_not_trained(make):
    with pytest.raises(DataError, match="message 1: the chat template writes 'Answer now.' behind this turn"):
        rendered(make(CLOSED.replace("eos_token", "'<|im_start|>Answer now.'")), ASK)
    # a special token of the answer itself, which the template writes in another way
    spaced = make(UNMARKED.replace("m['content']", "m['content'] | replace('!', ' !')"))
    answer = {"role": "assistant", "content": "<|begin_of_text|>a!"}
    assert rendered(spaced, [ASK[0], answer])[0][1] == ["<|begin_of_text|>a !<|im_end|>"]


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr("samecurve.data.encoder._WORTH_BYTES", 0)
    monkeypatch.setattr("samecurve.data.encoder.num_cores", lambda: 2)


def encoded_in_batches(tokenizer) -> tuple[list, dict[str, int]]:
    """43 conversations in batches of 5, every second of two turns, with what was counted."""
    turns = [[("user", f"what is {n}?"), ("assistant", f"a| {n} {SPECIAL[0]}")] * (1 + n % 2) for n in range(43)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    documents = [conversation(f"row {number}", row, ChatSchema()) for number, row in enumerate(rows)]
    encoder = ChatEncoder(tokenizer, ChatSchema())
    found = list(encoded(encoder, [documents[at : at + 5] for at in range(0, 43, 5)], 1 << 30))
    assert [document for part, _ in found for document in part] == documents
    rows = [row for _, part in found for one in part for row in (one, *one.more)]
    return [([*row.tokens], [*row.trained]) for row in rows], encoder.counts


def test_processes_that_share_the_work_find_what_one_finds(make, two_processes, monkeypatch):
    shared = encoded_in_batches(make(FORGETFUL))
    monkeypatch.setattr("samecurve.data.encoder.num_cores", lambda: 1)
    assert shared == encoded_in_batches(make(FORGETFUL))
    assert (len(shared[0]), shared[1]["split_conversations"], shared[1]["rows_of_split_conversations"]) == (64, 21, 42)
    assert shared[1]["messages_with_special_tokens"] == 64


def test_what_a_process_cannot_render_is_told_by_its_place(make, two_processes):
    template = "{% if 'what is 23?' in messages[1].content or messages[0].role == 'developer' %}"
    encoder = ChatEncoder(make(template + "{{ raise_exception('no') }}{% endif %}" + UNMARKED), ChatSchema())
    row = [{"role": "developer", "content": "d"}, {"role": "user"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": [row[0], {**row[1], "content": f"what is {n}?"}, row[2]]} for n in range(43)]
    documents = [conversation(f"row {n}", row, ChatSchema()) for n, row in enumerate(rows)]
    batches = encoded(encoder, [documents[:20], documents[20:]], 1 << 30)
    found = [one for _, part in batches for one in part]
    (bad,) = (one for one in found if isinstance(one, BadRow))
    assert found.index(bad) == 23 and str(bad).startswith("row 23: the chat template cannot render")
    assert encoder.counts["developer_messages_as_system"] == 42


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = i %}{% endfor %}{% endfor %}"


def test_a_pause_is_no_endless_loop():
    """docker pause, a suspended job, Ctrl-Z: the clock goes on, and the template did not get the time."""
    code = """
import time
from samecurve.data import time_limit
time_limit.RENDER_SECONDS = 2.0
with time_limit.render_limit():
    print("in", flush=True)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
print("done")
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "in\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    child.send_signal(signal.SIGCONT)
    assert child.communicate(timeout=60)[0] == "done\n"


def test_waiting_for_a_core_is_no_endless_loop(monkeypatch):
    """A loaded machine: seconds pass in which the template is not run."""
    monkeypatch.setattr(time_limit, "RENDER_SECONDS", 0.5)
    with time_limit.render_limit():
        for _ in range(20):
            time.sleep(0.1)


def test_a_template_without_an_end(make, monkeypatch):
    monkeypatch.setattr(time_limit, "RENDER_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(
        ConfigurationError, match="the chat template cannot render .* after 0.5 s of computing, as if it"
    ):
        ChatEncoder(make(ENDLESS), ChatSchema())
    assert time.monotonic() - began < 30
    results = []

    def in_a_thread():  # where no signal comes
        with pytest.raises(time_limit.RenderTimeout), time_limit.render_limit():
            while True:
                pass
        results.append("ended")

    thread = threading.Thread(target=in_a_thread, daemon=True)
    thread.start()
    thread.join(30)
    assert results == ["ended"] and not time_limit._deadlines
