"""Floating-point operations (FLOPs) of a training step, and the peak FLOP/s of a device.

Model FLOPs per trained token are 6 N + 12 L h s (PaLM, arXiv:2204.02311, appendix B): N parameters that take part in
matrix multiplications, L layers, h = heads x head size, s the sequence length. The forward pass is one third of that,
the backward pass two thirds. Conventions:

- N excludes parameters that are only looked up (input and position embeddings). A tied embedding is also the output
  head and counts once. Weights that several layers share (ALBERT's) count once per layer. Of a mixture of experts, the
  active experts count: k of E, whatever the router chooses.
- s is batch.sequence_length. With data.group_by_length a step counts the width to which its rows are padded.
- As in PaLM, attention is not halved for the causal mask, and packed or windowed rows count as full ones. The causal
  half gives 6 N + 6 L h s, which run.json also reports.
- Frozen parameters get no gradient, which is a third of the 6; with an adapter they count 4.
- Hardware FLOPs add the part of the decoder layers' forward pass that activation checkpointing repeats (not the output
  head's) and the extra forward passes of gradient caching, of a momentum encoder and of `model.router_loss: batch`. A
  repeated layer's last multiplication is counted, although PyTorch skips it, because nothing needs its result.
- A teacher's forward pass is in neither number.

PyTorch's FLOP counter finds 2 N' + 4 L h s forward and exactly twice that backward (tests/unit/test_flops_counted.py:
the families of model_families.py, and encoders; diffllama computes attention twice). N' is N without norms and biases,
which the convention counts although they multiply no matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from samecurve.models import matmul_speed
from samecurve.specs import gpus
from samecurve.specs.model_families import families
from samecurve.specs.precision import DTYPES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

CONVENTION = (
    "model_per_token: 6 N + 12 L h s for forward and backward, attention over the full square (PaLM, "
    "arXiv:2204.02311); metrics.jsonl's mfu is by it, with the s of each step under data.group_by_length. "
    "causal_per_token: 6 N + 6 L h s, the half that a causal mask leaves; mfu by it is mfu x causal_per_token / "
    "model_per_token. hardware_per_token: model_per_token and what is computed twice; hfu is by it. peak_tflops is the "
    "precision's, also where fp8 multiplies some matrices faster; on a CPU it is the fastest precision's."
)
# What configs call layers that have no attention between tokens, or, of zamba, not that alone.
RECURRENT_KINDS = {"linear_attention", "mamba", "recurrent", "hybrid"}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per trained token.

    Attributes:
        model: forward and backward pass.
        hardware: `model` plus everything that is recomputed.
        attention: part of `model` for attention between tokens, over the full square.
        head: part of `model` for the output head.
        hardware_attention: part of `hardware` for attention between tokens.
    """

    model: float
    hardware: float
    attention: float = 0.0
    head: float = 0.0
    hardware_attention: float = 0.0

    @property
    def causal(self) -> float:
        """FLOPs as `model`, with only the half of attention that a causal mask leaves."""
        return self.model - self.attention / 2


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s of one device, and the source of the number."""

    tflops: float
    source: str


def token_flops(
    model: PreTrainedModel,
    sequence_length: int,
    recompute: float,
    rehearsed: int = 0,
    recompute_attention: float | None = None,
    routed: bool = False,
) -> TokenFlops | None:
    """Compute the FLOPs per trained token, or None if the formula does not apply (see `_is_known`).

    Args:
        model: the model, also on the meta device.
        sequence_length: tokens per row.
        recompute: share of the layers' forward pass that activation checkpointing repeats, 1 for full.
        rehearsed: number of additional forward passes without gradients (see Task.context and Task.momentum_queue).
        recompute_attention: repeated share of attention's products; None: as `recompute`.
        routed: whether there is an additional forward pass without the output head (model.router_loss: batch).
    """
    config = model.config.get_text_config()
    if model.config.model_type in families("uncounted") or model.config.is_encoder_decoder or not _is_known(config):
        return None
    attention = 12 * sum(map(_attention_width, _layers(config))) * sequence_length
    parameters, frozen, head = _multiplied_parameters(model)
    attention_share = recompute if recompute_attention is None else recompute_attention
    products = 2 * ((recompute + routed) * (parameters - head) + rehearsed * parameters)
    attention_again = (attention_share + rehearsed + routed) * attention / 3
    forward_backward = 6 * parameters - 2 * frozen + attention
    output = model.get_output_embeddings()
    per_weight = 6 if output is not None and output.weight.requires_grad else 4
    hardware = forward_backward + products + attention_again
    return TokenFlops(forward_backward, hardware, attention, per_weight * head, attention + attention_again)


def stated(flops: TokenFlops | None, peak: Peak | None) -> dict:
    """Report the FLOPs, their convention and one device's peak for run.json."""
    if flops is None:
        return {"convention": None, "peak_tflops": peak and peak.tflops, "peak_source": peak and peak.source}
    return {
        "convention": CONVENTION,
        "model_per_token": flops.model,
        "causal_per_token": flops.causal,
        "hardware_per_token": flops.hardware,
        "peak_tflops": peak and peak.tflops,
        "peak_source": peak and peak.source,
    }


def _is_known(config: PreTrainedConfig) -> bool:
    """Whether the formula applies to a model.

    Not for a mixture of experts that is not known to multiply a token with its active experts alone; not for attention
    that also multiplies positions (DeBERTa's) or whose size the config does not give; not for recurrent layers.
    """
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if kinds & RECURRENT_KINDS:
        return False
    if num_experts(config) > 1 and config.model_type not in families("counted_experts"):
        return False
    if getattr(config, "relative_attention", False):
        return False
    layers = _layers(config) if hasattr(config, "num_hidden_layers") else []
    return bool(layers) and all(hasattr(layers[0], name) for name in ("num_attention_heads", "hidden_size"))


def num_experts(config: PreTrainedConfig) -> int:
    """Number of experts of a layer that has them; 0 for a dense model."""
    return max(getattr(config, name, None) or 0 for name in EXPERT_COUNTS)


def _layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """List one config per layer. If layers differ (gemma4), transformers 5.23 rejects reads of the common config."""
    count = config.num_hidden_layers * getattr(config, "inner_group_num", 1)  # ALBERT's: layers per group
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[index] for index in range(count)]
    return [config] * count


def _attention_width(layer: PreTrainedConfig) -> int:
    """Number of heads x head size."""
    heads = layer.num_attention_heads
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def _multiplied_parameters(model: PreTrainedModel) -> tuple[int, int, int]:
    """Count (N, frozen parameters in N, parameters of the output head). Tied weights count once, as the head."""
    from torch import nn

    output = model.get_output_embeddings()
    head = output.weight if output is not None else None
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    multiplied = [parameter for parameter in model.parameters() if id(parameter) not in looked_up]
    uses = _uses(model)
    frozen = sum(uses[id(parameter)] * parameter.numel() for parameter in multiplied if not parameter.requires_grad)
    total = sum(uses[id(parameter)] * parameter.numel() for parameter in multiplied)
    return int(total), int(frozen), head.numel() if head is not None else 0


def _uses(model: PreTrainedModel) -> dict[int, int | Fraction]:
    """Count how often a token is multiplied with each parameter, by the parameter's id.

    Several of ALBERT's num_hidden_layers share one group's weights (modeling_albert.py: AlbertTransformer). Experts are
    parameters with a first axis of all experts, of which a token meets num_experts_per_tok.
    """
    from torch import nn

    config = model.config
    uses: dict[int, int | Fraction] = dict.fromkeys(map(id, model.parameters()), 1)
    if (total := num_experts(config)) > 1 and config.model_type in families("counted_experts"):
        per_token = config.num_experts_per_tok
        if isinstance(per_token, list):  # one for each layer, as HunYuan has them: the mean
            per_token = Fraction(sum(per_token), len(per_token))
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            adapted = hasattr(module, "parameter_name")  # peft's layer around a stack, with matrices of each expert
            own += [p for name, p in module.named_parameters() if adapted and name.startswith("lora_")]
            if adapted or any(p.ndim == 3 and len(p) == total for p in own):
                # a fraction, because int() of the total would cut off a float that is rounded down
                uses |= {id(p): Fraction(per_token, total) for p in own}
    if config.model_type == "albert":
        num_layers, num_groups = config.num_hidden_layers, config.num_hidden_groups
        of_group = Counter(int(index / (num_layers / num_groups)) for index in range(num_layers))
        lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        (groups,) = (module for name, module in lists if name.endswith("albert_layer_groups"))
        uses |= {id(p): of_group[nth] for nth, group in enumerate(groups.children()) for p in group.parameters()}
    return uses


def table_peak(device_name: str, precision: str) -> Peak | None:
    """Look up the data sheet's peak for bf16, fp16, tf32 or fp32; None for unlisted GPUs and for slices of a GPU."""
    if re.search(r"MIG|-\d-\d+C", device_name):  # the second in a virtual machine: GRID A100-1-5C
        return None
    for row in gpus.rows():
        if row.device and re.search(row.device, device_name):
            return Peak(row.half if precision in ("bf16", "fp16") else getattr(row, precision), row.source)
    return None


def device_peak(device: torch.device, precision: str) -> Peak:
    """Look up the device's peak for the recipe's precision in the table, or measure the peak if it is not listed.

    fp32 means tf32 where PyTorch is configured to use tf32. On a GPU the measurement takes the better of the precision
    and fp32, which may be faster on an old GPU. On a CPU it takes the best of all precisions, because the speed of an
    emulated precision says nothing about the CPU's peak.
    """
    import torch

    if device.type == "cuda":
        if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
            precision = "tf32"
        if known := table_peak(torch.cuda.get_device_name(device), precision):
            return known
    # tf32 is no dtype: fp32 matrices are multiplied in it where PyTorch is configured so
    tried = tuple(DTYPES) if device.type == "cpu" else tuple({"fp32", precision.replace("tf32", "fp32")})
    tflops, best = matmul_speed.peak(device, tried)
    return Peak(tflops, f"measured with {best} matrix multiplications{', the fastest here' if len(tried) > 1 else ''}")
