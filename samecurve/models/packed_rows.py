"""Keeps the documents of packed rows apart in families whose own code does not (FACTS: separated).

Masks: some models make theirs without position_ids. Here the functions that make them get those of the micro-batch.

Recurrent layers (Mamba-2, gated delta rules, short convolutions): transformers computes them by functions of the
family's module, whose CUDA kernels know documents and whose PyTorch code does not (transformers 5.23 raises ValueError,
or mixes the documents). Here each function, kernel or not, gets longer rows in which a gap follows each document. A
convolution of a document reads nothing but the gap before it, and in a gap the state decays to 0. Gaps end at multiples
of a chunk, so that no sum over a chunk's logarithms holds a document behind a gap. Each module is still called once,
whatever its rows, as ZeRO-3 and FSDP need. What mixes no tokens (projections, experts, norms) sees no gap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from samecurve.errors import ConfigurationError
from samecurve.models.attention import mask_facts
from samecurve.models.lora import is_adapted
from samecurve.specs.model_families import allow, families

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CHUNK = 64  # tokens; of the gated delta rules in transformers and flash-linear-attention
GAP = 7  # the least tokens between documents: a convolution over 8 tokens reads no further
_END = 200.0  # exp(-200) is 0 in fp32
SEPARATED_FROM = (5, 23)  # the transformers whose functions models/packed_rows.py changes
_CHANGED = "keeps_documents_apart"  # an attribute of the functions that replace transformers'


class Gaps(NamedTuple):
    """Rows with gaps between their documents.

    Attributes:
        places: int64 (rows, tokens), the place of each token in the longer row.
        length: tokens of a longer row.
    """

    places: Tensor
    length: int

    @classmethod
    def of(cls, starts: Tensor, shape: torch.Size) -> Gaps:
        """Lay documents apart.

        Args:
            starts: (documents + 1,), start of each document and end of the last one where rows are concatenated.
            shape: (rows, tokens).
        """
        starts = starts.long()
        sizes, row = starts.diff(), starts[:-1] // shape[1]
        blocks = (sizes + GAP + CHUNK - 1) // CHUNK * CHUNK
        begins = blocks.cumsum(0) - blocks
        lengths = torch.zeros(shape[0], dtype=torch.long, device=starts.device).index_add(0, row, blocks)
        begins -= (lengths.cumsum(0) - lengths)[row]
        places = torch.arange(shape.numel(), device=starts.device) + (begins - starts[:-1]).repeat_interleave(sizes)
        return cls(places.view(shape), int(lengths.max()))

    def spread(self, tensor: Tensor, fill: Tensor | float = 0.0) -> Tensor:
        """Lay (rows, tokens, ...) out as (rows, length, ...), with `fill` in the gaps."""
        longer = torch.zeros(tensor.shape[0], self.length, *tensor.shape[2:], dtype=tensor.dtype, device=tensor.device)
        return (longer + fill).to(tensor.dtype).scatter(1, self._index(tensor), tensor)

    def collect(self, tensor: Tensor) -> Tensor:
        """Undo `spread`."""
        return tensor.gather(1, self._index(tensor))

    def _index(self, tensor: Tensor) -> Tensor:
        places = self.places.view(*self.places.shape, *[1] * (tensor.dim() - 2))
        return places.expand(*self.places.shape, *tensor.shape[2:])


def install(model: nn.Module) -> bool:
    """Let a family's functions keep documents apart, for the whole process.

    Args:
        model: with or without the wrappers of its strategy and adapter.

    Returns:
        Whether the model takes a further argument for packed rows, `gaps: Gaps`.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    if getattr(config, "model_type", None) not in families("separated"):
        return False
    homes = {type(module).__module__ for module in model.modules()}
    recurrent = False
    for home in (sys.modules[name] for name in homes if name.startswith("transformers.models.")):
        for name, apart in _FUNCTIONS.items():
            if plain := vars(home).get(name):
                recurrent |= apart is not None
                if not hasattr(plain, _CHANGED):
                    setattr(home, name, _with_gaps(plain, apart) if apart else _with_positions(plain))
        if _COMBINED in vars(home) and is_adapted(
            model
        ):  # it would take the base layer's weight of an adapted out_proj
            setattr(home, _COMBINED, lambda *args, **kwargs: None)
    return recurrent


def _with_positions(plain: Callable) -> Callable:
    """Wrap a function that makes masks: its documents are those of the micro-batch."""

    @wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        positions = mask_facts.known().positions
        return plain(*args, **({} if positions is None else {"position_ids": positions}) | kwargs)

    vars(make)[_CHANGED] = True
    return make


def _with_gaps(plain: Callable, apart: Callable) -> Callable:
    @wraps(plain)
    def function(*args: Any, gaps: Gaps | None = None, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if gaps is None else apart(plain, gaps, *args, **kwargs)

    vars(function)[_CHANGED] = True
    return function


def _convolution(plain: Callable, gaps: Gaps, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`inputs` and the result: (rows, channels, tokens)."""
    if weight.shape[-1] > GAP + 1:
        raise ConfigurationError(
            f"data.packing: found true, but the model has convolutions over {weight.shape[-1]} tokens, which reach "
            f"across the gap of {GAP} tokens that is put between packed documents; set data.packing to false"
        )
    outputs = plain(gaps.spread(inputs.mT).mT.contiguous(), weight, *args, **kwargs)
    return gaps.collect(outputs.mT).mT


def _delta_rule(plain: Callable, gaps: Gaps, *inputs: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple:
    """`inputs`: query, key and value; `g`: the logarithm of the decay. All are (rows, tokens, heads, ...)."""
    query, key, value = map(gaps.spread, inputs)
    kwargs["cu_seqlens"] = None
    outputs, state = plain(query, key, value, g=gaps.spread(g, -_END), beta=gaps.spread(beta), **kwargs)
    return gaps.collect(outputs), state


def _scan(plain: Callable, gaps: Gaps, hidden: Tensor, dt: Tensor, a: Tensor, *inputs: Tensor, **kwargs: Any) -> Tensor:
    """Mamba-2's scan. `dt`: (rows, tokens, heads); `a`: (heads,), negative; `inputs`: B and C."""
    b, c = map(gaps.spread, inputs)
    steps = gaps.spread(dt, (_END / -a.detach()).clamp(max=1e30))
    kwargs["chunk_size"] = CHUNK
    return gaps.collect(plain(gaps.spread(hidden), steps, a, b, c, **kwargs))


_COMBINED = "mamba2_split_conv1d_scan_combined"
# By the names of functions in transformers' modules. None: one that makes a mask.
_FUNCTIONS: dict[str, Callable | None] = {
    "create_causal_mask": None,
    "create_sliding_window_causal_mask": None,
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    # a kernel for all of these; without it the layer calls them one by one
    _COMBINED: lambda plain, gaps, *args, **kwargs: None,
}


def check_packing(config: PreTrainedConfig, packing: bool, sequence_length: int, uses: list[str] | None = None) -> None:
    """Raise ConfigurationError if rows are packed and a document's logits could depend on other documents.

    Args:
        config: the model's.
        packing: `data.packing`.
        sequence_length: `batch.sequence_length`, in tokens.
        uses: see `allow`; a family that is known to leak is refused whatever it is.
    """
    if not packing:
        return
    if config.model_type not in families("packed") | families("separated"):
        fails = config.model_type in families("leaks")
        text = "mixes packed documents" if fails else "is not known to keep packed documents apart"
        allow(
            uses,
            f"packed rows of a {config.model_type}; run `python -m samecurve inspect RECIPE --leak_test`",
            f"data.packing: found true, but a {config.model_type} {text}: they would read each other, and nothing "
            "would show it; set data.packing to false (and data.group_by_length to true)",
            fails,
        )
    known, now = SEPARATED_FROM, version("transformers")
    if config.model_type in families("separated") and tuple(map(int, now.split(".")[:2])) < known:
        raise ConfigurationError(
            f"data.packing: found true, but packed documents of a {config.model_type} are kept apart by changes to "
            f"transformers {'.'.join(map(str, known))} and later, and {now} is installed; install a later one, or set "
            "data.packing to false"
        )
    # longrope chooses its angles by the largest position of a micro-batch
    # (transformers.modeling_rope_utils.dynamic_rope_update)
    parameters = getattr(config, "rope_parameters", None) or {}
    sections = [parameters, *(by_layer for by_layer in parameters.values() if isinstance(by_layer, dict))]
    limits = [one["original_max_position_embeddings"] for one in sections if one.get("rope_type") == "longrope"]
    limit = min(limits, default=None)
    if limit is not None and sequence_length > limit:
        raise ConfigurationError(
            f"data.packing: found true, but a {config.model_type} with rope_type longrope chooses its rotary angles by "
            f"the longest document of a micro-batch where batch.sequence_length ({sequence_length}) is above "
            f"original_max_position_embeddings ({limit}), so the curve would depend on the micro-batch; set "
            f"data.packing to false, or batch.sequence_length to at most {limit}"
        )
