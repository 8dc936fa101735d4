"""Python files that come with models and tokenizers, and the user's list of those that may run.

Nothing inside a model, run or checkpoint decides whether its code runs: whoever writes the code writes those files too.
The user decides, by `model.trust_remote_code: true` in a recipe or `--trust_remote_code` on a command. A training adds
the code that a recipe allowed to a list in the user's configuration folder, so that commands on one's own runs need no
option. The list names code by its content alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samecurve.storage.atomic import storage_errors, write_text
from samecurve.storage.records import read_record

OPTION = "--trust_remote_code"
_CONFIGS = ("config.json", "tokenizer_config.json")
_CUSTOM_GENERATE = "custom_generate/generate.py"  # which from_pretrained runs where code is trusted
ANOTHER_CONFIG = "configuration_files of config.json"  # transformers reads the auto_map of one of those instead
# other references name a repository of the hub (OWNER/NAME--module.Class) or a file elsewhere on the disk
_INSIDE = re.compile(rf"\w+\.py|{_CUSTOM_GENERATE}")


def modules(path: str) -> tuple[str, ...]:
    """List the Python files that a local folder asks transformers to run. () for a name on the hub."""
    folder, names = Path(path), []
    for config in _CONFIGS:
        content = read_record(folder / config).value or {}
        if content.get("configuration_files"):
            names.append(ANOTHER_CONFIG)
        names += [f"{reference.rpartition('.')[0]}.py" for reference in _texts(content.get("auto_map"))]
    if os.path.isfile(folder / _CUSTOM_GENERATE):
        names.append(_CUSTOM_GENERATE)
    return tuple(dict.fromkeys(names))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def allows(option: bool, *paths: str) -> bool:
    """Whether the code of these models and tokenizers may run. The result is transformers' `trust_remote_code`.

    Args:
        option: whether the user allowed code of any content, by recipe or option.
        paths: folders, or names on the hub, whose code is never in the list: the hub may answer with another one.
    """
    with_code = [path for path in paths if not os.path.isdir(path) or modules(path)]
    return option or (bool(with_code) and all(map(_is_listed, with_code)))


def _is_listed(path: str) -> bool:
    folder, names = _list_folder(), modules(path)
    if folder is None or not all(map(_INSIDE.fullmatch, names)):
        return False
    # an export names modules of other heads, which it does not contain and which cannot run
    present = [Path(path, name) for name in names if os.path.isfile(Path(path, name))]
    try:
        return bool(present) and all((folder / _digest(file)).is_file() for file in present)
    except (OSError, ValueError):
        return False


def remember(path: str, revision: str | None = None) -> None:
    """Add a model's or tokenizer's code to the user's list. `path`: a folder, or a name on the hub that was loaded.

    Raises StorageError if the list cannot be written.
    """
    folder, code = _list_folder(), Path(path) if os.path.isdir(path) else None
    if code is None:
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a name of the hub
            files = [try_to_load_from_cache(path, config, revision=revision) for config in _CONFIGS]
            code = next((Path(file).parent for file in files if isinstance(file, str)), None)
    if folder is None or code is None:
        return
    for name in filter(_INSIDE.fullmatch, modules(str(code))):
        if os.path.isfile(code / name):
            with storage_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_text(folder / _digest(code / name), f"{name} of {path}\n")


def refusal(path: str) -> str:
    """Say which files a model or tokenizer wants to run, and how the user allows it."""
    names = ", ".join(modules(path)) or "named on the hub"
    return (
        f"{path}: the model or its tokenizer needs Python files of its own ({names}), which can do anything on this "
        f"machine; read them, and if you trust them add {OPTION}, or model.trust_remote_code=true to a training"
    )


def is_refusal(error: Exception) -> bool:
    """Whether transformers raised this error because it may not run a model's code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def _list_folder() -> Path | None:
    """Return the folder of the list; None for a user without a home, as some containers have."""
    given = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    # a relative path would be looked for in the working directory, which may be a stranger's
    return Path(given, "samecurve", "trusted_code") if os.path.isabs(given) else None


def _digest(file: Path) -> str:
    """Hash a module and what it imports from beside it: the files that transformers copies and runs."""
    from transformers.dynamic_module_utils import get_relative_import_files

    files = {file, *map(Path, get_relative_import_files(file))}
    hashes = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
