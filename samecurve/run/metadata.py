"""Content of run.json: the configuration in effect, the hardware and the library versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel

from samecurve.config import own_code
from samecurve.distributed.affinity import num_cores
from samecurve.interfaces.task import identity
from samecurve.models.lora import start_of
from samecurve.models.pretrained import frozen
from samecurve.models.weight_files import fingerprint
from samecurve.models.weights import constant_tensors, kept_tensors, pretrained_of
from samecurve.specs.environment import processor, versions
from samecurve.storage.atomic import utc_timestamp

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from samecurve.interfaces.engine import EngineDescription
    from samecurve.interfaces.task import Task
    from samecurve.models.weights import ModelDescription
    from samecurve.strategy.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run is: the content of run.json, which the header at the start of a run shows, too.

    Attributes:
        engine: reported by the live engine.
        model: the model, from its config and its stored weights.
        data: the task's description of its data.
        data_fingerprints: of the rows of `train` and `held_out`.
        device: human-readable name of the device.
        adapter: as in `resume_identity`.
        counts: plural noun for what `tokens` counts, see Task.count.
        flops: the basis of mfu and hfu.
        optimizer_groups: how parameter groups are trained, a line each.
        compile_choice, precision_warning, allocator, cudnn_attention, attention_choice, router_loss: texts for the
            header; "" or None for no line.
        num_fp8_modules: number of linear modules with products in fp8.
        predicted: see planner/forecast.forecast.
        resumed_from: folder of the checkpoint.
        start_step: number of steps that were done when this session began.
    """

    plan: Plan
    engine: EngineDescription
    model: ModelDescription
    data: dict[str, Any]
    device: str
    data_fingerprints: dict[str, str] = field(default_factory=dict)
    adapter: dict | None = None
    counts: str = "tokens"
    flops: dict = field(default_factory=dict)
    compile_choice: str = ""
    precision_warning: str | None = None
    allocator: str = ""
    cudnn_attention: str | None = None
    attention_choice: str = ""
    optimizer_groups: Sequence[str] = ()
    router_loss: str = ""
    num_fp8_modules: int = 0
    predicted: dict = field(default_factory=dict)
    resumed_from: str | None = None
    start_step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the content of run.json."""
        recipe, strategy = self.plan.recipe, self.plan.strategy
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("plan", "engine", "model"):
            del own[name]
        return {
            "recipe_path": self.plan.recipe_path,
            "overrides": list(self.plan.overrides),
            "output_dir": recipe.output_dir,
            "notes": self.plan.notes,
            "from_strategy": self.plan.from_strategy,
            "no_effect": self.plan.no_effect,
            "strategy": strategy.name,
            "strategy_path": strategy.file,
            "family": strategy.family,
            "launcher": strategy.launcher,
            **asdict(self.model),
            **self.engine.to_json(),
            **own,
            "hardware": hardware_facts(),
            "precision": recipe.precision,
            "warmup_steps": recipe.warmup_steps,
            "recipe": recipe.model_dump(),
            "own_code": own_code.hashes(recipe),
            "accelerate": strategy.accelerate,
            "deepspeed": strategy.deepspeed,
            "versions": versions(),
            "started": utc_timestamp(),
        }


def resume_identity(
    plan: Plan, skeleton: PreTrainedModel, task: Task, constants: Mapping[str, Tensor] | None = None
) -> dict:
    """Build the facts that decide whether a run may resume, and those whose changes are logged on resuming.

    `constants`: weights.constant_tensors; None reads them.
    """
    recipe, known, base = plan.recipe, identity(skeleton.config, task), None
    still = sorted(frozen(skeleton))
    if recipe.model.path is not None and (task.has_reference or recipe.adapter.name or still):
        base = fingerprint(pretrained_of(skeleton, recipe).stored)
    digest = hashlib.sha256()
    constants = dict(constant_tensors(skeleton, recipe)) if constants is None else constants
    for name, tensor in constants.items():  # which checkpoints do not contain
        digest.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
        known["model"]["constants"] = digest.hexdigest()
    if kept := kept_tensors(skeleton, recipe):  # which an export copies from model.path
        known["model"]["kept_tensors"] = fingerprint(kept)
    fixed = {"count": len(still), "names": hashlib.sha256("\n".join(still).encode()).hexdigest()} if still else None
    if fixed and base and not recipe.adapter.name:
        fixed["weights"] = base
    evaluation = None if task.validation is None else task.validation.fingerprint
    if evaluation and task.context is not None:  # the loss is computed on batches, whose size changes the value
        evaluation = f"{evaluation} {recipe.batch.global_batch_size}"
    adapter = recipe.adapter.model_dump() | {"base_model": base, "path": start_of(recipe.adapter)}
    return {
        "recipe": recipe.model_dump(),
        "from_strategy": plan.from_strategy,
        "given": sorted(given_keys(recipe)),
        "strategy": plan.strategy.name,
        "world_size": plan.strategy.world_size,
        "versions": versions(),
        "own_code": own_code.hashes(recipe),
        **known,
        # the validation rows: metrics of others are not compared
        "evaluation": evaluation,
        "frozen": fixed,
        # layers and sizes of its matrices, and weights by their content and not by their path
        "adapter": adapter if recipe.adapter.name else None,
        # the weights that the task uses as reference model, by their content and not by their path
        "reference": base if task.has_reference else None,
    }


def given_keys(block: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that a recipe has from a file or the command line; the others are the schema's defaults."""
    for name in block.model_fields_set:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            yield from given_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def hardware_facts() -> dict[str, object]:
    """Describe the hardware of rank 0's process.

    cuda: the version PyTorch was built with, None for a CPU build. cudnn: the version that was loaded, e.g. 91900 for
    9.19; with an older one from LD_LIBRARY_PATH, sdpa silently uses other kernels.
    """
    threads, cuda = torch.get_num_threads(), torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {"processor": processor(), "cores": num_cores(), "threads": threads, "cuda": cuda, "cudnn": cudnn}
