"""The formula of flops.py against the operations that PyTorch's FLOP counter sees, for every family that may be packed.

Per token: forward 2 N' + 4 L h s, backward twice that. N' is the formula's N without vectors: norms and biases
are no matrix multiplications. With eager attention, which is matrix multiplications that the counter knows, on a CPU:
a forward pass on the meta device fails in transformers' masks (Tensor.item).
"""

from __future__ import annotations

import pytest
import torch
from tiny_families import tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig

from samecurve.families import FAMILIES, PACKED
from samecurve.flops import _attention_width, _layers, _multiplied_parameters, token_flops

LENGTH, ROWS = 32, 2
# a mixture of experts: the formula says that it does not know
EXPERTS = {"granitemoe", "jetmoe", "llama4_text", "mixtral", "phimoe", "qwen2_moe"}
# how often the formula's attention is computed: two maps whose values are twice as wide
ATTENTION = {"diffllama": 2}


def counted(model) -> tuple[float, float]:
    """FLOPs per token of the forward and of the backward pass."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=tokens, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops() / tokens.numel(), backward.get_total_flops() / tokens.numel()


def expected(model, attention: int = 1) -> float:
    """Forward: a third of the formula without vectors."""
    found, multiplied = token_flops(model, LENGTH, recompute=0), _multiplied_parameters(model)[0]
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert found.model == 6 * multiplied + found.attention
    return 2 * (multiplied - vectors) + attention * found.attention / 3


def agree(model, forward: float) -> bool:
    """transformers 5.17 multiplies positions with rotary's frequencies, which the counter sees: 2 for each of half a
    head's numbers, once for all rows, and for each kind of layer."""
    found, backward = counted(model)
    angles = sum(_attention_width(layer) / layer.num_attention_heads for layer in _layers(model.config)) / ROWS
    return forward <= found <= forward + angles and backward == 2 * forward


def tiny(family: str, attention: str = "eager"):
    return AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention).train()


def test_the_families_are_those_of_the_module():
    assert set(FAMILIES) < PACKED and len(PACKED) > 40
    assert EXPERTS < PACKED and set(ATTENTION) < PACKED - EXPERTS


@pytest.mark.parametrize("family", sorted(PACKED - EXPERTS))
def test_formula_and_counter_agree(family):
    model = tiny(family)
    assert agree(model, expected(model, ATTENTION.get(family, 1)))


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_a_mixture_of_experts_is_not_guessed(family):
    assert token_flops(tiny(family), LENGTH, recompute=0) is None


def test_an_encoder():
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager").train()
    assert agree(model, expected(model))


def test_llama_by_hand():
    """q 32 x 32, k and v 32 x 16, o 32 x 32, MLP 3 x 32 x 48 in each of 2 layers, head 32 x 100; 4 x 2 x 32 x 32."""
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48) + 32 * 100
    assert agree(tiny("llama"), 2 * matrices + 4 * 2 * 32 * 32)


def test_which_attention_the_counter_sees():
    """PyTorch computes sdpa on a CPU by a fused operator that the counter does not know: nothing of it is counted.

    When this fails because PyTorch has changed, the comparison above may be made with sdpa, too.
    """
    model = tiny("llama", "sdpa")
    with sdpa_kernel(SDPBackend.MATH):
        assert agree(model, expected(model))
    assert agree(model, expected(model, attention=0))


def test_recomputed_layers_are_hardware_flops():
    """Every layer's forward pass again, not the output head's.

    PyTorch ends a layer's second forward pass at the last thing that the backward pass needs, so the down projection is
    left out of it, 2 x 48 x 32 in each of 2 layers; the formula counts it.
    """
    model = tiny("llama")
    plain = counted(model)[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = token_flops(model, LENGTH, recompute=1)
    vectors = 5 * 32  # two norms in each layer and the last one, which the formula counts with the layers
    with set_checkpoint_early_stop(False):
        assert counted(model)[1] - plain == found.hardware - found.model - 2 * vectors
    assert counted(model)[1] - plain == found.hardware - found.model - 2 * vectors - 2 * 2 * 48 * 32
