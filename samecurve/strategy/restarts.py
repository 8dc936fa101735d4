"""Whether a launcher or scheduler started the same command again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# A file in output_dir from the start of a --fresh run until the old checkpoints have been moved aside.
STARTING_OVER = ".starting_over"

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether the same command was started again by torchrun --max-restarts or requeued by SLURM, not by a person."""
    return any(environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def continues_own_run(environ: Mapping[str, str], output_dir: str) -> bool:
    """Whether this is a restart that finds checkpoints of its own run, not those that --fresh has yet to move aside."""
    folder = Path(output_dir)
    own = any((folder / "checkpoints").glob("step_*")) and not (folder / STARTING_OVER).exists()
    return is_restart(environ) and own
