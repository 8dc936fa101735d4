"""FSDP1's keys of an Accelerate YAML, written as FSDP2's, with which all of FSDP is trained."""

from __future__ import annotations

import json

from samecurve.config.documents import Document, describe

# By name, and by torch's number of it: whether layers are sharded again, and whether machines are replicas.
_SHARDING = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_NUMBERED = dict(enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), start=1))
_AGAIN, _OLD = "fsdp_reshard_after_forward", "fsdp_sharding_strategy"
_BLOCK, _SIZE = "parallelism_config", "parallelism_config_dp_replicate_size"
_LAYERS = "TRANSFORMER_BASED_WRAP"
# which Accelerate also reads in small letters
_NAMES = {*_SHARDING, "NO_SHARD", _LAYERS, "SIZE_BASED_WRAP", "NO_WRAP", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}
_NAMES |= {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"}


def read_fsdp1(document: Document, notes: list[str], no_effect: dict[str, str], num_machines: int = 0) -> None:
    """Write FSDP1's keys as FSDP2's; their meaning stays.

    Args:
        document: an Accelerate YAML; contradictions become its problems.
        notes: gets a line for the user about what is read in another way than it is written.
        no_effect: gets the reasons of keys that change nothing.
        num_machines: as the launcher was given them; 0: the YAML's count.
    """
    block = document.get("fsdp_config")
    if document.get("distributed_type") != "FSDP":
        return
    block = document.content["fsdp_config"] = block if isinstance(block, dict) else {}
    block |= {key: name for key, value in block.items() if (name := str(value).upper()) in _NAMES}
    version = block.get("fsdp_version", 1)
    is_old = version in (1, "1")
    kinds: dict[str, str] = {}
    for key in (_OLD, _AGAIN):
        value = block.get(key)
        value = int(value) if isinstance(value, str) and value.isdecimal() else value
        kind = _NUMBERED.get(value, "") if type(value) is int else str(value)
        if kind in _SHARDING or (kind == "NO_SHARD" and is_old):
            kinds[key] = kind
    block["fsdp_version"] = 2 if is_old else version
    if is_old or kinds:
        place = document.place(("fsdp_config", next(iter(kinds), "fsdp_version")))
        which = "".join(f", {key} {kind}" for key, kind in kinds.items())
        notes.append(f"{place}: FSDP1's keys are read as those of FSDP2, which trains this{which}")
    if block.get("fsdp_forward_prefetch") is True and block.get("fsdp_auto_wrap_policy") != _LAYERS:
        block["fsdp_forward_prefetch"] = False
        why = f"only the layers of fsdp_auto_wrap_policy {_LAYERS} run in a known order"
        no_effect["fsdp_config.fsdp_forward_prefetch"] = why
    for key, kind in kinds.items():
        place = document.place(("fsdp_config", key))
        if kind == "NO_SHARD":
            document.content["distributed_type"] = "MULTI_GPU"
            document.content.pop("fsdp_config", None)
            notes.append(f"{place}: NO_SHARD shards nothing: this is DDP")
            continue
        block.pop(_OLD, None)
        again, replicas = _SHARDING[kind]
        given = block.get(_AGAIN)
        if isinstance(given, bool) and given != again:
            text = f"found {describe(kind)}, but {_AGAIN} is {json.dumps(given)} "
            text += f"({document.place(('fsdp_config', _AGAIN))}); keep one of them"
            document.problem(("fsdp_config", key), text)
        block[_AGAIN] = again
        machines = num_machines or document.get("num_machines")
        if replicas and isinstance(machines, int) and machines > 1 and document.get(_BLOCK, _SIZE) is None:
            sizes = document.get(_BLOCK)
            document.content[_BLOCK] = (sizes if isinstance(sizes, dict) else {}) | {_SIZE: machines}
            notes.append(f"{place}: {kind}: each of the {machines} machines is a replica")
