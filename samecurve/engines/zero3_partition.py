"""The partition of ZeRO-3's weights over the ranks, and of a second copy of them over fewer (ZeRO++'s hpZ)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import deepspeed
    from torch import nn


def context(config: Mapping[str, Any]) -> deepspeed.zero.Init:
    """Make the context in which a ZeRO-3 model is built.

    DeepSpeed creates hpZ's process group once per process. A second model, such as a teacher, has to get that group.
    """
    import deepspeed  # installed only where it is used
    from deepspeed.utils import groups

    group = groups._get_zero_param_intra_parallel_group()
    return deepspeed.zero.Init(config_dict_or_path=config, zero_param_parallel_group=group)


def secondary_partition(module: nn.Module) -> int:
    """Return the number of ranks over which a second copy of the weights is sharded, 1 without one."""
    weight: Any = next(module.parameters())
    has_copy = getattr(weight, "ds_zero_param_process_group", None) is not None
    return weight.ds_secondary_tensor_group_size if has_copy else 1
