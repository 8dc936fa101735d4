"""The columns that each task reads, for tests whose rows fit any task: data.ignore_columns has to name the others."""

from __future__ import annotations

from collections.abc import Iterable

ANSWER, PAIR = {"prompt", "completion"}, {"prompt", "chosen", "rejected"}
READ = {"sft": ANSWER, "distill": ANSWER, "dpo": PAIR, "reward": PAIR, "classify": {"text", "label"}}
READ |= {"token_classify": {"tokens", "tags"}, "process_reward": {"prompt", "completions", "labels"}}
READ["embed"] = {"anchor", "positive", "negative"}


def unread(task: str, columns: Iterable[str]) -> list[str]:
    return sorted(set(columns) - READ[task]) if task in READ else []
