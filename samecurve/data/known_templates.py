r"""Variants of known families' chat templates for training, made from the tokenizer's own template by textual edits.

ChatEncoder finds the trained text of most templates by comparing renderings. A variant is needed where it cannot
(Command A), where a rendered answer has another prompt than inference gives it (Mistral's system prompt vanishes), and
for data.reasoning=keep, where the template leaves reasoning out of earlier turns.

Edits, not copies chosen by a hash: a publisher's new revision mostly leaves the edited lines alone, and no template has
to be stored here. Safety comes from a proof at load time. Each anchor has to occur as often as expected. On probe
conversations every text has to be the original's, or the original's generation prompt with the end of the original's
text behind it. A generation prompt that nobody asked for may be missing, and the end of a turn may be added. With
`keep`, that holds for the first answer, whose reasoning may be inserted; each text begins with the text of the turns
before, and all the reasoning is in it. Without proof there is no variant.
"""

from __future__ import annotations

import os.path
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from samecurve.data.time_limit import render_limit

Message = dict[str, Any]


class Edit(NamedTuple):
    """Replacement of all matches of an anchor.

    Attributes:
        anchor: text in which a space stands for any white space, and `...` for any text within a tag.
        new: `@` stands for the matched text.
        times: how often the anchor has to occur, one of these numbers.
    """

    anchor: str
    new: str
    times: tuple[int, ...] = (1,)

    def apply(self, template: str) -> str | None:
        """Return the edited template, None if the anchor does not occur as often as it has to."""
        words = (r"[^%{}]*?".join(map(re.escape, word.split("..."))) for word in self.anchor.split(" "))
        edited, times = re.subn(r"\s+".join(words), lambda match: self.new.replace("@", match[0]), template)
        return edited if times in self.times else None


class Family(NamedTuple):
    """Edits for a family's templates.

    Attributes:
        models: the models that have such a template.
        edits: for every use.
        effect: what these edits do, for docs.
        keep: further edits, which keep the reasoning of every turn.
        ends: tokens with which the edits end the last answer.
    """

    models: str
    edits: tuple[Edit, ...] = ()
    effect: str = ""
    keep: tuple[Edit, ...] = ()
    ends: tuple[str, ...] = ()


class Variant(NamedTuple):
    """Template for training. `effect` describes it for the header and run.json."""

    template: str
    effect: str


_GEMMA_KEEP = Edit("loop.index0 > ns_turn.last_user_idx...and message.get('tool_calls')", "true")
_LAST_QUESTION = "loop.last or loop.index0 + 2 == loop_messages | length and loop.nextitem.role == 'assistant'"

FAMILIES = (
    Family(
        "Command A, Command R7B",
        (
            Edit(
                "{%- endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
                "{%- endfor %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' if add_generation_prompt }}",
                (1, 2),
            ),
            Edit("{%- if not enable_thinking -%}", "{%- if add_generation_prompt and not enable_thinking -%}", (0, 1)),
        ),
        "writes a generation prompt only where one is asked for",
    ),
    Family(
        "Mistral 7B v0.3, Nemo, Pixtral",
        (
            Edit(
                "{%- if loop.last and system_message is defined %}",
                "{%- if (" + _LAST_QUESTION + ") and system_message is defined %}",
            ),
        ),
        "writes the system prompt before the last question, as for generation, where it vanishes behind an answer",
    ),
    Family(
        "Gemma 4 whose generation prompt holds an empty thought",
        (
            Edit(r"{{- '<|channel>thought\n<channel|>' -}}", "@"),
            Edit(
                r"{{- '<|turn>' + role + '\n' }}",
                "@{%- if role == 'model' and loop.last and not (enable_thinking or message.get('reasoning') "
                r"or message.get('reasoning_content')) %}{{- '<|channel>thought\n<channel|>' -}}{%- endif %}",
            ),
        ),
        "writes that thought before the last answer, too",
        keep=(Edit("role == 'model' and loop.last", "role == 'model'"), _GEMMA_KEEP),
    ),
    Family("Gemma 4", keep=(_GEMMA_KEEP,)),
    Family(
        "Qwen 3, 3.5, 3.6, 3.8",
        keep=(
            Edit("{%- if ...loop.index0 > ns.last_query_index... %}", "{%- if true %}"),
            Edit("loop.last or (not loop.last and reasoning_content)", "true", (0, 1)),
        ),
    ),
    Family(
        "GLM 4.5 to 5.1",
        (
            Edit(
                "{%- elif m.role == 'tool' -%}",
                "{%- if loop.last and not add_generation_prompt %}"
                "{{- '<|observation|>' if m.tool_calls else '<|user|>' }}{%- endif %}@",
            ),
        ),
        "ends the last answer with the token of the role that is expected next",
        keep=(Edit("loop.index0 > ns.last_user_index", "true", (1, 2)),),
        ends=("<|user|>", "<|observation|>"),
    ),
    Family(
        "Nemotron 3, 3.5", keep=(Edit("(truncate_history_thinking and loop.index0 < ns.last_user_idx)", "false", (2,)),)
    ),
    Family(
        "gpt-oss",
        keep=(
            Edit("{%- elif loop.last and not add_generation_prompt %}", "{%- elif true %}"),
            Edit(" and not future_final_message.found", "", (2,)),
        ),
    ),
    Family(
        "DeepSeek R1, models distilled from it, V3 whose prompt opens a thought",
        keep=(Edit("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),),
    ),
    Family(
        "EXAONE 4",
        keep=(Edit("(not skip_think and loop.last) and reasoning_content is defined", "reasoning_content is defined"),),
    ),
    Family("LFM 2.5", keep=(Edit("preserve_thinking or loop.index0 > ns.last_user_index", "true", (1, 2)),)),
    Family(
        "LFM 2.5 Instruct", keep=(Edit("not keep_past_thinking and loop.index0 != ns.last_assistant_index", "false"),)
    ),
)

_READS = re.compile(r"reasoning_content|message\.thinking")  # transformers gives a message's reasoning both names
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": _PARAMETERS}}]
_SYSTEM, _USER, _NEXT = (
    {"role": role, "content": said} for role, said in (("system", "s"), ("user", "u"), ("user", "v"))
)
_THOUGHT = "<think>\n#r\n</think>\n\n"


def _answer(content: str, **keys: Any) -> Message:
    return {"role": "assistant", "content": content, **keys}


# Answers and reasoning are marked by #.
_PROBES: tuple[list[Message], ...] = (
    [_USER, _answer("#a"), _NEXT, _answer("#b")],
    [_SYSTEM, _USER, _answer("#a"), _NEXT, _answer("#b")],
    [_USER, _answer("#a", reasoning_content="#r"), _NEXT, _answer("#b", reasoning_content="#r")],
    [_USER, _answer(_THOUGHT + "#a"), _NEXT, _answer(_THOUGHT + "#b")],
    [
        *(_USER, _answer("", tool_calls=[_CALL])),
        {"role": "tool", "content": "t", "name": "f", "tool_call_id": "a1b2c3d4e"},
        *(_answer("#a"), _NEXT, _answer("#b")),
    ],
)


@lru_cache(maxsize=8)
def variant(template: str, keep: bool) -> Variant | None:
    """Return the variant of a template; None where it needs none, is unknown, or the variant cannot be proved right.

    Args:
        template: Jinja text as the tokenizer has it.
        keep: whether the reasoning of every turn is to be rendered.
    """
    for family in FAMILIES:
        edited: str | None = template
        for edit in (*family.edits, *(family.keep if keep else ())):
            edited = edit.apply(edited) if edited is not None else None
        if edited not in (None, template) and _proved(family, template, edited, keep and bool(family.keep)):
            kept = "writes the reasoning of every turn" if keep and family.keep else ""
            effects = ", and ".join(filter(None, (family.effect, kept)))
            return Variant(edited, f"variant of {family.models} for training: {effects}; the export keeps the original")
    return None


def _proved(family: Family, original: str, edited: str, keep: bool) -> bool:
    """Whether the edited template renders the probes as this module's docstring says."""
    num_proved = 0
    for probe in _PROBES:
        answers = [index for index, message in enumerate(probe) if message["role"] == "assistant"]
        tools = _TOOLS if len(answers) > 2 else None
        try:
            texts, asked = _texts(original, probe, answers, tools)
        except Exception:  # errors of Jinja: a template may have no system prompts or tools
            continue
        try:
            new_texts, new_asked = _texts(edited, probe, answers, tools)
        except Exception:
            return False
        for index, text, prompt, new in zip(answers, texts, asked, new_texts, strict=True):
            new = next((new.removesuffix(end) for end in family.ends if new.endswith(end)), new)
            behind = new.startswith(prompt) and new != prompt and text.endswith(new[len(prompt) :])
            unasked_left_out = text.startswith(new) and text[len(new) :] in prompt
            same = sum(len(os.path.commonprefix(both)) for both in ((text, new), (text[::-1], new[::-1])))
            added = keep and "#r" in str(probe[index]) and "#r" not in text and same >= len(text)
            if not (behind or unasked_left_out or added):
                return False
            if keep:  # later turns follow reasoning that the original leaves out
                break
        if new_asked[0] != asked[0] or not keep and new_asked != asked:
            return False
        read = _READS.search(original) or not any("reasoning_content" in message for message in probe)
        if keep and read and new_texts[-1].count("#r") != str(probe).count("#r"):
            return False
        if keep and not all(after.startswith(before) for before, after in pairwise(new_texts)):
            return False
        num_proved += 1
    return num_proved > 1


def _texts(
    template: str, probe: list[Message], answers: list[int], tools: list[Message] | None
) -> tuple[list[str], list[str]]:
    """Return the texts up to each answer, and the texts that ask for each."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # names of tokens are for the template; pyright expects them to be other parameters
    tokens: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    options: dict[str, Any] = {"tools": tools, "chat_template": template, **tokens}
    with render_limit():
        texts, _ = render_jinja_template([probe[: index + 1] for index in answers], **options)
        asked, _ = render_jinja_template([probe[:index] for index in answers], add_generation_prompt=True, **options)
    return [str(text) for text in texts], [str(text) for text in asked]
