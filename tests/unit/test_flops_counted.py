"""The formula of flops.py against the operations that PyTorch's FLOP counter sees.

For every family that may be packed, and for encoders. Per token: forward 2 N' + 4 L h s, backward twice that. N' is the
formula's N without vectors: norms and biases are no matrix multiplications. With eager attention, which is matrix
multiplications that the counter knows, on a CPU: a forward pass on the meta device fails in transformers' masks
(Tensor.item).
"""

from __future__ import annotations

import pytest
import torch
from tiny_families import round_trip_config, tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from samecurve.models.flops import _attention_width, _layers, _multiplied_parameters, _uses, num_experts, token_flops
from samecurve.specs.model_families import PIPELINED, families

LENGTH, ROWS = 32, 2
# every token meets all experts: the formula says that it does not know
ALL_EXPERTS = {"llama4_text", "ernie4_5_moe"}
# how often the formula's attention is computed: two maps whose values are twice as wide
ATTENTION = {"diffllama": 2}
ENCODERS = set(
    """
    albert bert camembert data2vec-text deberta deberta-v2 distilbert electra ernie esmc eurobert flaubert gte
    jina_embeddings_v3 megatron-bert modernbert mpnet nomic_bert rembert roberta roberta-prelayernorm roc_bert roformer
    tapas ultrabert xlm xlm-roberta xlm-roberta-xl yoso
    """.split()
)
# with a part that is for no token or for one of a row, and counted for all: below 1 % of a real model
ALMOST = {"esm", "layoutlm", "squeezebert"}
ENCODER_DECODERS = {"bart", "mbart", "mvp"}
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"embedding_size": 16, "vocab_size": 100, "pad_token_id": 0, "max_position_embeddings": 64},
    **{"input_embedding_size": 16, "output_embedding_size": 24},  # rembert's
}
FIELDS = {
    # layers 0 to 2 are the first group, 3 and 4 the second one; each has two layers of its own
    "albert": {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2},
    "squeezebert": {"embedding_size": 32},
}


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
    uses = _uses(model)
    named = dict(model.named_parameters())
    vectors = sum(
        uses[id(parameter)] * parameter.numel()
        for name, parameter in named.items()
        if parameter.ndim == 1 or name.endswith("_bias")  # gpt_oss's biases of all experts in one parameter
    )
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
    assert set(PIPELINED) < families("packed") and len(families("packed")) > 40
    assert ALL_EXPERTS < families("packed")
    assert set(ATTENTION) < families("packed") - ALL_EXPERTS - families("counted_experts")


@pytest.mark.parametrize(
    "family", sorted(families("packed") - ALL_EXPERTS - families("counted_experts") - families("uncounted"))
)
def test_formula_and_counter_agree(family):
    model = tiny(family)
    assert agree(model, expected(model, ATTENTION.get(family, 1)))


def experts(family: str):
    """The counter does not know grouped_mm, transformers' default for experts; one product per expert it knows."""
    config = round_trip_config(family)
    if family in families("counted_experts"):
        config.num_experts_per_tok = 2
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(config, **eager).train()


@pytest.mark.parametrize("family", sorted(families("counted_experts")))
def test_active_experts_count(family):
    model = experts(family)
    assert model.config.num_experts_per_tok < num_experts(model.config)
    assert agree(model, expected(model))


def test_experts_that_all_tokens_meet_are_not_guessed():
    """The counter finds 16 times the one active expert."""
    for family in families("packed") & families("uncounted"):
        assert token_flops(tiny(family), LENGTH, recompute=0) is None, family
    model = tiny("llama4_text")
    assert token_flops(model, LENGTH, recompute=0) is None
    assert counted(model)[0] > 2 * 2 * 16 * (96 * 32 + 32 * 48)


@pytest.mark.parametrize("family", ["granitemoehybrid", "jamba", "recurrent_gemma", "olmo_hybrid"])
def test_attention_is_not_counted_for_recurrent_layers(family):
    """Each is dense; granitemoehybrid as granite-4.0-h-350m, whose config says 0 experts."""
    dense = {
        "granitemoehybrid": {"num_local_experts": 0},
        "jamba": {"num_experts": 1},
        "olmo_hybrid": {"num_experts": 0},
    }
    config = tiny_config(family, **dense.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert num_experts(config) < 2 and token_flops(model, LENGTH, recompute=0) is None


def test_mixtral_by_hand():
    """q 32 x 32, k and v 32 x 16, o 32 x 32, router 32 x 8 and 2 of 8 experts of 3 x 32 x 48 in each of 2 layers, head
    32 x 100; attention 4 x 2 x 32 x 32."""
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 32 * 8 + 2 * 3 * 32 * 48) + 32 * 100
    assert agree(experts("mixtral"), 2 * matrices + 4 * 2 * 32 * 32)


def test_active_experts_may_be_a_list_with_one_number_for_each_layer():
    """As HunYuan's config has them."""
    model = experts("hunyuan_v1_moe")
    plain = token_flops(model, LENGTH, recompute=0)
    model.config.moe_topk = [2] * model.config.num_hidden_layers
    assert plain is not None and token_flops(model, LENGTH, recompute=0) == plain


def encoder(family: str, **fields):
    config = AutoConfig.for_model(family)
    given = {name: size for name, size in (SIZES | FIELDS.get(family, {}) | fields).items() if hasattr(config, name)}
    config = AutoConfig.for_model(family, **given)
    return AutoModelForMaskedLM.from_config(config, attn_implementation="eager").train()


def test_every_encoder_is_counted_or_known_not_to_be():
    assert set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) <= ENCODERS | ALMOST | ENCODER_DECODERS | families("uncounted")
    assert not families("uncounted") & (ENCODERS | ALMOST)


@pytest.mark.parametrize("family", sorted(ENCODERS & set(CONFIG_MAPPING)))
def test_encoders(family):
    model = encoder(family)
    assert agree(model, expected(model))


@pytest.mark.parametrize("family", sorted(ALMOST))
def test_encoders_with_a_part_that_few_tokens_meet(family):
    """Here the part is a layer's eighth."""
    model = encoder(family)
    assert 0 <= expected(model) - counted(model)[0] <= 2 * 32 * 32


@pytest.mark.parametrize("family", ["fnet", "longformer", "mobilebert", "nystromformer", "perceiver"])
def test_other_kinds_of_encoders_are_not_guessed(family):
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family))
    assert token_flops(model, LENGTH, recompute=0) is None


@pytest.mark.parametrize(("family", "fields"), [("deberta-v2", {"relative_attention": True}), ("bart", {})])
def test_more_attention_than_the_formula_has_is_not_guessed(family, fields):
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    assert token_flops(model, LENGTH, recompute=0) is None


def test_albert_by_hand():
    """One layer, used 5 times: q, k, v and the product behind them 32 x 32, MLP 2 x 32 x 48. Once each 16 x 32, its
    transpose in the head, and the head 16 x 100."""
    model = encoder("albert", num_hidden_groups=1, inner_group_num=1)
    matrices = 5 * (4 * 32 * 32 + 2 * 32 * 48) + 2 * 16 * 32 + 16 * 100
    assert agree(model, 2 * matrices + 5 * 4 * 32 * 32)


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


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_pass_that_counts_experts_first_is_hardware_flops(family):
    """The layers' forward pass, without the output head."""
    model = experts(family)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as layers, torch.no_grad():
        model.model(input_ids=tokens, use_cache=False)
    found = token_flops(model, LENGTH, recompute=0, routed=True)
    vectors = 5 * 32  # as above
    assert found.hardware - found.model - 2 * vectors == layers.get_total_flops() / tokens.numel()
