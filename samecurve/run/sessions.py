"""The sessions of a run, read from its directory: each start that went on where another had stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samecurve.config.renamed_keys import in_new_names
from samecurve.run.run_directory import previous_folders
from samecurve.run.status import STATUS, read_status, split_refused
from samecurve.storage.atomic import read_json


@dataclass(frozen=True)
class SessionRecord:
    """One start of train.py. facts: its run.json. ended: what its status.json says, in words."""

    facts: dict
    ended: str

    @property
    def start_step(self) -> int:
        return self.facts.get("start_step") or 0


def sessions(run: Path) -> list[SessionRecord]:
    """From the first to the last, as far as the directory knows; [] where there is no run.

    Earlier ones lie in previous/N/. One that began afresh is the first: what lies before it was another run.
    """
    return list(reversed(list(_backwards(run))))


def unknown_origin(began: SessionRecord) -> str | None:
    """The checkpoint of another directory that this session went on from: what was before is not known here."""
    source = began.facts.get("resumed_from")
    return source if source and not _is_own(began.facts) else None


def _backwards(run: Path) -> Iterator[SessionRecord]:
    for folder in (run, *reversed(previous_folders(run))):
        facts = in_new_names(read_json(folder / "run.json"))
        if not facts:  # it ended before it had anything to say
            continue
        status = read_status(folder / STATUS)
        yield SessionRecord(facts, _ended(split_refused(status)[0]))
        if not _is_own(facts):
            return


def _is_own(facts: dict) -> bool:
    """Whether a session went on from a checkpoint of its own directory."""
    source = facts.get("resumed_from")
    return bool(source) and Path(source).parent == Path(str(facts.get("output_dir"))) / "checkpoints"


def _ended(status: dict) -> str:
    state, reason = status.get("state", "not known"), status.get("reason")
    if state == "running":
        return "without a word"
    return f"{state}: {reason}" if reason else state
