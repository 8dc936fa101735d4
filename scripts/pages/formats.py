"""Write docs/formats.md: `python -m scripts.pages.formats > docs/formats.md`."""

from __future__ import annotations

from samecurve.specs.row_formats import CHAT, MATCHES, PAIRS, SHARED, formats_of

_TITLES = {CHAT: "Conversations", PAIRS: "Preferences", MATCHES: "Texts that match"}
_HEAD = """# Formats of rows

<!-- Written by `python -m scripts.pages.formats` from specs/row_formats.py. Do not edit. -->

A row's columns say its format. The header and `inspect` name it: `rows        alpaca: instruction, input, output`.
KTO (`task=dpo dpo.loss=kto`) reads preferences, and conversations with a column `label` or `kto_tag`. `data.format`
chooses where a row fits several formats, and the keys `data.messages_column`, `data.prompt_column` and so on read
columns by other names. [Data](data.md#columns) says what happens to columns that are not read.
"""
_FOOT = f"""## Further columns and keys

Conversations and preferences may also have {", ".join(f"`{name}`" for name in SHARED)}.
`system`, `system_prompt` (OpenOrca) or `systemInstruction` (Gemini) is the first turn. `functions` are tools as bare
functions, as in OpenAI's older files, and tools of Anthropic's form and Bedrock's `toolConfig` become OpenAI's.
`chat_template_kwargs` go to the chat template, as in TRL, above those of the recipe's key `data.chat_template_kwargs`.
A message's reasoning is `reasoning_content`, `reasoning` or `thinking`; [Conversations](data.md#conversations) says
when it is trained. A turn with `weight: 0` (OpenAI), `train: false` (axolotl), `loss: false` or `loss_scale: 0`
(ms-swift) or `loss_weight: 0` (LLaMA-Factory) is not trained, and a turn of the user or a tool with `train: true`
(axolotl) is. A list of texts is a question, its answer and so on (LIMA). The text parts of a content list are joined,
also Gemini's and Bedrock's; Anthropic's parts `tool_use` and `tool_result`, and Bedrock's `toolUse` and `toolResult`,
become calls and results. A result that is an object is refused: write its JSON text, because templates render objects
in different ways (of 122 that render results, 10 write that text, 38 Python's, and 30 fail). A part with `train:
false` (axolotl) in a trained turn is an error; images, audio and video are refused by name.

Rows of 86 public data sets and documentations were written anew and loaded (November 2026): 63 are read as they are, 23
are refused by the name of the column or the value that is missing or would be lost.
"""


def render_page() -> str:
    """Return the text of docs/formats.md."""
    parts = [_HEAD]
    for tasks, title in _TITLES.items():
        lines = [f"## {title}: {', '.join(f'`{task}`' for task in tasks.split(', '))}", ""]
        lines += ["| `data.format` | columns | a row is | known from |", "|---|---|---|---|"]
        for known in formats_of(tasks):
            columns = ", ".join(f"`{name}`" for name in known.columns)
            columns += "".join(f", (`{name}`)" for name in known.optional)
            columns += " (only by its name)" if known.only_named else ""
            lines.append(f"| `{known.name}` | {columns} | {known.meaning} | {known.origin} |")
        parts.append("\n".join(lines) + "\n")
    parts.append(_FOOT)
    return "\n".join(parts)


if __name__ == "__main__":
    print(render_page(), end="")
