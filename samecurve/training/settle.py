"""Keys of the recipe whose values are found when a run starts, and the prediction of the run in its header.

The value of a key is part of the recipe from then on: of run.json and of every checkpoint, for a resumed run to keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import cached_file

from samecurve.checkpoint.manifest import list_checkpoints
from samecurve.checkpoint.resume import read_state
from samecurve.config.rules import in_steps
from samecurve.engines import factory
from samecurve.errors import CheckpointError, ConfigurationError
from samecurve.losses.contrastive import MODULES, check_modules, stated_pooling
from samecurve.metrics.meter import device_memory_bytes
from samecurve.models.weight_files import commit_of
from samecurve.specs.gpus import GIB
from samecurve.specs.tasks import TASKS
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.records import read_record
from samecurve.strategy.preflight import compiler_problems
from samecurve.strategy.validate import choose_compile

if TYPE_CHECKING:
    from samecurve.checkpoint.manager import Checkpoints
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan
    from samecurve.training.session import Context


def settle_revision(context: Context) -> Context:
    """Replace the revision of a model on the hub by the commit that it stands for. Collective.

    Config, tokenizer, weights and code are read one by one on each host, and a branch may move meanwhile. A run that is
    resumed without model.revision keeps its commit.
    """
    model = context.plan.recipe.model
    path = model.path
    if path is None or Path(path).is_dir():
        return context

    def choose() -> str | None:
        saved = _saved(context).get("recipe", {}).get("model", {})
        if model.revision is None and saved.get("path") == path and saved.get("revision"):
            return saved["revision"]
        return commit_of(path, model.revision) or model.revision

    return _with(context, model=model.model_copy(update={"revision": context.world.on_main(choose)}))


def settle_pooling(context: Context) -> Context:
    """Let an embedding model go on with its own pooling, unless the recipe names one. Collective.

    Raises:
        ConfigurationError: the model has layers behind its pooling, or a pooling that is not computed here.
    """
    recipe = context.plan.recipe
    if recipe.task != "embed" or recipe.model.path is None:
        return context
    path, revision = recipe.model.path, recipe.model.revision

    def choose() -> str:
        check_modules(f"model.path: {path}", _sentence_file(path, revision, "modules.json", MODULES) or [])
        if "pooling" in recipe.embed.model_fields_set:
            return recipe.embed.pooling
        modes = _sentence_file(path, revision, "1_Pooling/config.json", {"*": object}) or {}
        return stated_pooling(path, modes)

    pooling = context.world.on_main(choose)
    if pooling != recipe.embed.pooling:
        context.progress.log(f"embed.pooling: {pooling}, as {path} has it in 1_Pooling/config.json")
    return _with(context, embed=recipe.embed.model_copy(update={"pooling": pooling}))


def _sentence_file(path: str, revision: str | None, name: str, schema: Any) -> Any:
    """Read a file of sentence-transformers in a model's folder, or of the hub; None where it is not there."""
    options = {
        f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    file = cached_file(path, name, revision=revision, **options)
    return read_record(Path(file), schema).optional(ConfigurationError, "restore it") if file else None


def _with(context: Context, **values: object) -> Context:
    """Return the context with other values of some keys or blocks of its recipe."""
    recipe = context.plan.recipe.model_copy(update=values)
    return replace(context, plan=replace(context.plan, recipe=recipe))


def _saved(context: Context) -> dict:
    """Return state.json of the newest readable checkpoint to resume from; {} without one. For rank 0."""
    candidates = [] if context.plan.resume in ("auto", "none") else [Path(context.plan.resume)]
    if context.plan.resume == "auto":
        candidates = list_checkpoints(LocalFileSystem(), context.run.checkpoints)
    for folder in candidates:
        with contextlib.suppress(CheckpointError):  # find_checkpoint reports it
            return read_state(folder)
    return {}


def settle_date(context: Context) -> Context:
    """Choose the day for chat templates that write today's date, which a resumed run keeps. Collective.

    It is the day of the newest readable checkpoint to resume from, else today by rank 0's clock. As a key of the recipe
    it becomes part of run.json and of every checkpoint.
    """
    recipe = context.plan.recipe
    if not TASKS[recipe.task].chats or not recipe.data.chat or recipe.tokenizer.template_date is not None:
        return context

    def choose() -> str:
        saved = _saved(context).get("recipe", {}).get("tokenizer", {})
        return saved.get("template_date") or date.today().isoformat()

    return _with(
        context, tokenizer=recipe.tokenizer.model_copy(update={"template_date": context.world.on_main(choose)})
    )


def settle_steps(context: Context, task: Task) -> Context:
    """Count the recipe's epochs in steps, now that the number of rows is known. Collective. Raises as `in_steps`."""
    recipe = context.recipe
    if not recipe.data.streaming:  # which has neither epochs nor a number of rows
        saved = context.world.on_main(lambda: _saved(context)) if recipe.epochs else {}
        recipe = in_steps(recipe, len(task.train), saved.get("step", 0), saved.get("samples", 0))
    context.progress.total_steps = recipe.steps
    return replace(context, plan=replace(context.plan, recipe=recipe))


def settle_compile(context: Context, checkpoints: Checkpoints) -> Context:
    """Choose what `compile: auto` means for the steps that are left; rank 0 decides. Collective."""
    plan, checkpoint = context.plan, checkpoints.resumed_from
    if plan.recipe.compile != "auto":
        return context

    def choose() -> tuple[str, str]:
        on_gpu = context.accelerator.device.type == "cuda"
        missing = next(compiler_problems(plan.recipe.model_copy(update={"compile": "regional"}), on_gpu), "")
        if missing:
            return "off", missing.partition(": ")[2]
        done = read_state(checkpoint)["step"] if checkpoint else 0
        return choose_compile(plan.strategy, plan.recipe.steps - done)

    kind, why = context.world.on_main(choose)
    return replace(_with(context, compile=kind), compile_choice=f"{kind} (auto): {why}")


FORECAST = "samecurve.planner.forecast"
PREDICTION_SECONDS = 60.0  # the process takes less than a second


def predict(context: Context, fields: dict, peak_tflops: float | None) -> dict:
    """Predict step time and memory in a short process of its own, because nothing that trains depends on the planner.

    Args:
        fields: of the model's Hugging Face config.
        peak_tflops: of matrix products on this device; None if unknown.

    Returns:
        See planner/forecast.forecast; only `reason` where the process has failed.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", context.plan.strategy.world_size))
    device = {
        "name": factory.device_name(context.accelerator),
        "memory_gib": device_memory_bytes(context.accelerator.device, processes) / GIB,
        "peak_tflops": peak_tflops,
        "per_node": processes,
    }
    return ask_planner(context.plan, fields, device)


def ask_planner(plan: Plan, fields: dict, device: dict) -> dict:
    """Start planner/forecast.py as a process; see `predict`."""
    # python -m would look for the package in the working directory first, where files of other names may be its modules
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[0] = {root!r}; import runpy; runpy.run_module({FORECAST!r}, run_name='__main__')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps((plan, fields, device)),
            capture_output=True,
            timeout=PREDICTION_SECONDS,
            check=True,
        )
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"reason": f"the planner's process failed with exit code {error.returncode}: {''.join(last)}"}
    # pickle raises the last three for what it cannot write
    except (OSError, ValueError, subprocess.SubprocessError, pickle.PicklingError, TypeError, AttributeError) as error:
        return {"reason": f"the planner's process failed: {error}"}
