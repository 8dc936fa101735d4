"""ChatML: the chat template of the tokenizers that are trained here, and on offer for base models, which have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHATML = "chatml"  # what a recipe's tokenizer.chat_template says for it
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


def speak(tokenizer: PreTrainedTokenizerFast) -> None:
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


def embeddings(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that have a row for each token."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """(num_rows, ...): new tokens begin as the mean of all others, so that they are neither likely nor unlikely.

    A row drawn at random can be far from all that the model knows, and takes the first steps' loss with it
    (Hewitt, 2021, "Initializing new word embeddings for pretrained language models").
    """
    import torch

    more = num_rows - tensor.shape[0]
    return torch.cat([tensor, tensor.mean(dim=0, keepdim=True).expand(more, *tensor.shape[1:])])
