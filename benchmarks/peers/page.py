"""The table of peers: peers.json as peers.md."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import table

RESULTS = Path(__file__).resolve().parents[1] / "peers.json"
AFTER = {"resume": "resume", "logged": "evaluation", "export": "export"}  # findings that are not of trained steps
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")


@dataclass(frozen=True)
class Peer:
    """A script in benchmarks/peers/, and the folder in which it saves step 3."""

    name: str
    script: str
    checkpoint: str = "checkpoint-3"

    def command(self, processes: int, strategies: tuple[str, ...], output: str) -> list[str]:
        """Return the words of `prove`; on 2 processes the script is also stopped and resumed."""
        files = ",".join(f"benchmarks/peers/strategies/{name}.yaml" for name in strategies)
        words = [sys.executable, "-m", "samecurve", "prove", f"benchmarks/peers/{self.script}.py", "--to_end"]
        words += ["--strategies", files, "--num_processes", str(processes), "--output", output]
        resume = f"--resume_from_checkpoint runs/peers/{self.script}/{self.checkpoint}"
        return words + (["--resume_with", resume] if processes == 2 else [])


PEERS = (
    Peer("transformers.Trainer", "trainer"),
    Peer("TRL SFTTrainer", "sft"),
    Peer("TRL DPOTrainer", "dpo"),
    Peer("TRL RewardTrainer", "reward"),
    Peer("TRL KTOTrainer", "kto"),
    Peer("Accelerate, labels counted", "accelerate_counted", "step_3"),
    Peer("Accelerate, `accumulate`", "accelerate_accumulate", "step_6"),
)


def render_page() -> str:
    """Return the text of peers.md."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    notes = (Path(__file__).parent / "notes.md").read_text(encoding="utf-8")
    rows, details = [], []
    for peer in PEERS:
        judged = {
            (strategy["strategy"], strategy["processes"]): strategy
            for certificate in results["peers"].get(peer.script, [])
            for strategy in certificate["strategies"]
        }
        columns = [*((name, 2) for name in STRATEGIES), ("ddp", 3)]
        rows.append([f"[{peer.name}](peers/{peer.script}.py)", *(_cell(judged.get(column)) for column in columns)])
        said: dict[tuple[str, str], list[str]] = {}
        for column in columns:
            for finding in _findings(judged.get(column)):
                said.setdefault(finding, []).append("{} x{}".format(*column))
        details += [[peer.script, ", ".join(where), kind, text] for (kind, text), where in said.items()]
    head = ("peer", *(f"{name} x2" for name in STRATEGIES), "ddp x3, uneven rows")
    return notes.format(
        machine=results["machine"],
        date=results["date"],
        commit=f" at {results['commit']}" if "commit" in results else "",
        table=table(head, rows),
        details=table(("script", "strategy", "finding", "what `prove` says"), details),
    )


def _findings(strategy: dict | None) -> list[tuple[str, str]]:
    if strategy is None:
        return []
    ended = [("ended", strategy["reason"].partition(", see ")[0])] if strategy["reason"] else []
    return ended + [(f"{finding['kind']}, step {finding['step']}", finding["text"]) for finding in strategy["findings"]]


def _cell(strategy: dict | None) -> str:
    """Say what holds: the trained steps, then evaluations, resumes and exports that do not."""
    if strategy is None:
        return "not run"
    if strategy["reason"]:
        return "does not run"
    kinds = [finding["kind"] for finding in strategy["findings"]]
    trained = [finding for finding in strategy["findings"] if finding["kind"] not in AFTER]
    largest = max(strategy["differences"].get("weights", 0), strategy["differences"].get("loss", 0))
    training = f"{trained[0]['kind']} differ in step {trained[0]['step']}; else within" if trained else "holds within"
    return "; ".join([f"{training} {largest:.0e}", *(f"{AFTER[kind]} differs" for kind in AFTER if kind in kinds)])
