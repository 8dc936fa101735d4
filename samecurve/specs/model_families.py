"""Facts about model families: modules of pipeline stages; support for packing, attention, kernels, strategies; FLOPs.

Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samecurve.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """Module names of a model family's parts, and the attention of its layers.

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


def _llama_like(kinds: Callable[[PreTrainedConfig], list[str]]) -> Family:
    return Family("model.embed_tokens", "model.layers", "model.norm", kinds, rotary="model.rotary_emb")


FAMILIES = {
    "llama": _llama_like(_full),
    "mistral": _llama_like(_by_window),
    "qwen2": _llama_like(_by_layer),
    "qwen3": _llama_like(_by_layer),
    "gpt2": Family(
        "transformer.wte",
        "transformer.h",
        "transformer.ln_f",
        _full,
        positions="transformer.wpe",
        dropout="transformer.drop",
    ),
}

# Families that build block-diagonal masks from position_ids and carry no other state from document to document: a
# packed document has the same logits as alone (tests/unit/test_packed_rows.py), unless rope_type is longrope and rows
# are long (`check_packing`). In other families a packed document reads its neighbours, seen with transformers 5.23:
# bloom, falcon, mpt, opt, biogpt and xglm do not take positions from position_ids; mamba, lfm2, minimax and qwen3_next
# have a recurrent state. doge leaks with transformers 5.17 and sdpa.
PACKED = frozenset(
    """
    apertus arcee bitnet codegen cohere cohere2 diffllama ernie4_5 ernie4_5_moe exaone4 gemma gemma2 gemma3_text
    gemma4_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite granitemoe helium hunyuan_v1_dense jetmoe llama
    llama4_text ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe
    qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma
    """.split()
)

# Stored buffers that no forward pass changes, by the ends of their names (tests/unit/test_constants.py). A buffer of
# another name may learn by a rule of its own.
CONSTANTS = ("layer_scalar", "act_fn.beta", "act_fn.eps")

# Families of PACKED whose attention function can be replaced. codegen, gpt_neo and gptj compute attention themselves or
# choose it from their own tables; gemma2 and vaultgemma cap the scores.
VARLEN = PACKED - frozenset(("codegen", "gemma2", "gpt_neo", "gptj", "vaultgemma"))

# Decoder families that scale or cap their logits, so that the loss cannot be computed in chunks
# (losses/chunkable.py), with transformers 5.23.
WHOLE_LOGITS = frozenset(
    """
    cohere cohere2 cohere2_moe gemma2 granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    hyperclovax llama4_text nanochat vaultgemma xlstm
    """.split()
)

# What a layer keeps for the backward pass beside what Llama's keeps, by torch's MemTracker (transformers 5.23): norms
# of queries and keys; norms behind attention and MLP, before the residual is added; norms that scale in fp32.
HEAD_NORMS = frozenset(
    """
    exaone4 flex_olmo gemma3_text hunyuan_v1_dense olmo2 olmo3 olmoe qwen3 qwen3_moe
    """.split()
)
POST_NORMS = frozenset(("gemma2", "gemma3_text", "glm4"))
FP32_NORMS = frozenset(("gemma", "gemma2", "gemma3_text", "helium", "olmo2", "olmo3"))

# Families without sdpa: the bytes that a layer keeps of an attention score, in 16 bits and in fp32.
EAGER = {"gemma2": (8, 8), "gpt_oss": (2, 4), "vaultgemma": (8, 8)}

# Bytes that an MLP keeps per element of its width, in 16 bits and in fp32, if they are not 8 and 16: clamps and a
# sigmoid of its own.
MLP_BYTES = {"gpt_oss": (14, 28)}

# Config fields for dropout of attention probabilities.
_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def attention_dropout(fields: Mapping[str, Any]) -> str | None:
    """Return "key is rate" for the config's dropout of attention probabilities, None for a rate of 0."""
    return next((f"{name} is {fields[name]}" for name in _DROPOUT if fields.get(name)), None)


# A recurrence's parameters, by their own name: the logarithm of its decay, the bias of its step and its skip
# connection. Mamba's authors keep them in fp32 and without weight decay (github.com/state-spaces/mamba,
# mamba_simple.py and mamba2.py: `_no_weight_decay`, "keep in fp32"); so do those of GatedDeltaNet and Kimi Linear.
RECURRENT = frozenset(("A_log", "D", "dt_bias"))


# Families whose loss and gradients with the kernels of liger-kernel 0.8.5 equal PyTorch's. Measured with transformers
# 5.17 and 5.23 in Triton's interpreter (tests/unit/test_liger.py). Liger's own list is longer. Of the families left
# out, llama4_text had a loss 1 % off where rows have their own positions; experts (mixtral) do not run in the
# interpreter.
LIGER = frozenset(
    """
    exaone4 gemma gemma2 gemma3_text glm4 granite hunyuan_v1_dense llama mistral nemotron olmo2 olmo3 phi3 qwen2 qwen3
    smollm3
    """.split()
)


# Families whose FLOPs per token differ from the formula in flops.py, with transformers 5.23, by torch's counter or by
# their code. They have other attention (big_bird, convbert, fnet, longformer, mra, nystromformer, reformer), shorten
# the sequence or have a narrower one inside (canine, funnel, mobilebert, perceiver), or have weights that not every
# token is multiplied with (ibert, luke, xmod, and models that also read images).
UNCOUNTED = frozenset(
    """
    big_bird canine convbert fnet funnel ibert longformer luke mobilebert modernvbert mra neomme nystromformer perceiver
    reformer ultravbert xmod
    """.split()
)


# Mixtures of experts whose FLOPs per token are the formula's with N counting the active experts alone, by torch's
# counter. In others every token meets all experts (llama4_text), or attention is of another kind (minimax).
COUNTED_EXPERTS = frozenset(
    """
    flex_olmo gpt_oss granitemoe granitemoeshared jetmoe mixtral olmoe phimoe qwen2_moe qwen3_moe
    """.split()
)

# Families that were compared with one process under tensor parallelism (tests/distributed/test_tensor_parallel.py).
# transformers' plan of gpt_neox leaves its embedding and head whole.
TENSOR_PARALLEL = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "starcoder2")
)

# Families that were compared with one process under context parallelism (tests/distributed/test_context_parallel.py).
CONTEXT_PARALLEL = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3"))

# Mixtures of experts that were compared with one process under expert parallelism
# (tests/distributed/test_expert_parallel.py).
EXPERT_PARALLEL = frozenset(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"))

# Those that were also compared under expert and tensor parallelism together, in which attention and vocabulary are cut.
# transformers has no plan that cuts gpt_oss.
EXPERT_AND_TENSOR_PARALLEL = EXPERT_PARALLEL - {"gpt_oss"}


def check_packing(config: PreTrainedConfig, packing: bool, sequence_length: int) -> None:
    """Raise ConfigurationError if rows are packed and a document's logits could depend on other documents.

    Args:
        config: the model's.
        packing: `data.packing`.
        sequence_length: `batch.sequence_length`, in tokens.
    """
    if not packing:
        return
    if config.model_type not in PACKED:
        raise ConfigurationError(
            f"data.packing: found true, but a {config.model_type} is not known to keep packed documents apart: they "
            "would read each other, and nothing would show it; set data.packing to false (and data.group_by_length to "
            "true)"
        )
    limit = _longrope_limit(config)
    if limit is not None and sequence_length > limit:
        raise ConfigurationError(
            f"data.packing: found true, but a {config.model_type} with rope_type longrope chooses its rotary angles by "
            f"the longest document of a micro-batch where batch.sequence_length ({sequence_length}) is above "
            f"original_max_position_embeddings ({limit}), so the curve would depend on the micro-batch; set "
            f"data.packing to false, or batch.sequence_length to at most {limit}"
        )


def _longrope_limit(config: PreTrainedConfig) -> int | None:
    """Return the length in tokens above which longrope uses its other angles; None for other rotary embeddings.

    The choice is made by the largest position of a micro-batch (transformers.modeling_rope_utils.dynamic_rope_update).
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(by_layer for by_layer in parameters.values() if isinstance(by_layer, dict))]
    found = [one["original_max_position_embeddings"] for one in each if one.get("rope_type") == "longrope"]
    return min(found, default=None)
