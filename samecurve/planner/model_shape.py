"""Dimensions of a decoder-only transformer, and the parameters that follow from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config.rules_model import size_problems
from samecurve.errors import ConfigurationError
from samecurve.specs.model_families import FAMILIES, NOT_KNOWN, families, text_fields
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    from samecurve.config.schema import Adapter

WeightShape = tuple[int, int]  # (n, 1) of a vector


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model.

    Attributes:
        ffn: width of one MLP, of one expert in a mixture.
        gated: whether the MLP has three matrices (SwiGLU) or two (GELU).
        tied: whether the input embedding is also the output head.
        experts: MLPs per layer, 0 for a dense model.
        top_k: experts that a token visits.
        positions: learned positions, 0 for rotary ones.
        head_dim: width of one attention head where it is not hidden / heads, else 0.
        head_norms: whether queries and keys are normalized.
        post_norms: whether attention and MLP have norms behind them, too.
        fp32_norms: whether norms scale in fp32, as Gemma's.
        score_bytes: what eager attention keeps of a score in 16 bits and in fp32.
        mlp_bytes: what a gated MLP keeps per element of its width, in 16 bits and in fp32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    experts: int = 0
    top_k: int = 0
    positions: int = 0
    head_dim: int = 0
    head_norms: bool = False
    post_norms: bool = False
    fp32_norms: bool = False
    score_bytes: tuple[int, int] = (6, 4)
    mlp_bytes: tuple[int, int] = (8, 16)

    @property
    def kv_share(self) -> float:
        """Width of the keys divided by the width of the queries; 1 without grouped-query attention."""
        return self.kv_heads / self.heads

    @property
    def attention_width(self) -> int:
        """Width a of the queries of all heads; the hidden size, but 2 h in Qwen3-0.6B."""
        return self.heads * self.head_dim if self.head_dim else self.hidden

    @cached_property
    def attention_weights(self) -> list[WeightShape]:
        """Shapes of one layer's attention, and of its norms and biases, of which a GPT has 9 h + f."""
        width, kv = self.attention_width, round(self.attention_width * self.kv_share)
        matrices = [(width, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, width)]
        vectors = [self.hidden] * 2 if self.gated else [*([self.hidden] * 9), self.ffn]
        return [*matrices, *((size, 1) for size in vectors)]

    @cached_property
    def mlp_weights(self) -> list[WeightShape]:
        """Shapes of one layer's MLP, or of all its experts together."""
        inner = self.ffn * max(self.experts, 1)
        return [(inner, self.hidden)] * (2 if self.gated else 1) + [(self.hidden, inner)]

    @cached_property
    def router_weights(self) -> list[WeightShape]:
        """Shape of one layer's router, empty without experts."""
        return [(self.experts, self.hidden)] if self.experts else []

    @cached_property
    def layer_weights(self) -> list[WeightShape]:
        """Shapes of one layer's weights, those of all experts together."""
        return [*self.attention_weights, *self.mlp_weights, *self.router_weights]

    @cached_property
    def embedding_weights(self) -> list[WeightShape]:
        return [(self.vocab, self.hidden), *([(self.positions, self.hidden)] if self.positions else [])]

    @property
    def final_weights(self) -> list[WeightShape]:
        return [(self.hidden, 1)]

    @cached_property
    def head_weights(self) -> list[WeightShape]:
        """Shape of the output head's weight, empty where it is the embedding's."""
        return [] if self.tied else [(self.vocab, self.hidden)]

    @property
    def weights(self) -> list[WeightShape]:
        """Shapes of all weights."""
        layers = self.layer_weights * self.layers
        return [*self.embedding_weights, *layers, *self.final_weights, *self.head_weights]

    @cached_property
    def layer_parameters(self) -> int:
        """Weights of one layer, all experts and their router included."""
        return elements(self.layer_weights)

    @cached_property
    def expert_layer_parameters(self) -> int:
        """Weights of one layer that expert parallelism divides."""
        return elements(self.mlp_weights) if self.experts else 0

    @property
    def dense_layer_parameters(self) -> int:
        """Weights of one layer that expert parallelism does not divide."""
        return self.layer_parameters - self.expert_layer_parameters

    @property
    def active_layer_parameters(self) -> float:
        """Weights of one layer's matrices that multiply a token, of top_k experts."""
        share = max(self.top_k, 1) / max(self.experts, 1)
        attention = [weight for weight in self.attention_weights if weight[1] > 1]
        return elements([*attention, *self.router_weights]) + share * elements(self.mlp_weights)

    @cached_property
    def embedding_parameters(self) -> int:
        return elements(self.embedding_weights)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, also where they are the embedding's."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All weights, the tied head once."""
        ends = [*self.embedding_weights, *self.final_weights, *self.head_weights]
        return self.layers * self.layer_parameters + elements(ends)


@dataclass(frozen=True)
class Frozen:
    """What an adapter makes of a model: frozen weights, and few that are trained.

    Attributes:
        trained: elements of the adapter, as a share of the model's.
        weight_bytes: of a frozen element, on average; without quantized weights' scales.
        layer_bytes: of an element of a layer, with its adapter, as it is gathered.
        scale_bytes: of all scales, which are whole on every rank.
        width: elements that the adapter keeps of a token in each layer.
        dequantized: elements of the largest quantized weight.
        trains_head: whether the output head is trained in full.
    """

    trained: float
    weight_bytes: float
    layer_bytes: float
    scale_bytes: float = 0
    width: int = 0
    dequantized: int = 0
    trains_head: bool = False


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDINGS, HEADS = ("embed_tokens", "wte", "embed_in", "word_embeddings"), ("lm_head", "embed_out")
EXPERTS = ("gate_up_proj", "down_proj")


def uncounted(adapter: Adapter) -> list[str]:
    """List the modules and weights that an adapter also trains and that `adapted` does not know."""
    modules = [name for name in adapter.modules_to_save or () if _last(name) not in (*EMBEDDINGS, *HEADS)]
    return [*modules, *(name for name in adapter.target_parameters or () if _last(name) not in EXPERTS)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def adapted(shape: ModelShape, adapter: Adapter, element_bytes: int) -> Frozen:
    """Describe a model with an adapter.

    A pattern, or names of other families than Llama's, count as all linear layers.

    Args:
        element_bytes: of a frozen weight that is not quantized.
    """
    linear = [*shape.attention_weights[:4], *([] if shape.experts else shape.mlp_weights)]
    names = ADAPTED if shape.gated else (*ADAPTED[:4], *ADAPTED[5:])
    asked = adapter.target_modules
    chosen = asked if not isinstance(asked, str) and set(asked) <= {*names} else names
    targets = [weight for name, weight in zip(names, linear, strict=False) if name in chosen]
    trained = sum(adapter.rank * (rows + columns) + adapter.dora * rows for rows, columns in targets)
    # each expert's own matrices, of its two stacked weights
    parameters = {_last(name) for name in adapter.target_parameters or ()}
    sums = {"gate_up_proj": (1 + shape.gated) * shape.ffn + shape.hidden, "down_proj": shape.hidden + shape.ffn}
    stacked = [size for name, size in sums.items() if name in parameters]
    trained += adapter.rank * max(shape.experts, 1) * sum(stacked)
    in_full = {_last(name) for name in adapter.modules_to_save or ()}
    ends = [shape.embedding_parameters] if in_full & {*EMBEDDINGS} else []
    trains_head = bool(in_full & {*HEADS} or (ends and shape.tied))
    ends += [shape.head_parameters] if trains_head and not (ends and shape.tied) else []
    packed, scale = {None: (0, 0), "4bit": (0.5, 1 / 64 + 4 / 64 / 256)}.get(adapter.quantization, (1, 0))
    own = elements(linear) if packed else 0
    rows = sum(weight[0] for weight in linear) if packed == 1 else 0
    layer = packed * own + element_bytes * (shape.layer_parameters - own)
    rest = element_bytes * (shape.parameters - shape.layers * shape.layer_parameters - sum(ends))
    return Frozen(
        trained=(shape.layers * trained + sum(ends)) / shape.parameters,
        weight_bytes=(shape.layers * layer + rest) / shape.parameters,
        layer_bytes=(layer + element_bytes * trained) / shape.layer_parameters,
        scale_bytes=shape.layers * (scale * own + 4 * rows),
        width=adapter.rank * (len(targets) + max(shape.top_k, 1) * len(stacked)),
        dequantized=max(map(math.prod, linear)) if packed else 0,
        trains_head=trains_head,
    )


def elements(weights: Iterable[WeightShape]) -> int:
    """Count the elements of weights of these shapes."""
    return sum(map(math.prod, weights))


# Dimensions of a model from the fields of a Hugging Face config, without transformers.


# The first name is Llama's, the others are those of older families.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads"),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k"),
    "positions": ("n_positions",),
    "head_dim": ("head_dim",),
}
NEEDED = ("layers", "hidden", "heads", "vocab")
TWO_MATRICES = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "gpt_bigcode"),
    *("nemotron", "persimmon", "arcee", "apertus", "codegen", "biogpt", "gpt_neox_japanese", "jais2", "nanochat"),
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet"),
)
# Defaults of transformers' classes where a config leaves them out. Other families do not tie by default.
TIED = (
    *("gpt2", "opt", "bloom", "falcon", "mpt", "starcoder2", "gpt_bigcode", "bert", "roberta", "xlm-roberta"),
    *("camembert", "electra", "mpnet", "modernbert", "gemma", "gemma2", "gemma3_text", "smollm3", "cohere", "cohere2"),
    *("gpt_neo", "gpt_neox_japanese", "biogpt", "jetmoe", "ernie4_5", "ernie4_5_moe", "modernbert-decoder"),
)
DEFAULTS = {"gemma3_text": {"heads": 8, "kv_heads": 4, "vocab": 262_208}}
HEAD_DIMS = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "glm4": 128}
# Fields of models whose layers are not those that the formulas count.
OTHER_LAYERS = {
    "is_encoder_decoder": "encoder-decoder models",
    "kv_lora_rank": "latent attention",
    "n_shared_experts": "shared experts",
    "num_shared_experts": "shared experts",
    "moe_num_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "shared_intermediate_size": "shared experts",
    "interleave_moe_layer_step": "dense layers between mixtures of experts",
    "mlp_only_layers": "dense layers between mixtures of experts",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "conv_L_cache": "convolutions",
    "kv_channels": "mixtures of attention",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "enable_moe_block": "experts beside a dense MLP",
    "num_kv_shared_layers": "keys and values of other layers",
    "use_double_wide_mlp": "MLPs of two widths",
    "attn_type_list": "linear attention",
}
SOFTMAX = {"full_attention", "attention", "sliding_attention", "chunked_attention"}  # of `layer_types`


def shape(fields: Mapping[str, Any], name: str, vocab: int | None = None) -> ModelShape:
    """Read the dimensions.

    Args:
        name: of the file, for messages.
        vocab: size of a tokenizer that is trained for the job; it wins over the config's.

    Raises:
        ConfigurationError: a needed field is missing or no positive whole number.
    """
    dims = {"vocab": vocab} if vocab else {}
    for key, names in NAMES.items():
        given = next((fields[alias] for alias in names if fields.get(alias) is not None), None)
        if given is not None and key not in dims:
            dims[key] = given
    dims = {**DEFAULTS.get(str(fields.get("model_type")), {}), **dims}
    problems = [f"{name}: {' or '.join(NAMES[key][:2])} is missing; give it" for key in NEEDED if key not in dims]
    problems += [
        f"{name}: {key}: the formulas do not cover {kind}" for key, kind in OTHER_LAYERS.items() if fields.get(key)
    ]
    others = sorted(set(map(str, fields.get("layer_types") or ())) - SOFTMAX)
    problems += [f"{name}: layer_types: the formulas do not cover {', '.join(others)}"] if others else []
    problems += [
        f"{name}: {NAMES[key][0]}: found {value!r}, expected a positive whole number"
        for key, value in dims.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < (key in NEEDED)  # others may be 0
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))
    family = fields.get("model_type")
    gated = family not in TWO_MATRICES
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        dims["kv_heads"] = 1  # Falcon's and GPTBigCode's configs also count heads that it makes one
    dims.setdefault("kv_heads", dims["heads"])
    dims.setdefault("ffn", 4 * dims["hidden"])
    dims.setdefault("head_dim", HEAD_DIMS.get(str(family), 0))
    if not dims["head_dim"] and dims["hidden"] % dims["heads"]:
        wide, heads = (next(alias for alias in NAMES[key] if fields.get(alias)) for key in ("hidden", "heads"))
        near = max(round(dims["hidden"] / dims["heads"]), 1) * dims["heads"]
        told = f"{name}: {wide}: found {dims['hidden']}, expected a multiple of {heads}, {dims['heads']}"
        raise ConfigurationError(f"{told}, such as {near}; or give head_dim, the width of a head")
    tied = fields.get("tie_word_embeddings", family in TIED)
    has_norms = {fact: family in families(fact) for fact in ("head_norms", "post_norms", "fp32_norms")}
    kept = FAMILIES.get(str(family), NOT_KNOWN)
    score_bytes, mlp_bytes = kept.score_bytes or ModelShape.score_bytes, kept.mlp_bytes or ModelShape.mlp_bytes
    return ModelShape(**dims, gated=gated, tied=bool(tied), **has_norms, score_bytes=score_bytes, mlp_bytes=mlp_bytes)


def read(path: str, source: str = "") -> dict[str, Any]:
    """Read a config.json, or that of a folder, or of a hub name in the local cache.

    Raises:
        ConfigurationError: it cannot be read; the message begins with `source`, the place that names `path`.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file() and path.count("/") == 1:  # OWNER/NAME
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):  # no name of the hub; the error below says so
            cached = try_to_load_from_cache(path, "config.json")
            file = Path(cached) if isinstance(cached, str) else file
    record = read_record(file, {"text_config?": (dict, None)})
    if record.is_absent:
        raise ConfigurationError(
            f"{source or f'{path}: '}no such file, folder or model in the local cache; give a config.json or its "
            f"folder, or download the model's config first (hf download NAME config.json)"
        )
    content = record.require(ConfigurationError, "give the config.json of a Hugging Face model")
    fields = text_fields(content)
    fields = fields.get("text_config") or fields  # of multimodal models whose text part is not trained alone
    if problems := [f"{file}: {key}: {text}" for key, text in size_problems(fields)]:
        raise ConfigurationError("\n".join(problems))
    return fields
