"""Locks that a killed build of a DeepSpeed operator leaves behind.

torch.utils.cpp_extension makes a file `lock` in an operator's build folder and waits, without a limit and without a
word, for as long as there is one. A process that is killed while it compiles leaves the file, and from then on no run
of this user on this machine gets beyond its start (read in torch 2.13, torch/utils/file_baton.py; seen).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

# A builder on another host is noticed only when it writes a file, and one file of CUDA takes minutes to compile.
UNSEEN_BUILDER_SECONDS = 600.0
_POLL_SECONDS = 1.0
_OWN_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "apfs", "tmpfs", "overlay"}


def clear_build_locks(
    operators: Iterable[str], log: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> None:
    """Remove the locks of `operators` whose builder is gone. One process of a machine calls it, before any builds.

    While a process of this machine holds a lock, torch's own wait will end. On a disk that hosts share, a lock without
    a holder here is kept for as long as its build folder changes, and UNSEEN_BUILDER_SECONDS longer.
    """
    for lock in lock_files(operators, environ):
        waits = False
        while (quiet := _quiet_seconds(lock)) is not None:
            if not _is_shared(lock) or quiet > UNSEEN_BUILDER_SECONDS:
                lock.unlink(missing_ok=True)
                log(f"{lock}: removed; the process that compiled {lock.parent.name} was killed and left it")
                break
            if not waits:
                waits = True
                log(
                    f"{lock}: another host may be compiling {lock.parent.name}; waiting until it is done, or until "
                    f"nothing changed there for {UNSEEN_BUILDER_SECONDS:.0f} s. If nobody compiles, delete that file"
                )
            time.sleep(_POLL_SECONDS)


def lock_files(operators: Iterable[str], environ: Mapping[str, str]) -> list[Path]:
    """List the lock files that the operators may have in torch's build folders.

    The folders are directly in TORCH_EXTENSIONS_DIR, else in a folder for each Python and CUDA version.
    """
    named = environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folders = [Path(named)] if named else sorted((cache / "torch_extensions").glob("py*"))
    return [folder / name / "lock" for folder in folders for name in sorted(operators)]


def _quiet_seconds(lock: Path) -> float | None:
    """Seconds since anything in the build folder changed; None when there is no lock, or one that is held here.

    A process of this user on this machine holds it that has it open, as torch does while it builds.
    """
    for process in psutil.process_iter():
        try:
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return None
        except (psutil.Error, OSError):
            continue
    if not lock.exists():
        return None
    times = []
    for path in (lock.parent, *lock.parent.iterdir()):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # a compiler's temporary file
            continue
    return time.time() - max(times)


def _is_shared(lock: Path) -> bool:
    """Whether other hosts may write there: any kind of file system that is not known to be this machine's own."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    folder = next(folder for folder in (lock.resolve(), *lock.resolve().parents) if str(folder) in mounts)
    return mounts[str(folder)] not in _OWN_DISKS
