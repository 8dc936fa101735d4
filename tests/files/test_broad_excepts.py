"""An error that nobody expected is not taken for one that somebody did."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROAD = {"Exception", "BaseException"}
# handlers that do not end by raising, and why nothing is hidden there
KEPT = {
    "accelerator/trackers.py:_attempt": "says it once; a tracker is no reason to end a run",
    "checkpoint/commit.py:_attempt": "`_together` raises it on all ranks",
    "checkpoint/manager.py:_commit": "a thread's: says it at once, and `wait` raises it",
    "checkpoint/manager.py:_tidy": "says it; the checkpoint is good",
    "cli/commands.py:main": "raises all but a full disk and too little memory, which it prints",
    "engines/loss_implementation.py:is_chunkable": "asks whether a forward can be called so; run.json has the loss",
    "data/known_templates.py:_proved": "a stranger's template: one that cannot render a probe has no variant",
    "models/weight_conversion.py:groups": "keeps the reason, with which the model's folder is refused",
    "optim/adamw_bf16.py:compiled_update_agrees": "warns with the reason, and the plain update is used",
    "prove/process.py:_fork": "prints the traceback into the log of the run, and ends with 1",
    "run/lifecycle.py:exit_code": "prints the traceback and ends with 1",
    "metrics/profiling/recorder.py:_write": "says it; a profile is no reason to end a run",
    "training/rehearsal_process.py:main": "prints the traceback and ends with 1",
    "training/session.py:_save_after": "says it; the error that ends the run is raised after it",
    "storage/object_store.py:_discard": "the upload's own error is raised",
    "storage/object_store.py:_retried": "repeats the request, and raises StorageError after the last attempt",
    "data/datasets/streaming.py:_fill": "a thread's: whoever waits for the block raises it",
}


def is_broad(handler: ast.ExceptHandler) -> bool:
    names = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return any(name is None or (isinstance(name, ast.Name) and name.id in BROAD) for name in names)


def swallowing(path: Path) -> list[str]:
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            handlers = [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and is_broad(node)]
            if any(not isinstance(handler.body[-1], ast.Raise) for handler in handlers):
                found.append(f"{path.relative_to(ROOT / 'samecurve').as_posix()}:{function.name}")
    return found


def test_every_broad_except_raises_or_says_why_not():
    files = sorted((ROOT / "samecurve").rglob("*.py"))
    assert len(files) > 150
    assert sorted(name for path in files for name in swallowing(path)) == sorted(KEPT)


def test_it_finds_one_that_hides_an_error(tmp_path, monkeypatch):
    """As ZeRO's update once did, which took an out-of-memory error for a gradient that was not finite."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "samecurve" / "zero.py"
    path.parent.mkdir()
    path.write_text(
        "def update(self):\n    try:\n        self.step()\n    except Exception:\n"
        "        if not exhausted:\n            raise\n        return inf, False\n"
    )
    assert swallowing(path) == ["zero.py:update"]
