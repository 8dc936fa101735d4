"""Problems of paths in a recipe."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

_SPECIAL_FILES = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_problem(path: str | Path) -> str:
    """Return why a path is neither a file nor a folder; "" if it is one of them."""
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return f"no permission to read {Path(path).absolute()}; give this process's user access to its folder"
    except (OSError, ValueError) as error:  # ValueError: a null byte
        if getattr(error, "errno", None) == errno.ELOOP:
            return "is a symbolic link that leads back to itself; let it point to the data"
        return f"no such file or folder: {Path(path).absolute()}"
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    kind = _SPECIAL_FILES.get(stat.S_IFMT(mode), "a special file")
    return f"is {kind}, which can be read only once; copy its content to a regular file and use that"


def pattern_hint(path: str, key: str = "data.pattern") -> str:
    """The end of a message about a path with wildcards or `#500`: which key to use instead; "" for other paths."""
    if match := re.fullmatch(r"(.+)#(\d+)", path):
        return f"; to read the first {match[2]} rows, set the path to {match[1]} and data.max_samples={match[2]}"
    parts = Path(path).parts
    first = next((index for index, part in enumerate(parts) if set("*?[") & set(part)), None)
    if first is None:
        return ""
    folder, pattern = Path(*parts[:first]), Path(*parts[first:])
    return f"; a path cannot contain wildcards: set the path to the folder {folder}, and {key}='{pattern}'"
