"""Checks the sizes of an Accelerate YAML's parallelism_config: which go together, and with what else of the file."""

from __future__ import annotations

from typing import Any

from samecurve.config.documents import Document, describe
from samecurve.strategy.capabilities import CONTEXT, EXPERT, SCHEDULED, TENSOR, Mode
from samecurve.strategy.pipeline_schedules import SCHEDULES

_BLOCK = "parallelism_config"
_DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
_SEQUENCE = "tp_sequence_parallel"
_OF_MODES = {TENSOR: ("tp",), CONTEXT: ("cp", "sp"), EXPERT: ("ep",)}
# Only FSDP reads them; the file to start from
_OF_FSDP = {
    "dp_replicate_size": "fsdp_tp",
    "dp_shard_size": "fsdp_tp",
    "sp_size": "fsdp_ulysses",
    "cp_size": "fsdp_ulysses",
    "ep_size": "fsdp_ep",
}
_SHARDED_ONCE = "remove it, so that all other processes are shards"
_ONE_OF_TWO = f"together with {_BLOCK}_ep_size it {EXPERT.untested}"
# Under a mode, keys that nothing was compared with: the reason, and what to do
_CONFLICTS: dict[Mode, dict[str, tuple[str, str]]] = {
    TENSOR: {"dp_replicate_size": (f"a model in several replicas {TENSOR.untested}", _SHARDED_ONCE)},
    CONTEXT: {
        "dp_replicate_size": (f"it {CONTEXT.untested}", _SHARDED_ONCE),
        _SEQUENCE: (f"a sequence that is split in two ways {CONTEXT.untested}", "set it to false"),
    },
    EXPERT: dict.fromkeys(
        ("dp_replicate_size", "cp_size", "sp_size", _SEQUENCE), (_ONE_OF_TWO, "remove one of the two")
    ),
    SCHEDULED: {
        **dict.fromkeys(
            ("dp_replicate_size", "dp_shard_size"),
            (f"it {SCHEDULED.untested}", "remove it, since shards take all other processes"),
        ),
        **dict.fromkeys(("cp_size", "sp_size", "ep_size"), (f"it {SCHEDULED.untested}", "remove it")),
        _SEQUENCE: (f"stages would pass on parts of the sequence, which {SCHEDULED.untested}", "set it to false"),
    },
}
_FSDP_IN_STAGES = ("fsdp_version", "fsdp_cpu_ram_efficient_loading")
_CUT = ("GPipe", "1F1B", "Interleaved1F1B")  # with tensor parallelism


def check_parallelism(document: Document) -> None:
    """Add the problems of an Accelerate YAML with parallel sizes, or with a block that its type cannot use."""
    kind, block = document.get("distributed_type"), document.get(_BLOCK)
    values = {key.removeprefix(f"{_BLOCK}_"): value for key, value in block.items()} if isinstance(block, dict) else {}
    sizes = {name: size for name in _DIMENSIONS if isinstance(size := values.get(f"{name}_size"), int) and size > 1}
    _unread(document, values, sizes)
    modes = [mode for mode, names in _OF_MODES.items() if kind == "FSDP" and sizes.keys() & set(names)]
    if modes and document.get("fsdp_config", "fsdp_offload_params") is True:
        text = f"found true, but offload {modes[0].untested}; set it to false"
        document.problem(("fsdp_config", "fsdp_offload_params"), text)
    if values.get("pp_size") is not None or values.get("pp_schedule") is not None:
        modes.append(SCHEDULED)
        _schedule(document, values)
    for mode in modes:
        for key, (why, fix) in _CONFLICTS[mode].items():
            if values.get(key) is True if key == _SEQUENCE else kind == "FSDP" and key.removesuffix("_size") in sizes:
                text = f"found {describe(values[key])}, but {why}; {fix}"
                document.problem((_BLOCK, f"{_BLOCK}_{key}"), text)


def _unread(document: Document, values: dict[str, Any], sizes: dict[str, int]) -> None:
    """Add a problem for each key that the file's type, or its other sizes, would not read."""
    kind, texts = document.get("distributed_type"), {}
    if kind == "MULTI_GPU":
        place = document.place(("distributed_type",))
        text = f"only FSDP uses it, but distributed_type is {kind} ({place}); remove it, or start from configs/"
        texts = {key: f"{text}{file}.yaml" for key, file in _OF_FSDP.items() if values.get(key) is not None}
    if values.get(_SEQUENCE) is True and "tp" not in sizes:
        text = "found true, but only tensor parallelism uses it"
        texts[_SEQUENCE] = f"{text}; remove it, or set {_BLOCK}_tp_size"
    if (comm := values.get("cp_comm_strategy")) is not None and "cp" not in sizes:
        text = f"found {comm}, but it is read only where {_BLOCK}_cp_size is above 1"
        texts["cp_comm_strategy"] = f"{text}; set that size, or remove this key"
    if kind == "FSDP" and "cp" in sizes and "sp" in sizes:
        text = f"found {sizes['cp']}, but {_BLOCK}_sp_size is {sizes['sp']} and a sequence can be split only once"
        texts["cp_size"] = f"{text}; remove one of them"
    for key, text in texts.items():
        document.problem((_BLOCK, f"{_BLOCK}_{key}"), text)


def _schedule(document: Document, values: dict[str, Any]) -> None:
    """Check that size and schedule are given together, for a type and with sizes that have been compared."""
    kind, size, schedule = document.get("distributed_type"), values.get("pp_size"), values.get("pp_schedule")
    size_key, schedule_key = f"{_BLOCK}_pp_size", f"{_BLOCK}_pp_schedule"
    if size is None:
        text = f"missing, but {schedule_key} is {schedule}; set the number of pipeline ranks"
        document.problem((_BLOCK, size_key), text)
    elif schedule is None:
        text = f"missing, but {size_key} is {size}; set it to one of {', '.join(SCHEDULES)}"
        document.problem((_BLOCK, schedule_key), text)
    if kind not in ("MULTI_GPU", "FSDP"):
        text = f"found {size}, but schedules run with distributed_type MULTI_GPU or FSDP, and it is {kind}"
        document.problem((_BLOCK, size_key), f"{text}; start from configs/pipeline_1f1b.yaml")
    cut = values.get("tp_size")
    if cut not in (None, 1) and schedule in SCHEDULES and schedule not in _CUT:
        text = f"found {schedule}, but with tensor-parallel stages ({_BLOCK}_tp_size: {cut}) it {SCHEDULED.untested}"
        document.problem((_BLOCK, schedule_key), f"{text}; use {' or '.join(_CUT)}")
    block = document.get("fsdp_config")
    for key in block if kind == "FSDP" and isinstance(block, dict) else ():
        if key not in _FSDP_IN_STAGES:
            text = "FSDP inside pipeline stages gathers a layer once per step, and another setting"
            document.problem(("fsdp_config", key), f"{text} {SCHEDULED.untested}; remove it")
