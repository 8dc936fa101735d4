"""status.json: the state of a run, and the last start that was refused.

Only this module reads the file, except for data/selection.py, which recognizes run directories by it.

`refused_start` contains `reason`, `exit_code` and `time` of a start that ended before it took over the run directory.
The state of the existing run stays unchanged. A later start that is accepted removes the key.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from samecurve.errors import PeerError, SamecurveError
from samecurve.storage.atomic import utc_timestamp, write_json
from samecurve.storage.file_lock import lock_folder
from samecurve.storage.records import read_record

STATUS = "status.json"
REFUSED = "refused_start"
COUNTED = ("failing_step", "failures")
_NOTE = "heartbeats/refused_{}.json"
_STARTED_WITHIN_SECONDS = 120  # the hosts of a job may start this far apart
_STATE = {
    "state?": str,
    "reason?": str,
    "time?": str,
    "step?": int,
    "exit_code?": (int, None),
    "failing_step?": int,
    "failures?": int,
}
_SCHEMA = {**_STATE, f"{REFUSED}?": _STATE, "earlier?": {**_STATE, f"{REFUSED}?": _STATE}}
_NOTE_SCHEMA = {"rank": str, "host": str, "rendezvous": list, "reason": str, "exit_code": int}


def read_status(path: Path) -> dict:
    """Read a status.json; {} if there is none. Only the text of a damaged file is returned, under the key "damaged"."""
    record = read_record(path, _SCHEMA)
    if record.is_damaged:
        return {"damaged": record.content.decode("utf-8", "backslashreplace") or record.problem}
    return record.value or {}


def split_refused(status: dict) -> tuple[dict, dict]:
    """Split a status into (state of the last session, start refused since then). Either is {} if absent.

    A killed start leaves its own state, with the last session's under the key "earlier".
    """
    earlier = status.get("earlier", status)
    return {key: value for key, value in earlier.items() if key != REFUSED}, status.get(REFUSED, {})


def with_refused(earlier: dict, reason: str, exit_code: int | None, counted: Mapping) -> dict:
    """Add a refused start to `earlier`, the status of a run. `counted`: see run_directory.count_failures."""
    return {**earlier, REFUSED: {"reason": reason, "exit_code": exit_code, "time": utc_timestamp(), **counted}}


def counted(status: Mapping) -> dict:
    return {key: status[key] for key in COUNTED if key in status}


def refused_text(status: dict) -> str:
    """Describe the refused start in words; "" if there was none."""
    refused = status.get(REFUSED)
    if not refused:
        return ""
    reason = refused.get("reason") or "no reason given"
    return f"exit code {refused.get('exit_code')}, {refused.get('time', 'time not known')}: {reason}"


@contextlib.contextmanager
def refusals(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Record an error of the body that names a run directory (SamecurveError.output_dir) in that run's status.json.

    Nothing is written if the directory has no run, or while its run is alive and owns the file.

    Another host may refuse a start that rank 0 accepts, for example because it lacks a compiler. The first rank of that
    host then leaves a note, which rank 0 reads when it is ended for that reason.
    """
    try:
        yield
    except SamecurveError as error:
        with contextlib.suppress(SamecurveError, OSError):  # the error itself says more
            if error.output_dir:
                _record(Path(error.output_dir), error, environ)
        raise


def _record(folder: Path, error: SamecurveError, environ: Mapping[str, str]) -> None:
    rank = environ.get("RANK", "0")
    if rank == "0" and (folder / STATUS).is_file():
        with lock_folder(folder):  # raises while a live run owns the file
            status = read_status(folder / STATUS)
            earlier, refused = split_refused(status)
            failures = counted(status) | counted(refused)
            write_json(folder / STATUS, with_refused(earlier, str(error), error.exit_code, failures))
    elif rank != "0" and environ.get("LOCAL_RANK", "0") == "0" and folder.is_dir():
        path = folder / _NOTE.format(rank.zfill(5))
        path.parent.mkdir(exist_ok=True)
        note = {"rank": rank, "host": socket.gethostname(), "rendezvous": _rendezvous(environ)}
        write_json(path, note | {"reason": str(error), "exit_code": error.exit_code})


def refused_elsewhere(folder: Path, since: float) -> PeerError | None:
    """Return another host's reason for refusing the start that this process is part of; None if none did.

    A note belongs to this start if it names the same rendezvous and is not older than this process, which began at
    `since` (time.time()), by more than _STARTED_WITHIN_SECONDS. The first call removes the notes, so that no later
    start mistakes them for its own.
    """
    refusal = None
    for path in sorted(folder.glob(_NOTE.format("*"))):
        with contextlib.suppress(OSError):  # gone
            is_recent = path.stat().st_mtime > since - _STARTED_WITHIN_SECONDS
            note = read_record(path, _NOTE_SCHEMA).value
            if is_recent and note and note["rendezvous"] == _rendezvous(os.environ) and refusal is None:
                refusal = PeerError(f"rank {note['rank']} on {note['host']}: {note['reason']}", note["exit_code"])
            path.unlink()
    return refusal


def _rendezvous(environ: Mapping[str, str]) -> list[str]:
    """Identifier that all processes of one start share."""
    return [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
