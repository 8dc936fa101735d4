"""ChatML: the chat template of tokenizers that samecurve trains, also offered for base models, which have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEGIN_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
# The model is trained on the text inside `generation`.
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
