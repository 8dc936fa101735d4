"""Attention where each rank of a group holds a part of every row's sequence: context parallelism.

The mask is that of the whole row, so that documents of a packed row stay apart. Three ways to let queries see the keys
of other ranks:

- Ulysses (Jacobs et al., 2023, arXiv:2309.14509): ranks exchange sequence for heads, so that each has whole rows of
  some heads. It costs one all-to-all before and one after attention, and at most as many ranks as heads.
- Gathered keys (section 3.3.2 of Llama 3, arXiv:2407.21783): each rank gathers all keys and values. It takes any number
  of ranks; the rank's queries attend to all keys before them.
- A ring (Liu et al., 2023, arXiv:2310.01889): keys and values travel from rank to rank. It takes any number of ranks,
  of which none ever has the keys of a whole row.

The first two call the attention function that the model would use without them, the last one has its own. A rank has
consecutive tokens of each row under Ulysses, else the two chunks of head_tail.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from transformers import AttentionInterface, AttentionMaskInterface

from samecurve.models.attention import head_tail, ring, varlen

# torch.distributed.nn.functional.all_gather returns wrong gradients over gloo where the incoming gradient has permuted
# strides, as attention's has (torch 2.13). torch 2.13 deprecates the second name, and torch 2.11 knows no other.
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@dataclass(frozen=True)
class ContextAttention(ABC):
    """A transformers attention function whose ranks exchange what they lack.

    Attributes:
        group: the ranks that hold parts of the same rows, in the order of the parts.
        inner: transformers' name of the attention that is computed.
        is_balanced: whether a rank has the two chunks of head_tail.chunks instead of consecutive tokens.
    """

    group: dist.ProcessGroup
    inner: str
    name: ClassVar[str]
    is_balanced: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return self.group.size()

    def register(self) -> str:
        """Register the function and its masks with transformers for this process, and return its name."""
        name = f"samecurve_{self.name}_{self.inner}"  # a teacher's may be another
        AttentionInterface.register(name, self)
        AttentionMaskInterface.register(name, self.mask)
        return name

    @abstractmethod
    def mask(self, *, q_length: int, kv_length: int, q_offset: int = 0, **arguments: Any) -> Any:
        """Build the mask that `inner` needs, in place of transformers' own function.

        Args:
            q_length: the rank's number of tokens.
            kv_length, q_offset: transformers' values for a rank's tokens alone; not used.
            arguments: further arguments of transformers' mask functions, for whole rows.
        """

    @abstractmethod
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Compute attention of the rank's tokens; the function that transformers' models call.

        Args:
            module: the attention module.
            query: (rows, heads, own tokens, width).
            key: (rows, key heads, own tokens, width); the number of key heads divides that of heads.
            value: in the shape of `key`.
            attention_mask: from `mask`.

        Returns:
            (output (rows, own tokens, heads, width), None).
        """

    def _attend(self, module: Any, *arguments: Any, **options: Any) -> Tensor:
        return AttentionInterface()[self.inner](module, *arguments, **options)[0]

    def _mask(self, **arguments: Any) -> Any:
        return AttentionMaskInterface()[self.inner](**arguments)


class Ulysses(ContextAttention):
    """Exchanges sequence for heads. The group's size has to divide the number of heads."""

    name = "ulysses"

    def mask(self, *, q_length: int, kv_length: int, q_offset: int = 0, **arguments: Any) -> Any:
        whole = q_length * self.size
        return self._mask(q_length=whole, kv_length=whole, **arguments)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:  # so that each rank gets a whole number of key heads
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        groups = query.shape[1] // key.shape[1]
        own = SimpleNamespace(is_causal=getattr(module, "is_causal", True), num_key_value_groups=groups)
        # exchange (rows, heads, own tokens, width) for (rows, own heads, tokens, width), of all three at once
        parts = query, key, value
        by_rank = zip(*(part.chunk(self.size, dim=1) for part in parts), strict=True)
        whole = torch.cat(self._exchange(torch.stack([torch.cat(heads, dim=1) for heads in by_rank])).unbind(), dim=2)
        own_heads = whole.split([part.shape[1] // self.size for part in parts], dim=1)
        output = self._attend(own, *own_heads, attention_mask, **arguments)
        # exchange (rows, tokens, own heads, width) for (rows, own tokens, heads, width)
        return torch.cat(self._exchange(torch.stack(output.chunk(self.size, dim=1))).unbind(), dim=2), None

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Send the i-th of (ranks, ...) blocks to rank i, and return the blocks from all ranks."""
        return collectives.all_to_all_single_autograd(blocks, None, None, self.group)


class GatheredKeys(ContextAttention):
    """Gathers the keys and values of the whole rows. A mask consists of one for each of the rank's two chunks."""

    name, is_balanced = "allgather", True

    def mask(self, *, q_length: int, kv_length: int, q_offset: int = 0, **arguments: Any) -> Any:
        # transformers takes a single query for the last one, which sees all keys
        arguments["allow_is_causal_skip"] = False
        length = q_length // 2
        return tuple(
            self._mask(q_length=length, kv_length=(chunk + 1) * length, q_offset=chunk * length, **arguments)
            for chunk in self._chunks
        )

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        gathered = all_gather(torch.stack([key, value]), 3, self.group)
        keys, values = head_tail.join(gathered, self.size, dim=3).unbind()
        outputs, length = [], query.shape[2] // 2
        for chunk, queries, mask in zip(self._chunks, query.split(length, dim=2), attention_mask, strict=True):
            seen = slice((chunk + 1) * length)
            outputs.append(self._attend(module, queries, keys[:, :, seen], values[:, :, seen], mask, **arguments))
        return torch.cat(outputs, dim=1), None

    @property
    def _chunks(self) -> tuple[int, int]:
        return head_tail.chunks(self.group.rank(), self.size)


class Ring(ContextAttention):
    """Passes keys and values from rank to rank, see ring.py. `inner` is not called."""

    name, is_balanced = "ring", True

    def mask(self, *, q_length: int, kv_length: int, q_offset: int = 0, **arguments: Any) -> Any:
        first = varlen.first_visible(length=q_length * self.size, **arguments)
        return ring.RingMask.of(head_tail.cut(first, self.group.rank(), self.size, dim=1))

    @torch.compiler.disable  # of torch 2.13, inductor fails on its blocks of varying length
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        if unknown := varlen.unsupported(module, arguments.get("dropout", 0.0), arguments):
            text = f"attention in a ring does not support {unknown}"
            raise ValueError(f"{text}: remove parallelism_config_cp_comm_strategy from the strategy")
        scale, kind = arguments.get("scaling") or query.shape[-1] ** -0.5, query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return ring.attend(query, key, value, attention_mask, scale, self.group), None


KINDS: dict[str, type[ContextAttention]] = {kind.name: kind for kind in (Ulysses, GatheredKeys, Ring)}
