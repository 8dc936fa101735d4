"""Identity of a model and its data, which a checkpoint has to match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.storage.atomic import json_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from samecurve.interfaces.task import Task

# what an export or another version of transformers writes differently for the same architecture
_NOT_ARCHITECTURE = frozenset("_name_or_path transformers_version dtype torch_dtype architectures use_cache".split())


def identity(config: PreTrainedConfig, task: Task) -> dict:
    """Collect the architecture's configuration and the rows' fingerprint."""
    fields = json_values(config.to_dict())  # as read back from state.json: id2label's integer keys become strings
    kept = {key for key in fields if key not in _NOT_ARCHITECTURE and "attn_implementation" not in key}
    data = {"rows": task.train.fingerprint, "vocabulary_size": task.vocabulary_size}
    if task.origin:
        data["hub"] = task.origin  # part of the fingerprint, too; repeated here to show the commit
    if task.train.shares:
        data["shares"] = list(task.train.shares)  # part of the fingerprint, too; repeated here to show a difference
    return {"model": {key: fields[key] for key in kept}, "data": data}
