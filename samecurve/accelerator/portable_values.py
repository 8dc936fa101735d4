"""State dicts as JSON with the tensors beside it: what checkpoints keep of objects, schedulers and loaders, no pickles.

JSON has no tuples, no keys but text and no infinity. Such a value becomes an object whose only key begins with a dollar
sign: (1, 2) is {"$tuple": [1, 2]}.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samecurve.checkpoint.format import DTYPES
from samecurve.checkpoint.snapshot import WHOLE
from samecurve.errors import CheckpointError

_LISTS: dict[str, Callable] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_DICTS: dict[str, Callable] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS = {kind: name for name, kind in (_LISTS | _DICTS).items()} | {torch.Size: "tuple"}
_EXACT = 2**53  # up to here every reader of JSON keeps integers
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a state dict as JSON values. Collective where it has tensors that are sharded.

    Args:
        value: numbers, text, None, tensors and NumPy's arrays in lists, tuples, sets and dictionaries of any depth.
        key: what the error names it by, followed by the keys on the way.
        tensors: gets the tensors, by their key in the checkpoint's file.

    Raises:
        CheckpointError: a value of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, str, int, float):
        return _encode_scalar(value)
    if type(value) is list:
        return [encode(item, f"{key}[{index}]", tensors) for index, item in enumerate(value)]
    kind = _KINDS.get(type(value), "")
    if kind in _LISTS:
        return {f"${kind}": [encode(item, f"{key}[{index}]", tensors) for index, item in enumerate(value)]}
    if kind in _DICTS:
        items = [(name, encode(item, f"{key}.{name}", tensors)) for name, item in value.items()]
        if kind == "dict" and all(type(name) is str and name[:1] != "$" for name in value):
            return dict(items)
        return {f"${kind}": [[encode(name, key, tensors), item] for name, item in items]}
    if isinstance(value, Tensor) and value.dtype in DTYPES:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return {"$tensor": _put(full, key, tensors)}
    if isinstance(value, np.ndarray) and str(value.dtype) in _NAMES:
        return {"$array": _put(torch.from_numpy(np.ascontiguousarray(value)), key, tensors)}
    of = f" of {value.dtype}" if isinstance(value, (Tensor, np.ndarray)) else ""
    raise CheckpointError(
        f"{key}: found {type(value).__module__}.{type(value).__name__}{of}, which checkpoints cannot hold; let its "
        "state_dict return numbers, text, None, tensors and arrays, in lists, tuples, sets and dictionaries"
    )


def _encode_scalar(value: Any) -> Any:
    if type(value) is int and abs(value) >= _EXACT:
        return {"$int": str(value)}
    return {"$float": str(value)} if type(value) is float and not math.isfinite(value) else value


def _put(tensor: Tensor, key: str, tensors: dict[str, Tensor]) -> dict:
    name = f"{WHOLE}/{key}"
    while name in tensors:  # of the keys 1 and "1"
        name += "'"
    tensors[name] = tensor
    return {"key": name, "shape": list(tensor.shape)}


def decode(value: Any, read: Callable[[str], Tensor] | None = None) -> Any:
    """Return what was encoded, with tensors on the CPU. read: returns the flattened tensor of a key in the file."""
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str
    content: Any
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if not tag.startswith("$"):
        return {name: decode(item, read) for name, item in value.items()}
    kind = tag[1:]
    if kind in ("int", "float"):
        return int(content) if kind == "int" else float(content)
    if kind in ("tensor", "array"):
        assert read is not None, "values without tensors"
        tensor = read(content["key"]).reshape(content["shape"])
        return tensor if kind == "tensor" else tensor.numpy()
    items = decode(content, read)
    return _LISTS[kind](items) if kind in _LISTS else _DICTS[kind]({name: item for name, item in items})
