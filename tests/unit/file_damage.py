"""What can happen to a file: each function damages one, and returns whether it is another file than before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], bool]:
    def damage(file: Path) -> bool:
        content = file.read_bytes()
        file.write_bytes(changed := change(content))
        return changed != content

    return damage


def _remove(file: Path) -> bool:
    file.unlink()
    return True


def _replace_by_folder(file: Path) -> bool:
    file.unlink()
    file.mkdir()
    return True


DAMAGES: dict[str, Callable[[Path], bool]] = {
    "absent": _remove,
    "folder": _replace_by_folder,
    "empty": _changed(lambda content: b""),
    "cut": _changed(lambda content: content[: len(content) // 2]),
    "first bit": _changed(lambda content: bytes([content[0] ^ 1]) + content[1:] if content else content),
    "last bit": _changed(lambda content: content[:-1] + bytes([content[-1] ^ 1]) if content else content),
    "0xff": _changed(lambda content: content[:9] + b"\xff" + content[10:]),
    "zeros": _changed(lambda content: bytes(len(content))),
    "longer": _changed(lambda content: content + bytes(4096)),
    "brackets": _changed(lambda content: b"[" * 100_000),
    **{
        f"json {text}": _changed(lambda content, text=text: text.encode())
        for text in ("null", "[]", "{}", "3", '"x"', '{"train.bin": {"size": "3", "blocks": 3}}')
    },
}
