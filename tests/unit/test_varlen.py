"""Attention by documents: equal to attention with the mask that it goes without, gradients too."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from samecurve import varlen
from samecurve.architecture import chosen_attention
from samecurve.errors import ConfigurationError

LENGTHS = ((700,), (1, 299, 400), (64, 20, 30, 5, 81, 256, 244), (690, 10))
ROWS, LENGTH, HEADS, WIDTH = len(LENGTHS), 700, 4, 16


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


def masks(window: int | None = None, attention_mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What transformers makes for sdpa, (rows, 1, queries, keys), and for varlen."""
    build = create_causal_mask if window is None else create_sliding_window_causal_mask
    found = []
    for name in ("sdpa", "varlen"):
        config = AutoConfig.for_model("mistral", sliding_window=window, attn_implementation=name)
        inputs = torch.empty(ROWS, LENGTH, 8)
        found.append(
            build(
                config=config,
                inputs_embeds=inputs,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=positions() if attention_mask is None else None,
            )
        )
    return found


def tensors(dtype: torch.dtype, key_heads: int = HEADS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value as a model has them, in memory (rows, sequence, heads, width); the output's gradient."""
    torch.manual_seed(0)
    shapes = [(ROWS, LENGTH, heads, WIDTH) for heads in (HEADS, key_heads, key_heads, HEADS)]
    query, key, value, gradient = (torch.randn(shape).to(dtype) for shape in shapes)
    return [x.transpose(1, 2).detach().requires_grad_() for x in (query, key, value)], gradient


def masked(inputs: list[torch.Tensor], gradient: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of attention as it is written in books."""
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ keys.transpose(2, 3) * WIDTH**-0.5).masked_fill(~mask, float("-inf"))
    output = (torch.softmax(scores, -1) @ values).transpose(1, 2)
    output.backward(gradient)
    return [output, query.grad, key.grad, value.grad]


def by_documents(inputs: list[torch.Tensor], gradient: torch.Tensor, first: torch.Tensor) -> list[torch.Tensor]:
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    output, _ = varlen.attention(torch.nn.Module(), query, key, value, first, scaling=WIDTH**-0.5)
    output.backward(gradient)
    return [output, query.grad, key.grad, value.grad]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a.detach().double() - b).abs().max()) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("window", [None, 1, 100, 690])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_equal_to_attention_with_a_mask(window, key_heads):
    mask, first = masks(window)
    inputs, gradient = tensors(torch.float32, key_heads)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    assert error(by_documents(inputs, gradient, first), exact) < 1e-5


def test_in_bf16_no_further_off_than_with_a_mask():
    mask, first = masks()
    inputs, gradient = tensors(torch.bfloat16, key_heads=2)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    assert error(by_documents(inputs, gradient, first), exact) <= error(masked(inputs, gradient, mask), exact)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_first_keys_are_those_of_the_mask(window):
    mask, first = masks(window)
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    assert torch.equal((keys >= first) & (keys <= queries), mask.expand(ROWS, 1, LENGTH, LENGTH))


def test_padding_is_not_seen_by_what_is_not_padding():
    exists = torch.ones(ROWS, LENGTH, dtype=torch.long)
    exists[0, 650:], exists[1, :30] = 0, 0
    mask, first = masks(attention_mask=exists)
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    found = (keys >= first) & (keys <= queries)
    assert torch.equal(found[exists[:, None, :] > 0], mask[exists[:, None, :] > 0])


def test_what_is_kept_does_not_grow_with_the_square_of_the_sequence():
    _, first = masks()
    (query, key, value), _ = tensors(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        varlen.attention(torch.nn.Module(), query, key, value, first)
    assert sum(x.numel() for x in kept) == query.numel() + key.numel() + value.numel() + first.numel()


def test_as_an_operator_of_torch():
    """Compiled, with fake tensors, and with gradients that autograd registers."""
    first = masks()[1][:2, :, :40]
    inputs = [x[:2, :, :40].detach().requires_grad_() for x in tensors(torch.float32)[0]]
    torch.library.opcheck(varlen.OPERATOR, (*inputs, first, 0.25))


def test_flops_are_counted_like_those_of_torchs_attention():
    counts = []
    inputs, gradient = tensors(torch.float32)
    for run in (torch.nn.functional.scaled_dot_product_attention, None):
        with FlopCounterMode(display=False) as counter:
            if run is None:
                by_documents(inputs, gradient, masks()[1])
            else:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    run(*inputs).transpose(1, 2).backward(gradient)
        counts.append(counter.get_total_flops())
    forward = 4 * ROWS * HEADS * LENGTH**2 * WIDTH
    assert counts == [3 * forward, 3.5 * forward]  # the scores are computed twice, as in flash attention


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"softcap": 30.0}, "no softcap"),
        ({"s_aux": torch.zeros(4)}, "no s_aux"),
    ],
)
def test_what_it_does_not_know_is_refused(more, text):
    with pytest.raises(ValueError, match=text):
        varlen.attention(torch.nn.Module(), *tensors(torch.float32)[0], masks()[1], **more)


def test_both_directions_and_caches_are_refused():
    encoder = torch.nn.Module()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="no both directions"):
        varlen.attention(encoder, *tensors(torch.float32)[0], masks()[1])
    with pytest.raises(ValueError, match="without a cache of keys"):
        varlen.first_keys(1, q_length=1, kv_length=8, q_offset=7)


def recipe(attention: str, precision: str = "bf16") -> SimpleNamespace:
    return SimpleNamespace(model=SimpleNamespace(attention=attention), precision=precision)


def test_auto_is_by_documents_where_that_is_a_gain(monkeypatch):
    llama = AutoConfig.for_model("llama")
    assert chosen_attention(recipe("auto"), llama) == "varlen"
    assert chosen_attention(recipe("auto", "fp32"), llama) == "sdpa"
    assert chosen_attention(recipe("varlen", "fp32"), llama) == "varlen"
    assert chosen_attention(recipe("eager"), llama) == "eager"
    assert chosen_attention(recipe("auto"), AutoConfig.for_model("gemma2")) == "sdpa"
    assert chosen_attention(recipe("auto"), AutoConfig.for_model("gpt2")) == "sdpa"
    assert chosen_attention(recipe("auto"), AutoConfig.for_model("gpt2", attn_pdrop=0.0)) == "varlen"
    with pytest.raises(ConfigurationError, match="model.attention: found varlen, but attn_pdrop is 0.1, and it has no"):
        chosen_attention(recipe("varlen"), AutoConfig.for_model("gpt2"))
    with pytest.raises(ConfigurationError, match="a gemma2 computes attention in its own way; use auto"):
        chosen_attention(recipe("varlen"), AutoConfig.for_model("gemma2"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen_attention(recipe("auto"), llama) == "sdpa"
    with pytest.raises(ConfigurationError, match="that is made of a CPU's operators; use auto"):
        chosen_attention(recipe("varlen"), llama)
