"""Dropout whose masks depend on the row and the step, not on the process, the micro-batch or the strategy.

A mask is a pure function of (seed, step, the sequence's place in the global batch, index of the value in the sequence,
name of the module). So all strategies, worlds and micro-batch sizes drop the same values, also when activations are
recomputed, when layers are compiled and after a resume. Documents of a packed row draw by their place in the row. The
noise of a mixture of experts' routers is drawn in the same way.

The index counts values of the whole tensor of a sequence: (token, feature) of hidden states, (head, query, key) of
attention probabilities. A model that is cut by heads, features or tokens can draw its part of the same mask.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward

from samecurve.distributed import rng_state
from samecurve.errors import ConfigurationError
from samecurve.models import routers
from samecurve.models.dropout_bits import keep_mask, keys_of, moved, uniform
from samecurve.specs.model_families import families

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Forwards that drop values by a function, not by a module, as OPT's layers do.
_FUNCTION = re.compile(r"functional\.dropout\(|\bF\.dropout\(|dropout_add\(|\bdropout_p=")
# Forwards that call one of transformers' attention functions with a rate.
_ATTENTION = re.compile(r"\bdropout=")
# DeBERTa and Funnel drop values of their tables of relative positions, which have no rows of the batch.
_WITHOUT_ROWS = ("pos_dropout", "sin_dropout", "cos_dropout")
_NO_SEQUENCE = 2**62  # stands for values without a row; no sequence has such a number
_NOISE = re.compile("jitter|noise|layerdrop|drop_path|stochastic")  # keys of a config


class SequenceShard(NamedTuple):
    """The `index`-th of `count` equal parts along `axis`, of the rank's chunks (`of_chunks`) or of whole sequences."""

    axis: int
    index: int
    count: int
    of_chunks: bool = True


class KeyedRows(Protocol):
    """Fields of a micro-batch that the keys need (data.micro_batch.MicroBatch)."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...

    @property
    def step(self) -> int: ...

    @property
    def places(self) -> Tensor | None: ...


class DropoutKeys:
    """Keys of the micro-batch that is computed, for all places of a model that drop values.

    Attributes:
        current: (places, sequences + 1, 2) int32 on the device; the last key is that of values without a row.
        chunks: indices of this rank's chunks among the equal ones into which the values of each sequence are cut.
        is_needed: False after the first training pass of a model in which no place drops values.
    """

    def __init__(self, seed: int, device: torch.device, config: PreTrainedConfig, chunks: tuple[int, ...] = (0,)):
        self.seed, self.device, self.config, self.chunks = seed, device, config, chunks
        self.current: Tensor | None = None
        self.is_needed = True
        self._sites: list[int] = []
        self._upcoming: Iterator[Tensor] = iter(())
        self._queued: list[Tensor] = []
        self._is_checked = False

    def add(self, name: str, part: SequenceShard | None = None) -> DropoutPlace:
        """Add a place by its unique name, where this rank has all values or a part of them."""
        self._sites.append(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
        return DropoutPlace(self, name, len(self._sites) - 1, part)

    @contextmanager
    def micro_batch(self, batch: KeyedRows) -> Iterator[None]:
        """Use a training micro-batch's keys in the body, a forward pass, and later, when it is recomputed."""
        self.current = self._of(batch)
        with self.check_draws():
            yield

    @contextmanager
    def check_draws(self) -> Iterator[None]:
        """Raise ConfigurationError if the body, the first training pass, advances a random generator.

        Values drawn from a generator, as by layer drop, would depend on the number of devices.
        """
        if self._is_checked:
            yield
            return
        self._is_checked = True
        before = rng_state.capture(self.device)
        yield
        after = rng_state.capture(self.device)
        drawn = [name for name, state in before.items() if not torch.equal(state, after[name])]
        if drawn:
            rates = {key: value for key, value in self.config.to_dict().items() if _NOISE.search(key) and value}
            listed = ", ".join(f"{key}: {value}" for key, value in rates.items()) or "no key of its config names it"
            raise ConfigurationError(
                f"model.config: a {self.config.model_type} draws random numbers besides dropout ({listed}), so its "
                "curve would depend on the number of devices; set their rate to 0 in model.config"
            )
        self.is_needed = bool(self._sites)

    def queue(self, micro_batches: Sequence[KeyedRows]) -> None:
        """Prepare the keys of a step's micro-batches for a pipeline, which calls `use_next` or `use` before each."""
        self._queued = [self._of(batch) for batch in micro_batches]
        self._upcoming = iter(self._queued)

    def use_next(self) -> None:
        """Use the keys of the next micro-batch of `queue`."""
        self.current = next(self._upcoming)

    def use(self, index: int) -> None:
        """Use the keys of a micro-batch of `queue`, from 0 on."""
        self.current = self._queued[index]

    def _of(self, batch: KeyedRows) -> Tensor:
        assert batch.places is not None, "only training rows have keys"
        num_sequences = len(next(iter(batch.inputs.values()))) // len(batch.places)  # sequences of a row
        sequences = (batch.places.numpy()[:, None] * num_sequences + np.arange(num_sequences)).ravel()
        sites, sequences = np.array(self._sites, dtype=np.uint64), np.append(sequences, _NO_SEQUENCE)
        return keys_of(self.seed, batch.step, sequences, sites).to(self.device, non_blocking=True)


class DropoutPlace:
    """A place of the model that drops values, by its unique name: the `index`-th of the keys."""

    def __init__(self, keys: DropoutKeys, name: str, index: int, part: SequenceShard | None):
        self._keys, self._name, self._part = keys, name, part
        # a tensor, because torch.compile would compile a layer anew for each number
        self._index = torch.tensor([index], device=keys.device)

    def drop(self, values: Tensor, rate: float, has_rows: bool = True) -> Tensor:
        """Drop values, as torch's dropout, with the mask of the current micro-batch.

        Args:
            values: the first axis counts sequences, or tokens of all sequences.
            rate: probability of dropping a value.
            has_rows: False for values that do not depend on the batch, which all micro-batches drop alike.
        """
        (own, length), pieces = self._own_keys(values, has_rows), (1, 0, 1)
        if self._part is not None:
            pieces = (length // values.shape[self._part.axis :].numel(), self._part.index, self._part.count)
        keep = keep_mask(own, length, rate, *pieces).view(values.shape)
        if isinstance(values, DTensor):  # whole on all ranks of its mesh: the input of a layer that is cut
            keep = DTensor.from_local(keep, values.device_mesh, values.placements, run_check=False)
        # `where` keeps only the mask for the backward pass
        return torch.where(keep, values, 0.0) * (1 / (1 - rate) if rate < 1 else 0.0)

    def uniform(self, like: Tensor) -> Tensor:
        """Draw numbers between 0 and 1: fp32, in the shape of `like`, whose first axis is that of `drop`'s values."""
        return uniform(*self._own_keys(like)).view(like.shape)

    def _own_keys(self, values: Tensor, has_rows: bool = True) -> tuple[Tensor, int]:
        """Return the keys of each sequence's chunks, and the number of values of each."""
        assert self._keys.current is not None, "random numbers need the keys of a micro-batch"
        own = self._keys.current.index_select(0, self._index)[0]
        own = own[:-1] if has_rows else own[-1:]
        if values.shape[0] % len(own):
            raise ConfigurationError(
                f"model.config: {self._name} of this {self._keys.config.model_type} draws random numbers of shape "
                f"{tuple(values.shape)}, whose first axis is not that of the {len(own)} rows, so they cannot be drawn "
                "by row; set the dropout rates and router noise of model.config to 0, or use another family"
            )
        length, chunks = values.numel() // len(own), self._keys.chunks
        of_chunks = self._part is None or self._part.of_chunks
        if not (has_rows and of_chunks) or chunks == (0,):
            return own, length
        length //= len(chunks)
        # of a chunk, too, this rank may have a part only
        whole = length * (self._part.count if self._part else 1)
        return torch.stack([moved(own, chunk * whole) for chunk in chunks], dim=1).flatten(0, 1), length


class KeyedDropout(nn.Module):
    """nn.Dropout with the masks of `DropoutKeys`."""

    def __init__(self, rate: float, place: DropoutPlace, has_rows: bool = True):
        super().__init__()
        self.p, self._place, self._has_rows = rate, place, has_rows

    def forward(self, values: Tensor) -> Tensor:
        return self._place.drop(values, self.p, self._has_rows) if self.training else values

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _ByFunction(TorchFunctionMode):
    """Replaces the calls of torch's dropout functions within one module's forward."""

    def __init__(self, places: Iterable[DropoutPlace]):
        super().__init__()
        self._places = iter(places)

    def __torch_function__(self, func: Callable, types: Sequence, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return next(self._places).drop(values, p) if training and p else values

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        options |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
        if not options.get("dropout_p"):
            return functional.scaled_dot_product_attention(query, key, value, **options)
        return attention_with_dropout(query, key, value, next(self._places).drop, **options)


_MOST_CALLS = 4  # of dropout functions in one module's forward, or for each layer that it calls; seen: 2


def install(
    model: PreTrainedModel,
    seed: int,
    device: torch.device,
    chunks: tuple[int, ...] = (0,),
    parts: Mapping[str, SequenceShard] = MappingProxyType({}),
) -> DropoutKeys:
    """Replace all dropout of a model, in place, before anything wraps or compiles its layers.

    Args:
        model: the model, with its adapters.
        seed: the recipe's seed.
        device: device of the computation.
        chunks: of the sequences, see DropoutKeys.
        parts: by name, the modules that drop values of which this rank has a part.

    Returns:
        The keys. Before each pass of a micro-batch its keys have to be selected (`micro_batch`, `use_next`, `use`).

    Raises:
        ConfigurationError: the model has dropout, and its layers do not keep the rows of a batch on the first axis;
            or noise that cannot be drawn by row.
    """
    positive_rates = rates(model.config)
    if positive_rates and model.config.model_type in families("tokens_first"):
        listed = ", ".join(f"{key}: {rate}" for key, rate in positive_rates.items())
        raise ConfigurationError(
            f"model.config: a {model.config.model_type} does not keep the rows of a batch on the first axis, so its "
            f"dropout ({listed}) cannot be drawn by row; set these rates to 0 in model.config, or use another family"
        )
    keys, modules = DropoutKeys(seed, device, model.config, chunks), list(model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.Dropout) and module.p > 0:
            parent, _, child = name.rpartition(".")
            replacement = KeyedDropout(module.p, keys.add(name, parts.get(name)), child not in _WITHOUT_ROWS)
            model.get_submodule(parent).register_module(child, replacement.train(module.training))
    routers.install_noise(model, keys.add)
    if not positive_rates:
        return keys
    # transformers' own function where no place is set: models without dropout, and other models of this process
    AttentionInterface.register("sdpa", sdpa_with_dropout)
    for name, module in modules:
        source = routers.forward_source(type(module))
        by_interface = model.config._attn_implementation == "sdpa" and "attention_interface(" in source
        # a bound: XLM's forward calls dropout functions after each of its layers
        num_layers = max([1, *(len(child) for child in module.children() if isinstance(child, nn.ModuleList))])
        places = [keys.add(f"{name}:{call}", parts.get(name)) for call in range(_MOST_CALLS * num_layers)]
        if by_interface:
            vars(module)["dropout_place"] = places[0]
        if _FUNCTION.search(source) or (_ATTENTION.search(source) and not by_interface):
            module.forward = routers.under(partial(_ByFunction, places), module.forward)
    return keys


def rates(config: PreTrainedConfig) -> dict[str, float]:
    """Collect the dropout rates above 0 of a model's config, by key."""
    keys = {key: rate for key, rate in config.to_dict().items() if "dropout" in key or key.endswith("pdrop")}
    return {key: rate for key, rate in keys.items() if isinstance(rate, float) and rate > 0}


def sdpa_with_dropout(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa" attention, with the dropout of `module.dropout_place` if there is one.

    Other functions are replaced by a TorchFunctionMode; here torch.compile would break the graph (torch 2.13).

    Arguments and result are those of transformers' function sdpa_attention_forward.
    """
    place = getattr(module, "dropout_place", None)
    if not dropout or place is None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **others)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if position_bias is not None:
        attention_mask = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
        causal = False
    mixed = attention_with_dropout(
        query, key, value, place.drop, attention_mask, dropout, causal, scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2).contiguous(), None


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    drop: Callable[[Tensor, float], Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention with its dropout by `drop`: torch's fused kernels draw their own masks.

    Args:
        query, key, value: (sequences, heads, tokens, width); fewer heads of key and value with `enable_gqa`.
        drop: maps (values, rate) to values.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as in torch's function.
    """
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), dropout_p) @ value
