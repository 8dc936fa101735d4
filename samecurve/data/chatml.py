"""ChatML: the chat template of tokenizers that samecurve trains, also offered for base models, which have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEGIN_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# The model is trained on the text inside `generation`. ChatML itself has no tools: they are written between the tags of
# Hermes and Qwen, which inference servers parse.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- set system = tools and messages and messages[0]['role'] == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0]['content'] + '\\n\\n' if system else '') }}
{{- 'Functions that can be called:\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '</tools>\\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first else '' }}
{{- '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def apply_chatml(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Set the ChatML template, add its two tokens if they are missing, and make END_OF_TURN the end-of-text token.

    Returns the tokens that the vocabulary lacked. They take the ids after the last one; `models.hf_config` checks that
    the model's embedding has rows for them.
    """
    from transformers import AddedToken

    known, vocabulary = tokenizer.added_tokens_decoder.values(), tokenizer.get_vocab()
    # in the vocabulary is not enough: the encoder finds the end of a turn by its special tokens
    special = {token.content for token in known if token.special}
    missing = [token for token in (BEGIN_OF_TURN, END_OF_TURN) if token not in special]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing], special_tokens=True)
    tokenizer.eos_token = END_OF_TURN
    tokenizer.chat_template = CHAT_TEMPLATE
    return [token for token in missing if token not in vocabulary]
