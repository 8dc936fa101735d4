"""Sessions of a run, read from its directory: the first start, and each later start that resumed it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samecurve.run.run_directory import previous_folders
from samecurve.run.status import STATUS, read_status, split_refused
from samecurve.storage.records import read_record

# types of what is read back from run.json, see storage/records.py; a key may be absent: another version wrote it
RUN_FACTS = {
    "recipe?": dict,
    "recipe_path?": str,
    "overrides?": [str],
    "output_dir?": Path,
    "strategy?": str,
    "strategy_path?": (Path, None),
    "engine?": str,
    "world_size?": range(1, 2**31),
    "device?": str,
    "precision?": str,
    "started?": str,
    "start_step?": range(2**53),
    "resumed_from?": (Path, None),
    "adapter?": (dict, None),
    "accelerate?": (dict, None),
    "deepspeed?": (dict, None),
    "data?": dict,
    "data_fingerprints?": (dict, None),
    "versions?": dict,
    "own_code?": dict,
    "counts?": str,
    "predicted?": (dict, None),
}


@dataclass(frozen=True)
class SessionRecord:
    """One start of train.py.

    Attributes:
        facts: its run.json; {} if that is damaged.
        ended: the outcome recorded in its status.json, in words.
        problem: what is wrong with its run.json, "" if nothing is.
    """

    facts: dict
    ended: str
    problem: str = ""

    @property
    def start_step(self) -> int:
        return self.facts.get("start_step") or 0


def sessions(run: Path) -> list[SessionRecord]:
    """List the sessions of a run, oldest first, as far as its directory records them; [] if it has no run.

    Earlier sessions are read from previous/N/. A session that did not resume is the first of its run: the ones before
    it belong to another run.
    """
    known: list[SessionRecord] = []
    for folder in (run, *reversed(previous_folders(run))):
        record = read_record(folder / "run.json", RUN_FACTS)
        if record.is_absent:  # the session ended before it wrote run.json
            continue
        facts = record.value or {}
        status, _ = split_refused(read_status(folder / STATUS))
        state, reason = status.get("state", "not known"), status.get("reason")
        # a session that still says running was killed, or lost its machine
        ended = "killed, or its host failed" if state == "running" else f"{state}: {reason}" if reason else state
        known.append(SessionRecord(facts, ended, record.problem))
        if not _is_own(facts):  # or a damaged one, of which this is not known
            break
    return known[::-1]


def unknown_origin(began: SessionRecord) -> str | None:
    """Return the other directory's checkpoint from which this session resumed; None if there is none.

    The directory of this run does not record what happened before that checkpoint.
    """
    source = began.facts.get("resumed_from")
    return source if source and not _is_own(began.facts) else None


def _is_own(facts: dict) -> bool:
    """Whether a session resumed from a checkpoint of its own directory."""
    source = facts.get("resumed_from")
    own = Path(str(facts.get("output_dir"))) / "checkpoints"
    # the folder may have been moved since, so both spellings are compared
    return bool(source) and (Path(source).parent == own or Path(source).parent.resolve() == own.resolve())
