"""ChatML: the chat template of the tokenizers that are trained here, and on offer for base models, which have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEGIN_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# What is inside of `generation` is what a model learns to write.
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def apply_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give it the template, the two tokens where it lacks them, and the end of a turn as what ends a text.

    New tokens take the ids behind the last one; whether the model's embedding holds them is architecture's question.
    """
    from tokenizers import AddedToken

    known = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in known if token.special}
    missing = [token for token in (BEGIN_OF_TURN, END_OF_TURN) if token not in special]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing], special_tokens=True)
    tokenizer.eos_token = END_OF_TURN
    tokenizer.chat_template = CHAT_TEMPLATE
