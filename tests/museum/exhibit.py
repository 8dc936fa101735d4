"""An exhibit: a public report of wrong training, planted again in a small script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
Patch = dict[str, str]  # lines of a script, each there once, and what they become


@dataclass(frozen=True)
class Exhibit:
    """A report, and what the judge has to say first of the script with its cause.

    Attributes:
        number: of the report in the collection, from 1 to 40.
        reports: where it can be read.
        script: stem of a file in scripts/.
        patch: makes the script wrong.
        kind, text: of the first finding.
        counterpart: patch of the same lines that is right; the script as it is if empty.
        strategy: under which it shows.
        arguments: of the script.
        steps, resume: see prove.script.Proof.
    """

    number: int
    name: str
    reports: str
    symptom: str
    cause: str
    script: str
    patch: Patch
    kind: str
    text: str
    counterpart: Patch | None = None
    strategy: str = "ddp"
    arguments: tuple[str, ...] = ()
    steps: int = 3
    resume: tuple[str, ...] | None = None

    def source(self, is_wrong: bool) -> str:
        text = (SCRIPTS / f"{self.script}.py").read_text(encoding="utf-8")
        for old, new in (self.patch if is_wrong else self.counterpart or {}).items():
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is {text.count(old)} times in {self.script}.py, not once")
            text = text.replace(old, new)
        return text
