"""Short names of sources, for tables and legends."""

from __future__ import annotations

import re


def short(source: str) -> str:
    """Shorten a source's name as the table of runs has it: `llm-foundry A100 40GB`, `Megatron-LM PTD-P`."""
    text = re.sub(r"^\w+/([\w-]+)", r"\1", source.partition(" with ")[0])
    text = text.replace(" MPT benchmarks:", "").replace("Ultra-Scale Playbook", "Playbook")
    text = re.sub(
        r" README optimization table \(.*\)| training/.*| scaling post.*| quick start| Tables? \d\S*", "", text
    )
    text = re.sub(r",? arXiv \S+", "", text)
    return re.sub(r"\((?:ZeRO-3 without.*)\)", "ZeRO-3", text.replace("(PTD-P)", "PTD-P")).strip(" ,")
