"""Problems of paths and URLs in a recipe."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samecurve.config.documents import Document, Finding, describe, read_document
from samecurve.storage.filesystem import name_problem
from samecurve.storage.object_store import is_url, url_problem

_MIXTURE = ("data", "mixture")
_PATHS = (
    *(((), "output_dir"), (("model",), "path"), (("model",), "config"), (("tokenizer",), "path")),
    *((("data",), "path"), (("data",), "cache_dir"), (("evaluate",), "path"), (("adapter",), "path")),
    (("distill",), "teacher"),
)
_COUNTED = re.compile(r"([^#]+)#(\d+)")
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


def expand_home(document: Document) -> None:
    """Replace a leading ~ of the recipe's paths by the home folder, which a shell does not do behind a `=`."""
    mixture = document.get(*_MIXTURE)
    blocks = [(document.get(*block), name) for block, name in _PATHS]
    blocks += [(source, "path") for source in (mixture if isinstance(mixture, list) else ())]
    for block, name in blocks:
        path = block.get(name) if isinstance(block, dict) else None
        if isinstance(path, str) and path.startswith("~") and not name_problem(path):
            block[name] = os.path.expanduser(path)


def split_row_counts(document: Document) -> None:
    """Replace `FILE#500` in paths of training data, as other frameworks write it, by FILE, and set max_samples."""
    data, mixture = document.get("data"), document.get("data", "mixture")
    sources = enumerate(mixture if isinstance(mixture, list) else ())
    for key, block in (("data",), data), *(((*_MIXTURE, str(nth)), source) for nth, source in sources):
        path = block.get("path") if isinstance(block, dict) else None
        match = _COUNTED.fullmatch(path) if isinstance(path, str) and not os.path.lexists(path) else None
        if match is None:
            continue
        here, number = (*key, "max_samples"), int(match[2])
        block["path"] = match[1]
        if block.get("max_samples") not in (None, number):
            text = f"found {describe(block['max_samples'])}, but the path is {path}; remove one of the two numbers"
            document.problem(here, text)
            continue
        document.places.setdefault(here, document.place((*key, "path")))
        block["max_samples"] = number
        document.notes.append(f"{'.'.join(here)}: {number}, the first rows, because the path ends with #{number}")


def read_config_file(document: Document) -> None:
    """Replace a path in `model.config`, of a config.json or of its folder, by the fields of the file."""
    path = document.get("model", "config")
    if not isinstance(path, str):
        return
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    fields = read_document(file)
    here = ("model", "config")
    document.content["model"] = {**document.content["model"], "config": fields.content or None}
    if fields.problems or not fields.content:
        why = fields.problems[0].text if fields.problems else "it is empty"
        document.unreadable(here, f"found {describe(path)}, a text, and so the path of a config.json, but {why}")
        return
    document.places |= {(*here, *key): place for key, place in fields.places.items()}
    document.notes.append(f"model.config: the fields of {file}")


def pattern_hint(path: str, key: str = "data.pattern") -> str:
    """The end of a message about a path with wildcards or `#500`: which key to use instead; "" for other paths."""
    if match := _COUNTED.fullmatch(path):
        return f"; evaluation data are read whole: set the path to {match[1]}, a file with only the rows to evaluate on"
    parts = Path(path).parts
    first = next((index for index, part in enumerate(parts) if set("*?[") & set(part)), None)
    if first is None:
        return ""
    folder, pattern = Path(*parts[:first]), Path(*parts[first:])
    return f"; a path cannot contain wildcards: set the path to the folder {folder}, and {key}='{pattern}'"


def split_output_url(document: Document) -> None:
    """Replace a URL in `output_dir` by a local folder, and set `checkpoint.mirror` to the URL.

    Done before anything makes a path of it: Path("s3://bucket") loses a slash.
    """
    url, block = document.get("output_dir"), document.content.get("checkpoint", {})
    if not isinstance(url, str) or not is_url(url) or not isinstance(block, dict):
        return
    if block.get("mirror") is not None:
        text = "output_dir is a URL, which is uploaded to already; remove checkpoint.mirror, or give a local output_dir"
        document.problem(("checkpoint", "mirror"), text)
        return
    document.content |= {"output_dir": str(staging_folder(url)), "checkpoint": block | {"mirror": url}}
    document.places[("checkpoint", "mirror")] = document.place(("output_dir",))


def staging_folder(url: str) -> Path:
    """Return the local run directory of a URL. Every host has to see the same folder, as with any output_dir."""
    protocol, _, rest = re.split("[?#]", url)[0].partition("://")  # url_problem refuses what else a URL may have
    place, *keys = rest.split("/")
    root = Path(os.environ.get("SAMECURVE_STAGING") or "runs").expanduser()
    # a key of a store may have "..", which as a path would leave the root
    return root.joinpath(protocol, place.rpartition("@")[2], *(key for key in keys if key not in ("", "..")))


def _reachable(value: Callable[[str], Any]) -> Iterator[Finding]:
    url = value("checkpoint.mirror")
    problem = url_problem(url) if url is not None else ""
    if problem:
        yield "checkpoint.mirror", problem


RULES = (_reachable,)
