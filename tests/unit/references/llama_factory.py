"""Write llama_factory.json: rows, and the text and the trained parts that LLaMA-Factory makes of them.

pip install --no-deps --target FOLDER llamafactory==0.9.5
DISABLE_VERSION_CHECK=1 PYTHONPATH=FOLDER python tests/unit/references/llama_factory.py

The template is LLaMA-Factory's `qwen`. Its trained parts end with the line break after <|im_end|>, which is cut here:
generation stops before it.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

for absent in ("torchaudio", "av", "librosa", "soundfile"):
    sys.modules.setdefault(absent, MagicMock(__spec__=ModuleSpec(absent, None)))
converter = importlib.import_module("llamafactory.data.converter")
parser = importlib.import_module("llamafactory.data.parser")
template = importlib.import_module("llamafactory.data.template").TEMPLATES["qwen"]

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"name": "add", "arguments": {"a": 1}}
ASKS = {"from": "human", "value": "add é"}
CALLS = [
    ASKS,
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": '{"sum": 2}'},
    {"from": "gpt", "value": "2 🙂"},
]
TWICE = [ASKS, {"from": "function_call", "value": json.dumps([CALL, {"name": "add", "arguments": {"a": 2}}])}]
TWICE += CALLS[2:]
TALK = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
# without a system turn, to which LLaMA-Factory 0.9.5 adds a line break, or Nemotron's "detailed thinking off"
OPENAI = [{"role": "user", "content": "a"}]
OPENAI += [
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "b"},
]
WRAPPED = [{"type": "function", "function": ADD}]
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
OPENAI_TAGS |= {"observation_tag": "tool", "messages": "messages", "formatting": "openai", "tools": "tools"}
PAIR = {"chosen": "chosen", "rejected": "rejected", "ranking": True}
# name: (row, what dataset_info.json says of it besides)
ROWS = {
    "alpaca": ({"instruction": "do", "input": "it", "output": "x"}, {}),
    "alpaca without input": ({"instruction": "do", "input": "", "output": "x"}, {}),
    "alpaca, input alone": ({"instruction": "", "input": "it", "output": "x"}, {}),
    "alpaca with all": (
        {"instruction": "q", "input": "i", "output": "x", "system": "s", "history": [["a", "b"]]},
        {"system": "system", "history": "history"},
    ),
    "query and response": (
        {"query": "q", "response": "x", "history": [["a", "b"], ["c", "d"]]},
        {"prompt": "query", "query": None, "response": "response", "history": "history"},
    ),
    "sharegpt": ({"conversations": TALK * 2, "system": "s"}, {"formatting": "sharegpt", "system": "system"}),
    "sharegpt with tools": (
        {"conversations": CALLS, "tools": json.dumps([ADD])},
        {"formatting": "sharegpt", "tools": "tools"},
    ),
    "sharegpt with two calls": (
        {"conversations": TWICE, "tools": json.dumps(WRAPPED), "system": "s"},
        {"formatting": "sharegpt", "tools": "tools", "system": "system"},
    ),
    "openai with tools": ({"messages": OPENAI, "tools": json.dumps(WRAPPED)}, OPENAI_TAGS),
    "alpaca pair": ({"instruction": "q", "input": "i", "chosen": "good", "rejected": "bad"}, PAIR),
    "sharegpt pair": (
        {"conversations": TALK[:1], "chosen": TALK[1], "rejected": {"from": "gpt", "value": "no"}, "system": "s"},
        {"formatting": "sharegpt", "system": "system", **PAIR},
    ),
}
CONVERTERS = {
    "alpaca": converter.AlpacaDatasetConverter,
    "sharegpt": converter.SharegptDatasetConverter,
    "openai": converter.OpenAIDatasetConverter,
}


class Characters:
    """A tokenizer whose tokens are the texts themselves."""

    bos_token_id = eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool) -> list[str]:
        return [text]


def said(row: dict, facts: dict) -> list[list[list]]:
    """Return, for each conversation of the row, its parts: [text, whether the loss covers it]."""
    facts = {"system_tag": "system", **facts}
    attributes = parser.DatasetAttr(
        "file", "rows", **{key: facts.pop(key) for key in ("formatting", "ranking") & facts.keys()}
    )
    for key, value in facts.items():
        setattr(attributes, key, value)
    read = CONVERTERS[attributes.formatting](attributes, SimpleNamespace(media_dir=""))(row)
    found = []
    for answer in read["_response"] if attributes.ranking else [None]:
        messages = read["_prompt"] + (read["_response"] if answer is None else [answer])
        turns = template.encode_multiturn(Characters(), messages, read["_system"], read["_tools"])
        parts = [
            ["".join(texts), is_answer] for turn in turns for texts, is_answer in zip(turn, (False, True), strict=True)
        ]
        found.append(parts)
    return found


if __name__ == "__main__":
    cases = {name: {"row": row, "parts": said(row, dict(facts))} for name, (row, facts) in ROWS.items()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
