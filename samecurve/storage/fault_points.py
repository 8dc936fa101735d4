"""Places where tests/faults/injection.py makes a run fail. Nothing happens unless SAMECURVE_FAULTS is set."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import util
from pathlib import Path

_INJECTION = Path(__file__).resolve().parents[2] / "tests" / "faults" / "injection.py"


@lru_cache(maxsize=1)
def _visit() -> Callable[[str], None]:
    spec = util.spec_from_file_location("injection", _INJECTION)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Injector().visit


def fault_point(phase: str) -> None:
    """Mark a place that can fail: trigger the fault that SAMECURVE_FAULTS plans here for this process, if any."""
    if "SAMECURVE_FAULTS" in os.environ:
        _visit()(phase)
