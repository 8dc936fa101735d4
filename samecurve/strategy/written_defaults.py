"""Values that `accelerate config` writes without being asked, and that change nothing about this run."""

from __future__ import annotations

from samecurve.config.documents import Document
from samecurve.specs.environment import has_accelerator

_SIZES, _EXCHANGE = "parallelism_config", "parallelism_config_cp_comm_strategy"


def settle_defaults(document: Document, no_effect: dict[str, str]) -> None:
    """Write the type of an Accelerate YAML by its usual name, and take out what has no effect with it.

    Args:
        document: the YAML.
        no_effect: gets the reason for each key.
    """
    content = document.content
    if content.get("distributed_type") in ("NO", False):  # YAML reads a bare NO as false
        content["distributed_type"] = "NO"
        for key in ("fsdp_config", "deepspeed_config", "num_processes"):
            if content.pop(key, None) not in (None, {}, 1):
                no_effect[key] = "distributed_type NO is one process"
    elif content.get("distributed_type") == "MULTI_CPU":
        content["distributed_type"] = "MULTI_GPU"  # which also trains on CPUs
    # under FSDP and DeepSpeed it would turn these off
    if content.get("use_cpu") is True and content.get("distributed_type") in ("NO", "MULTI_GPU"):
        if not has_accelerator():
            content["use_cpu"] = False
            no_effect["use_cpu"] = "without an accelerator the CPU is used"
    context = document.get(_SIZES, "parallelism_config_cp_size")
    if context in (None, 1) and document.get(_SIZES, _EXCHANGE) == "allgather":
        del content[_SIZES][_EXCHANGE]
        no_effect[f"{_SIZES}.{_EXCHANGE}"] = "the default, and read only with context parallelism"
