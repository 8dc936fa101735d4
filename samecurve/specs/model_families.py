"""Facts about model families: modules of pipeline stages; support for packing, attention, kernels, strategies; FLOPs.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from samecurve.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Parts:
    """Module names of the parts of a model that a pipeline divides, and the attention of its layers.

    Attributes:
        embedding: name of the token embedding.
        layers: name of the list of layers.
        norm: name of the final norm.
        kinds: maps a config to "full_attention" or "sliding_attention" for every layer.
        rotary: name of the rotary embedding, None if the family has none.
        positions: name of the embedding of positions, None if the family has none.
        dropout: name of the dropout behind the embedding, None if the family has none.
    """

    embedding: str
    layers: str
    norm: str
    kinds: Callable[[PreTrainedConfig], list[str]]
    rotary: str | None = None
    positions: str | None = None
    dropout: str | None = None


def _full(config: PreTrainedConfig) -> list[str]:
    return ["full_attention"] * config.num_hidden_layers


def _by_window(config: PreTrainedConfig) -> list[str]:
    return ["full_attention" if config.sliding_window is None else "sliding_attention"] * config.num_hidden_layers


def _by_layer(config: PreTrainedConfig) -> list[str]:
    return list(config.layer_types)


def _llama_like(kinds: Callable[[PreTrainedConfig], list[str]]) -> Parts:
    return Parts("model.embed_tokens", "model.layers", "model.norm", kinds, rotary="model.rotary_emb")


_GPT2 = Parts(
    "transformer.wte",
    "transformer.h",
    "transformer.ln_f",
    _full,
    positions="transformer.wpe",
    dropout="transformer.drop",
)

# What may be said of a family, with transformers 5.23 where nothing else is said.
FACTS = {
    # It builds block-diagonal masks from position_ids and carries no other state from document to document: a packed
    # document has the same logits as alone (tests/unit/test_packed_rows.py), unless rope_type is longrope and rows are
    # long (`check_packing`).
    "packed",
    # A packed document reads its neighbours: bloom, falcon, mpt, opt, biogpt and xglm do not take positions from
    # position_ids; mamba, mamba2, falcon_mamba, jamba, minimax, rwkv and xlstm have a recurrent state and pass no
    # argument on to it; the sparse attention of deepseek_v32 and glm_moe_dsa depends on the row's length. doge leaks
    # with transformers 5.17 and sdpa.
    "leaks",
    # Packed with transformers 5.23 by what models/packed_rows.py changes in its masks or its recurrent layers.
    "separated",
    # Packed or separated, and its attention function can be replaced. codegen, gpt_neo and gptj compute attention
    # themselves or choose it from their own tables; gemma2 and vaultgemma cap the scores; flint, gpt_oss, granite_swa
    # and mimo_v2_flash have sinks; in deepseek_v3 and its like, values are narrower than keys.
    "varlen",
    # It scales or caps its logits, so that the loss cannot be computed in chunks (engines/loss_implementation.py).
    "whole_logits",
    # What a layer keeps for the backward pass beside what Llama's keeps, by torch's MemTracker: norms of queries and
    # keys; norms behind attention and MLP, before the residual is added; norms that scale in fp32.
    "head_norms",
    "post_norms",
    "fp32_norms",
    # Loss and gradients with the kernels of liger-kernel 0.8.5 equal PyTorch's, in Triton's interpreter and with
    # transformers 5.17 and 5.23 (tests/unit/test_liger.py). Liger's own list is longer. Of the families left out,
    # llama4_text had a loss 1 % off where rows have their own positions; experts (mixtral) do not run there.
    "liger",
    "fails_with_liger",
    # Its FLOPs per token differ from the formula in flops.py, by torch's counter or by its code. It has attention of
    # another kind (big_bird, convbert, fnet, longformer, mra, nystromformer, reformer), a shorter or narrower sequence
    # inside (canine, funnel, mobilebert, perceiver), keys and values made from a latent vector (deepseek_v3, minicpm3,
    # youtu), or weights that not every token is multiplied with (aria_text, gemma3n_text, ibert, laguna, luke,
    # mimo_v2_flash, xmod, and models that also read images).
    "uncounted",
    # A mixture of experts whose FLOPs per token are the formula's with N counting the active experts alone, by torch's
    # counter. In others every token meets all experts (llama4_text), or attention is of another kind (minimax).
    "counted_experts",
    # It was compared with one process in tests/distributed: test_tensor_parallel.py, test_context_parallel.py,
    # test_expert_parallel.py, the last one also with attention and vocabulary cut. transformers' plan of gpt_neox
    # leaves its embedding and head whole, and none of its plans cuts gpt_oss.
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_and_tensor_parallel",
    # A token changes the logits of earlier positions, whatever the config says.
    "not_causal",
    # The rows of a batch are not on the first axis inside.
    "tokens_first",
    # Its routers choose among products of keys, and their loss is of another kind than all others'.
    "other_router_loss",
}


@dataclass(frozen=True)
class Family:
    """What is known of a model family.

    Attributes:
        words: of FACTS, separated by spaces.
        parts: for a pipeline; None if the family cannot be divided into stages.
        score_bytes: of a family without sdpa: what a layer keeps of an attention score, in 16 bits and in fp32.
        mlp_bytes: what an MLP keeps per element of its width, in 16 bits and in fp32, if that is not 8 and 16: clamps
            and a sigmoid of its own.
    """

    words: str = ""
    parts: Parts | None = None
    score_bytes: tuple[int, int] | None = None
    mlp_bytes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert FACTS.issuperset(self.words.split()), self.words


FAMILIES = {
    "afmoe": Family("separated varlen"),
    "apertus": Family("packed varlen"),
    "arcee": Family("packed varlen"),
    "aria_text": Family("packed varlen uncounted"),
    "axk1": Family("packed uncounted"),
    "bailing_hybrid": Family("separated uncounted"),
    "bamba": Family("separated varlen uncounted"),
    "beam": Family("packed varlen whole_logits counted_experts"),
    "big_bird": Family("uncounted"),
    "biogpt": Family("leaks"),
    "bitnet": Family("packed varlen"),
    "bloom": Family("leaks"),
    "canine": Family("uncounted"),
    "codegen": Family("packed"),
    "cohere": Family("packed varlen whole_logits"),
    "cohere2": Family("packed varlen whole_logits"),
    "cohere2_moe": Family("packed varlen whole_logits counted_experts"),
    "convbert": Family("uncounted"),
    "cpmant": Family("not_causal"),
    "cwm": Family("packed varlen"),
    "deepseek_v2": Family("packed uncounted"),
    "deepseek_v3": Family("packed uncounted"),
    "deepseek_v32": Family("leaks"),
    "diffllama": Family("packed varlen"),
    "doge": Family("other_router_loss leaks"),
    "dots1": Family("packed varlen counted_experts"),
    "ernie4_5": Family("packed varlen"),
    "ernie4_5_moe": Family("packed varlen"),
    "exaone4": Family("packed varlen head_norms liger"),
    "exaone_moe": Family("packed varlen counted_experts"),
    "falcon": Family("leaks"),
    "falcon_h1": Family("separated varlen uncounted"),
    "falcon_mamba": Family("leaks"),
    "flex_olmo": Family("packed varlen head_norms counted_experts"),
    "flint": Family("packed counted_experts"),
    "fnet": Family("uncounted"),
    "funnel": Family("uncounted"),
    "gemma": Family("packed varlen fp32_norms liger tensor_parallel context_parallel"),
    "gemma2": Family("packed whole_logits post_norms fp32_norms liger tensor_parallel", score_bytes=(8, 8)),
    "gemma3_text": Family("packed varlen head_norms post_norms fp32_norms liger tensor_parallel context_parallel"),
    "gemma3n_text": Family("packed varlen whole_logits uncounted"),
    "gemma4_text": Family("packed varlen"),
    "glm": Family("packed varlen"),
    "glm4": Family("packed varlen post_norms liger"),
    "glm4_moe": Family("packed varlen counted_experts"),
    "glm4_moe_lite": Family("packed uncounted"),
    "glm_moe_dsa": Family("leaks"),
    "gpt2": Family("packed varlen", parts=_GPT2),
    "gpt_bigcode": Family("packed varlen"),
    "gpt_neo": Family("packed"),
    "gpt_neox": Family("packed varlen"),
    "gpt_neox_japanese": Family("packed"),
    "gpt_oss": Family("separated counted_experts expert_parallel", score_bytes=(2, 4), mlp_bytes=(14, 28)),
    "gptj": Family("packed"),
    "granite": Family("packed varlen whole_logits liger"),
    "granite_swa": Family("packed whole_logits"),
    "granitemoe": Family("packed varlen whole_logits counted_experts"),
    "granitemoe_swa": Family("packed whole_logits counted_experts"),
    "granitemoehybrid": Family("separated varlen whole_logits"),
    "granitemoeshared": Family("packed varlen whole_logits counted_experts"),
    "helium": Family("packed varlen fp32_norms"),
    "hunyuan_v1_dense": Family("packed varlen head_norms liger"),
    "hunyuan_v1_moe": Family("packed varlen counted_experts"),
    "hy_v3": Family("packed varlen counted_experts"),
    "hyperclovax": Family("packed varlen whole_logits"),
    "ibert": Family("uncounted"),
    "internlm3": Family("packed varlen"),
    "iquestcoder": Family("packed varlen"),
    "jais2": Family("packed varlen"),
    "jamba": Family("leaks"),
    "jetmoe": Family("packed varlen counted_experts"),
    "kimi_linear": Family("separated uncounted"),
    "kolibri1": Family("packed varlen counted_experts"),
    "laguna": Family("packed varlen uncounted"),
    "lfm2": Family("separated varlen uncounted"),
    "lfm2_moe": Family("separated varlen uncounted"),
    "lfm3": Family("separated varlen uncounted"),
    "llama": Family("packed varlen liger tensor_parallel context_parallel", parts=_llama_like(_full)),
    "llama4_text": Family("packed varlen whole_logits fails_with_liger"),
    "longformer": Family("uncounted"),
    "luke": Family("uncounted"),
    "mamba": Family("leaks"),
    "mamba2": Family("leaks"),
    "mellum": Family("packed varlen counted_experts"),
    "mimo_v2_flash": Family("packed uncounted"),
    "minicpm3": Family("packed uncounted"),
    "minimax": Family("leaks"),
    "minimax_m2": Family("packed varlen counted_experts"),
    "ministral": Family("packed varlen"),
    "ministral3": Family("packed varlen"),
    "mistral": Family("packed varlen liger tensor_parallel context_parallel", parts=_llama_like(_by_window)),
    "mixtral": Family("packed varlen counted_experts expert_parallel expert_and_tensor_parallel fails_with_liger"),
    "mobilebert": Family("uncounted"),
    "modernbert-decoder": Family("packed varlen"),
    "modernvbert": Family("uncounted"),
    "mpt": Family("leaks"),
    "mra": Family("uncounted"),
    "nanochat": Family("packed varlen whole_logits"),
    "nemotron": Family("packed varlen liger"),
    "nemotron_h": Family("separated varlen uncounted"),
    "neomme": Family("uncounted"),
    "nystromformer": Family("uncounted"),
    "olmo": Family("packed varlen"),
    "olmo2": Family("packed varlen head_norms fp32_norms liger"),
    "olmo3": Family("packed varlen head_norms fp32_norms liger"),
    "olmo_hybrid": Family("separated varlen uncounted"),
    "olmoe": Family("packed varlen head_norms counted_experts expert_parallel expert_and_tensor_parallel"),
    "opt": Family("leaks"),
    "perceiver": Family("uncounted"),
    "persimmon": Family("packed varlen"),
    "phi": Family("packed varlen"),
    "phi3": Family("packed varlen liger tensor_parallel context_parallel"),
    "phimoe": Family("packed varlen counted_experts"),
    "qwen2": Family("packed varlen liger tensor_parallel context_parallel", parts=_llama_like(_by_layer)),
    "qwen2_moe": Family("packed varlen counted_experts"),
    "qwen3": Family("packed varlen head_norms liger tensor_parallel context_parallel", parts=_llama_like(_by_layer)),
    "qwen3_5_moe_text": Family("separated varlen uncounted"),
    "qwen3_5_text": Family("separated varlen uncounted"),
    "qwen3_moe": Family("packed varlen head_norms counted_experts expert_parallel expert_and_tensor_parallel"),
    "qwen3_next": Family("separated varlen uncounted"),
    "reformer": Family("uncounted"),
    "rwkv": Family("leaks"),
    "seed_oss": Family("packed varlen"),
    "smollm3": Family("packed varlen liger"),
    "solar_open": Family("packed varlen counted_experts"),
    "stablelm": Family("packed varlen"),
    "starcoder2": Family("packed varlen tensor_parallel"),
    "ultravbert": Family("uncounted"),
    "vaultgemma": Family("packed whole_logits", score_bytes=(8, 8)),
    "xglm": Family("leaks"),
    "xlm": Family("not_causal"),
    "xlnet": Family("not_causal tokens_first"),
    "xlstm": Family("whole_logits leaks"),
    "xmod": Family("uncounted"),
    "youtu": Family("packed uncounted"),
}
PIPELINED = frozenset(name for name, family in FAMILIES.items() if family.parts)
NOT_KNOWN = Family()


@cache
def families(fact: str) -> frozenset[str]:
    """Return the families (`model_type`) of which a word of FACTS is true."""
    assert fact in FACTS, fact
    return frozenset(name for name, family in FAMILIES.items() if fact in family.words.split())


# Families that are read, trained, exported and read by plain transformers (tests/unit/test_round_trip.py and, with
# constants, test_constants.py); "bert" to "roformer" as masked language models.
ROUND_TRIP = frozenset(
    """
    afmoe apertus arcee aria_text axk1 bamba bert bloom cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 distilbert dots1 electra ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo gemma2
    gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_neox gpt_oss gptj granite
    granitemoe granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 jamba jetmoe kimi_linear
    kolibri1 laguna lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 mimo_v2_flash minimax minimax_m2
    ministral ministral3 mistral mixtral modernbert mpnet mpt nemotron nemotron_h olmo2 olmo3 olmo_hybrid olmoe opt
    phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma roberta
    roformer seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma zaya
    """.split()
)
# Families of the published chat templates that are compared with transformers and TRL (test_known_templates.py,
# test_published_templates, with TRL 1.16).
TEMPLATED = frozenset(
    """
    cohere cohere2 deepseek_v3 gemma gemma2 gemma3_text gemma4_text glm4_moe gpt_oss lfm2 llama nemotron_h phi3 qwen2
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    """.split()
)
# Families of models that also read images or sound, whose text part is trained alone: on rows of text its logits are
# those of the whole model (tests/unit/test_packaged.py). Not so in aya_vision and cohere2_vision, which leave out the
# scale of a Cohere's logits.
PACKAGED = frozenset(
    """
    aria deepseek_vl gemma3 gemma3n gemma4 gemma4_unified got_ocr2 idefics3 internvl lfm2_vl llama4 llava llava_next
    llava_onevision mistral3 paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
    """.split()
)
# Of these, the families whose output head is the embedding unless the outer config says otherwise.
TIED_PACKAGES = frozenset(
    "deepseek_vl gemma3 gemma3n gemma4 gemma4_unified got_ocr2 internvl lfm2_vl mistral3 paligemma".split()
)
# Text parts without a causal class of their own: the family that computes the same, and the fields that it needs.
# Positions in three dimensions (mrope) are one position three times in a text.
TEXT_TWINS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}


def text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that describe the text part, with the family that is trained.

    Older files of some families (qwen2_vl) have them beside vision_config instead of in text_config.
    """
    family = fields.get("model_type")
    if str(family) not in PACKAGED:  # a damaged file may have anything there
        return fields
    inner = fields.get("text_config")
    inner = inner if isinstance(inner, dict) else fields
    own = f"{family}_text" if inner is fields else inner.get("model_type")
    twin, _ = TEXT_TWINS.get(str(own), (own, {}))
    tied = fields.get("tie_word_embeddings", family in TIED_PACKAGES)  # the outer config is asked, see packaged.py
    return {**inner, "model_type": twin, "tie_word_embeddings": tied}


# Config fields for dropout of attention probabilities.
_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def attention_dropout(fields: Mapping[str, Any]) -> str | None:
    """Return "key is rate" for the config's dropout of attention probabilities, None for a rate of 0."""
    return next((f"{name} is {fields[name]}" for name in _DROPOUT if fields.get(name)), None)


def looks_ahead(fields: Mapping[str, Any]) -> str | None:
    """Return "key is value" of a decoder's config whose positions see following ones (EmbeddingGemma), else None."""
    ahead = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}  # not "vision": images alone
    return next((f"{key} is {fields[key]}" for key, values in ahead.items() if fields.get(key) in values), None)


def without_varlen(fields: Mapping[str, Any]) -> str | None:
    """Say why a model has no varlen attention, by its config's fields; None where it has."""
    if fields.get("model_type") not in families("varlen"):
        return f"a {fields.get('model_type')} computes attention in its own way"
    rate, ahead = attention_dropout(fields), looks_ahead(fields)
    return f"{rate}, and it has no dropout" if rate else f"{ahead}, and it is causal" if ahead else None


def allow(uses: list[str] | None, use: str, refusal: str, fails: bool = False) -> None:
    """Let a run use something with a family of which nobody has proven that it works, or raise ConfigurationError.

    Args:
        uses: gets `use`, for the header, run.json and the card; None without `model.unproven`.
        use: what is used, and how the user can prove it.
        refusal: the error's text.
        fails: whether it is known to fail; then it is refused whatever `uses` is.
    """
    if fails:
        raise ConfigurationError(refusal)
    if uses is None:
        raise ConfigurationError(f"{refusal}; or try it with model.unproven: true, and prove it yourself")
    if use not in uses:
        uses.append(use)


def may_be_tried(dimension: str, family: str) -> bool:
    """Whether `model.unproven` may let a family pass that is not proven under tp, cp, ep or pp."""
    # elsewhere tokens may meet outside of an attention function that can be replaced
    return dimension in ("tp", "ep") or (dimension == "cp" and family in families("packed") & families("varlen"))


def unproven_uses(model: PreTrainedModel) -> list[str] | None:
    """Return what `allow` has let pass for this skeleton; None without `model.unproven`."""
    return vars(model).get("unproven_uses")
