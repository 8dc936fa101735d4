"""The path of torch's libraries, for compilers that would split it at spaces."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path


def quote_path() -> None:
    """Let torch.compile on a CPU, and DeepSpeed's operators, be compiled where torch's path has a space.

    Both give this path to a shell's words, `-L{TORCH_LIB_PATH}`, without quotes (read in torch 2.13:
    utils/cpp_extension.py and _inductor/cpp_builder.py; the linker then finds no libtorch).
    """
    spec = find_spec("torch")
    assert spec and spec.origin
    path = str(Path(spec.origin).parent / "lib")
    if path != shlex.quote(path):
        from torch.utils import cpp_extension  # a tenth of a second

        cpp_extension.TORCH_LIB_PATH = shlex.quote(path)
