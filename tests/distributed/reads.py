"""Counts the reads of tensors' values by the host, each of which would wait for a GPU, on machines without one."""

from __future__ import annotations

import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# on a CPU they call no operator
METHODS = {"tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"}
OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"}


def folder_of(package: str) -> Path:
    """Where a package is installed. Not its name among a path's parts: any folder above may have the same name."""
    spec = find_spec(package)
    assert spec and spec.origin, package
    return Path(spec.origin).parent


PACKAGE, LIBRARIES = folder_of("samecurve"), (folder_of("deepspeed"),)


class Reads:
    """While it is entered, notes each read in this thread with its place: the innermost function of samecurve.

    What a library of LIBRARIES reads by itself is left out.

    Attributes:
        found: (place, kind of read, stack).
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str]] = []
        self.is_inside = False  # a method's own operators are the same read
        self._modes = _Operators(self), _Methods(self)

    def __enter__(self) -> Reads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self, kind: str) -> None:
        frames = traceback.extract_stack()
        for frame in reversed(frames):
            path = Path(frame.filename)
            if any(path.is_relative_to(library) for library in LIBRARIES):
                return
            if path.is_relative_to(PACKAGE):
                place = f"{path.relative_to(PACKAGE).as_posix()}: {frame.name}"
                self.found.append((place, kind, "".join(traceback.format_list(frames[:-2]))))
                return
        self.found.append(("elsewhere", kind, "".join(traceback.format_list(frames[:-2]))))

    def unexpected(self, allowed: dict[str, int]) -> list[tuple[str, str, str]]:
        """The reads beyond the number that is allowed at their place."""
        left = Counter(allowed)
        extra = []
        for read in self.found:
            left[read[0]] -= 1
            extra += [read] if left[read[0]] < 0 else []
        return extra


def _reads_or_waits(name: str, args: tuple, kwargs: dict) -> bool:
    if name in ("tensor", "as_tensor"):
        return kwargs.get("device") is not None  # numbers are copied to a GPU before the call returns
    if not args or not isinstance(args[0], Tensor):
        return False
    if name in ("__getitem__", "__setitem__"):
        return any(isinstance(index, list) for index in (args[1] if isinstance(args[1], tuple) else args[1:2]))
    return name in METHODS or name == "new_tensor" or (name == "to" and "cpu" in (*args[1:], kwargs.get("device")))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: Reads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._reads.is_inside and _reads_or_waits(name, args, kwargs):
            self._reads.note(name)
            self._reads.is_inside = True
            try:
                return func(*args, **kwargs)
            finally:
                self._reads.is_inside = False
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Reads):
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" or (name in ("index_put", "index_put_") and args[2].numel() > 1)  # else a fill
        by_mask = by_mask and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if (name in OPERATORS or by_mask) and not self._reads.is_inside:
            self._reads.note(name)
        return func(*args, **(kwargs or {}))
