"""What is trained, on what: the facts by which a checkpoint is recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.storage.atomic import json_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from samecurve.interfaces.task import Task

_NOT_ARCHITECTURE = frozenset("_name_or_path transformers_version dtype torch_dtype architectures use_cache".split())


def identity(config: PreTrainedConfig, task: Task) -> dict:
    """What is trained, on what: the architecture's numbers and the rows' fingerprint."""
    fields = json_values(config.to_dict())  # as it comes back from state.json: names of classes have numbers as keys
    kept = {key for key in fields if key not in _NOT_ARCHITECTURE and "attn_implementation" not in key}
    data = {"rows": task.train.fingerprint, "vocabulary_size": task.vocabulary_size}
    if task.origin:
        data["hub"] = task.origin  # in the fingerprint, too; here a reader sees which commit it was
    if task.train.shares:
        data["shares"] = list(task.train.shares)  # in the fingerprint, too; here a reader sees that it is them
    return {"model": {key: fields[key] for key in kept}, "data": data}
