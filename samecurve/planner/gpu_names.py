"""Names of GPUs as people, runs.csv and torch write them: RTX-4090-24GB, V100-16GB, NVIDIA A100-PCIE-40GB."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"[\s_-]*(?<![A-Za-z\d.])(\d+)\s*G(?:i?B)?(?![A-Za-z0-9])", re.IGNORECASE)
# Slower or faster parts with the number of another: they have no row of their own.
_VARIANTS = re.compile(r"4090\W?D\b|[34]090\W?Ti|\bLaptop|\bMobile|Max-?Q|\b[34]0\d0M\b", re.IGNORECASE)
_DIES = re.compile("MI250.*128GB", re.IGNORECASE)  # both dies' memory, each of which is a GPU


def split(kind: str) -> tuple[str, float]:
    """Split a kind into its name and the GB of memory in it, 0 if there are none.

    The name ends with these GB, wherever they were, and a bare number such as 3090 is a GeForce RTX.
    """
    found = _MEMORY.search(kind)
    name = _MEMORY.sub("", kind, count=1).strip()
    name = re.sub(r"^(?:GeForce\W*)?(?=\d{4}(?!\d))", "RTX ", name, flags=re.IGNORECASE)
    if not found:
        return name, 0
    name = f"{name} {found[1]}GB"
    return name, float(found[1]) / (2 if _DIES.search(name) else 1)


def is_variant(kind: str) -> bool:
    """Whether the number of a GPU stands for another one here, such as RTX 4090 D or a laptop's."""
    return bool(_VARIANTS.search(kind))
