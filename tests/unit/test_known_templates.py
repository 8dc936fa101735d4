"""Variants of known chat templates: small templates in the manner of the families, and all of TRL's, as published.

The latter, with --full, against transformers' ids and the masks of TRL's own training templates.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from chat_templates import CHATML, tokenizer_of
from tiny_recipes import jsonl, make_recipe

from samecurve.data.chat_encoder import ChatEncoder
from samecurve.data.encoder import Encoded
from samecurve.data.known_templates import FAMILIES, variant
from samecurve.data.schemas.conversation import ChatSchema, conversation
from samecurve.errors import DataError
from samecurve.metrics.console import _data
from samecurve.tasks import registry

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
TRL = Path(os.environ.get("SAMECURVE_TRL", ""), "trl", "chat_templates")
SPECIAL = re.compile(
    r"<[|｜][^<>\s]*[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:sop|start_of_turn|end_of_turn|end_of_utterance)>|\[/?[A-Z_]+\]"
)
TAIL = r"{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
ASSISTANT = r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
THOUGHT = "{{- '<think>' + message.reasoning_content | default('') + '</think>' }}"
QWEN = (
    "{%- set ns = namespace(last_query_index=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last_query_index = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    r"{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' %}"
    f"{{%- if loop.index0 > ns.last_query_index %}}{THOUGHT}{{%- endif %}}{{%- endif %}}{TAIL}{ASSISTANT}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system_message = messages[0].content %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{%- for message in loop_messages %}{%- if message.role == 'user' %}"
    "{{- '[INST]' }}{%- if loop.last and system_message is defined %}{{- system_message + ' ' }}{%- endif %}"
    "{{- message.content + '[/INST]' }}"
    "{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"
)
COMMAND = (
    "{%- for message in messages %}<|START_OF_TURN_TOKEN|>{%- if message.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>{%- else %}<|USER_TOKEN|>{{ message.content }}{%- endif %}"
    "<|END_OF_TURN_TOKEN|>{%- endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
GEMMA = (
    "{%- for message in messages %}{%- set role = 'model' if message.role == 'assistant' else message.role %}"
    r"{{- '<|turn>' + role + '\n' }}{{- message.content + '<turn|>\n' }}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{{- '<|channel>thought\n<channel|>' -}}{%- endif %}"
)
SYSTEM, USER, TOOL = ({"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("tool", "3")))
TWO = [
    USER,
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b"},
]
THINKING = [turn | {"reasoning_content": "t"} if turn["role"] == "assistant" else turn for turn in TWO]


def encode(template: str, row: dict, special: str = "", **schema):
    """Returns the tokenizer, the encoder and the rows."""
    tokens = sorted({*SPECIAL.findall(template + special)})
    tokenizer = tokenizer_of(template, "<bos>", "<eos>", "<eos>", *tokens)
    encoder = ChatEncoder(tokenizer, ChatSchema(**schema))
    (encoded,) = encoder.encode([conversation("here", row, ChatSchema())])
    return tokenizer, encoder, [encoded, *encoded.more]


def trained(tokenizer, ids, marks) -> list[str]:
    """The runs of trained tokens, decoded, without line breaks at their ends."""
    runs: list[list[int]] = [[]]
    for token, mark in zip(ids, marks, strict=True):
        runs[-1].append(token) if mark else runs.append([])
    return [tokenizer.decode(run).rstrip("\n") for run in runs if run]


def shown(tokenizer, row: Encoded) -> str:
    text, trained_text = tokenizer.decode(row.tokens), trained(tokenizer, row.tokens, row.trained)
    return f"{text} -> {' '.join(trained_text)}"


Q, R = (
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
)
START, END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
ANSWER = f"{START}<|CHATBOT_TOKEN|><|START_RESPONSE|>"
COMMAND_TEXT = "".join(f"{START}<|USER_TOKEN|>{q}{END}{ANSWER}{a}<|END_RESPONSE|>{END}" for q, a in ("qa", "rb"))
CASES = {
    "mistral": (
        *(MISTRAL, [SYSTEM, *TWO], "as_inference"),
        ["[INST]s q[/INST]a<eos> -> a<eos>", "[INST]q[/INST]a<eos>[INST]s r[/INST]b<eos> -> b<eos>"],
    ),
    "command": (
        *(COMMAND, TWO, "as_inference"),
        [f"{COMMAND_TEXT} -> <|START_RESPONSE|>a<|END_RESPONSE|>{END} <|START_RESPONSE|>b<|END_RESPONSE|>{END}"],
    ),
    "gemma": (
        *(GEMMA, TWO[:2], "as_inference"),
        ["<|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\n<channel|>a<turn|>\n -> a<turn|>"],
    ),
    "qwen": (
        *(QWEN, THINKING, "keep"),
        [
            f"{Q}<think>t</think>a<|im_end|>\n{R}<think>t</think>b<|im_end|>\n -> "
            "<think>t</think>a<|im_end|> <think>t</think>b<|im_end|>"
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_variant(name):
    template, turns, reasoning, expected = CASES[name]
    tokenizer, encoder, rows = encode(template, {"messages": turns}, reasoning=reasoning)
    assert [shown(tokenizer, row) for row in rows] == expected
    assert encoder.facts["chat_template"].startswith("variant of ") and tokenizer.chat_template == template
    plain = ChatEncoder(tokenizer_of(template + "{{ '' }}", None, "<eos>", "<eos>"), ChatSchema(reasoning=reasoning))
    assert plain.identity != encoder.identity


def test_a_template_of_no_known_family_stays_as_it_is():
    _, encoder, _ = encode(CHATML, {"messages": TWO})
    assert encoder.facts == {}
    assert variant(QWEN, keep=False) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (THOUGHT, "{{- '<think></think>' if message.reasoning_content }}"),  # reasoning is lost
        (THOUGHT, "{{- '' if loop.last else '<late>' }}" + THOUGHT),  # turns depend on what follows in another way, too
        ("{%- if message.role == 'assistant' %}", "{%- if true %}"),  # the first question changes, too
        (TAIL, "{%- if loop.index0 > ns.last_query_index %}{%- endif %}" + TAIL),  # two anchors
    ],
)
def test_no_variant_without_proof(old, new):
    assert old in QWEN and variant(QWEN, keep=True)
    assert variant(QWEN.replace(old, new), keep=True) is None


def test_a_run_says_which_variant_it_trains_with(tmp_path):
    tokenizer_of(MISTRAL, "<bos>", "<eos>", "<eos>", "[INST]", "[/INST]").save_pretrained(tmp_path / "tokenizer")
    path = jsonl(tmp_path / "a.jsonl", {"messages": [SYSTEM, *TWO]})
    settings = {"path": str(tmp_path / "tokenizer"), "vocabulary_size": None}
    described = registry.load_task(make_recipe(tmp_path, path, tokenizer=settings)).describe()
    assert "Mistral 7B v0.3, Nemo, Pixtral for training: writes the system prompt" in described["chat_template"]
    assert ("chat template", described["chat_template"]) in _data(described)


def test_the_table_in_docs_has_each_family():
    lines = [f"| {one.models} | {one.effect or '-'} | {'yes' if one.keep else '-'} |" for one in FAMILIES]
    assert "\n".join(lines) in DOCS.read_text()


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "x", "parameters": PARAMETERS}}]
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ROWS = {
    "one turn": {"messages": TWO[:2]},
    "system": {"messages": [SYSTEM, *TWO[:2]]},
    "two turns": {"messages": TWO},
    "tool call": {
        "messages": [USER, CALLING, TOOL | {"name": "f", "tool_call_id": "call00001"}, TWO[1]],
        "tools": TOOLS,
    },
    "reasoning in two turns": {"messages": THINKING},
    "reasoning in one": {"messages": [*TWO[:3], THINKING[3]]},
    "prompt and completion": {"prompt": TWO[:1], "completion": TWO[1:2]},
    "leading spaces": {"messages": [{**turn, "content": "  " + turn["content"]} for turn in TWO[:2]]},
}
STOCK = [path for path in sorted(TRL.glob("*.jinja")) if "_training" not in path.stem]
# of models with other tasks: images or diffusion
OTHERS = ("diffusion_gemma", "idefics3", "smolvlm", "llava_next", "qwen2_5_vl", "qwen3_vl", "lfm2_2_5_vl")


@pytest.mark.full
@pytest.mark.parametrize("path", STOCK or [None], ids=lambda path: path.stem if path else "none")
@pytest.mark.parametrize("reasoning", ["as_inference", "keep"])
def test_published_templates(path, reasoning):
    """What transformers renders is trained with its ids, and what TRL's training template marks of it. Two exceptions:

    What the generation prompt holds is not trained. Where an answer has no end, the next role's token is added.
    """
    if path is None or path.stem in OTHERS:
        pytest.skip("no template of a causal language model" if path else "SAMECURVE_TRL names no folder with trl")
    stock, twin = path.read_text(), path.with_stem(f"{path.stem}_training")
    twin = twin.read_text() if twin.is_file() else ""
    outcomes = Counter(_outcome(stock, twin, row, reasoning) for row in ROWS.values())
    print(path.stem, reasoning, dict(outcomes))
    assert sum(outcomes[name] for name in ("ids", "ids and mask", "kept", "kept, ids and mask")) >= 4
    if twin and reasoning == "as_inference":
        assert outcomes["ids and mask"] >= 3


def _outcome(stock: str, twin: str, row: dict, reasoning: str) -> str:
    turns, tools = row.get("messages") or row["prompt"] + row["completion"], row.get("tools")
    tokenizer = tokenizer_of(stock, "<bos>", "<eos>", "<eos>", *sorted({*SPECIAL.findall(stock + twin)}))
    options = {"tools": tools, "return_dict": True}
    try:
        ids = tokenizer.apply_chat_template(turns, **options)["input_ids"]
    except Exception:  # of Jinja
        return "not rendered"
    if tools and not all(name in stock for name in ("tools", "tool_calls")):
        with pytest.raises(DataError, match="which the chat template does not render"):
            encode(stock, row, twin, reasoning=reasoning)
        return "refused"
    _, _, rows = encode(stock, row, twin, reasoning=reasoning)
    last = list(rows[-1].tokens)
    same = last[: len(ids)] == ids and len(last) - len(ids) <= 1
    assert same or (reasoning == "keep" and variant(stock, keep=True))
    assert reasoning == "as_inference" or len(rows) == 1
    name = "ids" if same else "kept"
    if not twin or len(rows) > 1:
        return name
    tokenizer.chat_template = twin
    theirs = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, **options)
    if theirs["input_ids"] != last:
        return name
    tokenizer.chat_template = stock
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    marked = trained(tokenizer, theirs["input_ids"], theirs["assistant_masks"])
    for their_text, our_text in zip(marked, trained(tokenizer, last, rows[-1].trained), strict=True):
        assert their_text.endswith(our_text) and their_text.removesuffix(our_text) in prompt
    return "ids and mask" if same else "kept, ids and mask"
