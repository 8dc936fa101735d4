"""Selection of the checkpoint to resume from: the newest that is good on all ranks and suits the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.checkpoint.manifest import (
    STEPS,
    DamagedManifest,
    check_records,
    list_checkpoints,
    marked_digest,
    read_manifest,
)
from samecurve.config.documents import Document
from samecurve.data.sampler import Steps
from samecurve.errors import CheckpointError
from samecurve.storage.fault_points import fault_point
from samecurve.storage.filesystem import LocalFileSystem, next_free
from samecurve.storage.records import COUNT, MOST_BYTES, count_levels, parse, read_record

if TYPE_CHECKING:
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.storage.filesystem import FileSystem

FORMAT = 1
STATE = "state.json"
_POSITIVE = range(1, 2**53)
# What the data loader's state may be made of: the place in a stream, or in each of its sources, and the sizes of the
# steps by their first position, from 0 on.
_PLACE = {"block": COUNT, "start": COUNT}
_PLACES = ({}, _PLACE, {"sources": [_PLACE]})
[_FIRST] = Steps(1).history
_SIZES = ({}, {_FIRST: _POSITIVE, f"^{_FIRST[:-1]}[1-9][0-9]{{,15}}": _POSITIVE})
# What is read from a checkpoint. A matching hash only proves that the file is as it was written, by whomever.
_SCHEMA = {
    "format": range(FORMAT, FORMAT + 1),
    **{key: COUNT for key in ("step", "updates", "samples")},
    "meter": {"average?": float, "weight?": float},
    "record": {"step?": COUNT, **dict.fromkeys(("loss?", "learning_rate?"), (float, None)), "recompilations?": COUNT},
    "stopping?": (
        {"metric": str, "value": (float, None), "step": COUNT, "evaluations_since": COUNT},
        {"metric": str, "value?": (), "evaluations_since": COUNT},  # none was finite
        {"*": ()},
    ),
    "anchor?": tuple({**place, **sizes, "*": ()} for place in _PLACES for sizes in _SIZES),
    "loss_scale": ({"value": float, "good_steps": COUNT, "deepspeed?": {"*": float}}, {"*": ()}),
    "generators": dict,
    "recipe": {
        "optimizer?": dict,
        "tokenizer?": {"template_date?": (date, None)},
        "model?": {"revision?": (str, None)},
    },
    "from_strategy?": {"*": str},
    "given?": [str],
    "strategy": str,
    "world_size": _POSITIVE,
    "versions": dict,
    "own_code?": dict,
    "model": dict,
    "data": {"rows": str},
    "evaluation?": (str, None),
    "adapter?": (dict, None),
    "frozen?": (dict, None),
    "reference?": (str, dict, None),
    "script?": {"states": {"*": {"kinds": [str], "scalars": dict}}, "buffers": dict, "values": dict, "seed": COUNT},
}


class CheckpointSelector:
    """Selects the checkpoint to resume from.

    Args:
        directory: output_dir/checkpoints.
        facts: see Checkpoints; None for a script's, of which nothing is compared here.
        log: see Checkpoints.
        names: regular expression of the checkpoints' names.
    """

    def __init__(
        self,
        directory: Path,
        facts: dict | None,
        world: ControlGroup,
        log: Callable[[str], None],
        files: FileSystem,
        names: str = STEPS,
    ):
        self._directory, self._facts, self._world, self._log = directory, facts, world, log
        self._files, self._names = files, names

    def select(self, resume: str) -> Path | None:
        """Select the checkpoint to resume from and verify every byte of it. Collective.

        The reasons for rejecting a checkpoint are logged.

        Args:
            resume: "auto", "none", or a checkpoint folder.

        Returns:
            The folder of the checkpoint; None for a fresh start.

        Raises:
            CheckpointError: all checkpoints are bad, or the run may not resume from the good one. Raised on all ranks.
        """
        rejected: list[str] = []
        chosen = self.candidates(resume)
        for folder in chosen:
            problems = self.problems(folder)
            if not problems:
                if self._facts is not None:
                    self._check_changes(folder, self._facts)
                return folder
            text = "\n".join(f"  {folder.name}/{problem}" for problem in problems)
            if len(chosen) > 1:
                self._log(f"skipped an unusable checkpoint in {folder.parent}:\n{text}")
            rejected.append(text)
        if rejected:
            folder, searched = chosen[0], resume == "auto"
            unusable = f"no checkpoint in {folder.parent} can be used" if searched else f"{folder} cannot be used"
            ways = "resume from another one (--resume FOLDER), or start over, which moves those of output_dir aside "
            ways = f"{ways}(--fresh)" if self._facts is not None else "load another one"
            raise CheckpointError(f"{unusable}; {ways}\n" + "\n".join(rejected))
        return None

    def candidates(self, resume: str) -> list[Path]:
        """List the candidates, newest first, as seen by rank 0: all ranks must check the same folders."""
        if resume not in ("auto", "none"):
            return [Path(resume)]
        if resume == "none":
            return []
        return self._world.on_main(lambda: list_checkpoints(self._files, self._directory, self._names))

    def problems(self, folder: Path) -> list[str]:
        """List the problems that all ranks found. Collective.

        Rank 0 reads the manifest and deals out its files, so that each is read once, by one rank.
        """
        problems, shares = [], None
        if self._world.is_main:
            digest, records = "", []
            try:
                digest, records = read_manifest(self._files, folder)
            except DamagedManifest as error:
                problems = [str(error.damage)]
            shares = [(digest, records[rank :: self._world.size]) for rank in range(self._world.size)]
        digest, share = self._world.scatter(shares)
        if digest:
            try:
                fault_point("load.verify")
                # If hosts had folders of their own, each copy could be whole and yet be of another step or have other
                # weights: the first rank of each host compares what it sees with rank 0.
                is_first = os.environ.get("LOCAL_RANK", "0") == "0" and not self._world.is_main
                if is_first and marked_digest(self._files, folder) != digest:
                    problems = [
                        "manifest.json differs between machines; output_dir has to be the same folder on all machines"
                    ]
                else:
                    problems = [str(damage) for damage in check_records(self._files, folder, share)]
            except DamagedManifest as error:
                problems = [f"{error.damage}; output_dir has to be the same folder on all machines"]
            except OSError as error:  # not raised here: the other ranks wait in `conclude`
                problems = [str(error)]
        problems = self._world.conclude(problems, lambda of_all: sorted(set().union(*of_all)))
        return problems or self._world.on_main(lambda: state_problems(folder, self._facts))

    def _check_changes(self, folder: Path, facts: dict) -> None:
        saved = self._world.on_main(lambda: read_state(folder))
        refused = refusals(saved, facts)
        if refused:
            raise CheckpointError(
                f"{folder}: the run cannot resume with these changes:\n"
                + "\n".join(f"  {text}" for text in refused)
                + f"\nundo them, start another run (output_dir={next_free(self._directory.parent)}), or start this one "
                "over (--fresh)"
            )
        changed = changes(saved, facts)
        if saved["step"] < facts["recipe"]["steps"]:  # the start reports a run that has no step left
            self._log("\n".join([f"resuming from {folder}", *(f"  changed: {text}" for text in changed)]))


def read_state(folder: Path, of_script: bool = False) -> dict:
    """Read a checkpoint's state.json, after its hash.

    Args:
        of_script: expect one that `Accelerator.save_state` wrote in a script, not one of train.py.

    Raises:
        CheckpointError: it is damaged, no run of this version wrote it, or it is of the other origin.
    """
    files = LocalFileSystem()
    try:
        _, records = read_manifest(files, folder)
        damages = check_records(files, folder, [record for record in records if record.name == STATE])
    except DamagedManifest as error:
        damages = [error.damage]
    for damage in damages:
        raise CheckpointError(f"{folder}/{damage}; use another checkpoint")
    state = read_record(folder / STATE, _SCHEMA).require(CheckpointError, "use another checkpoint")
    if of_script and "script" not in state:
        raise CheckpointError(f"{folder}: a checkpoint of train.py, which train.py resumes: --resume {folder}")
    if not of_script and "script" in state:
        raise CheckpointError(f"{folder}: written by accelerator.save_state in a script; load it there with load_state")
    return state


def state_problems(folder: Path, facts: dict | None = None) -> list[str]:
    """List what is wrong with state.json besides its hash: [] or one problem.

    facts: see Checkpoints; with them, a stream's places have to be those of the recipe's sources.
    """
    record = read_record(folder / STATE, _SCHEMA)
    problem = record.problem or _lost_sources(record.value, facts or {})
    return [f"{STATE}: {problem}"] if problem else []


def _lost_sources(saved: dict, now: dict) -> str:
    places = saved.get("anchor", {}).get("sources")
    parts = now.get("recipe", {}).get("data", {}).get("mixture")
    # other rows are refused, whatever state they left
    if not places or not parts or saved["data"] != now["data"] or len(places) == len(parts):
        return ""
    return f"anchor.sources: found {len(places)}, expected {len(parts)}, one for each part of data.mixture"


def check_readable(state: bytes, values: dict) -> None:
    """Check that `read_state` will read a script's state.json.

    Args:
        state: the file's content.
        values: the part of it that the script's objects gave, by their names.

    Raises:
        CheckpointError: the file would be too large or too deep; names the object with the most of it.
    """
    too_large = len(state) > MOST_BYTES
    problem = f"larger than {MOST_BYTES:,} bytes" if too_large else parse(state, _SCHEMA)[1].removeprefix("damaged: ")
    if problem:
        sizes = {label: len(json.dumps(value)) if too_large else count_levels(value) for label, value in values.items()}
        raise CheckpointError(
            f"{STATE} could not be read again: {problem}, most of them in {max(sizes, key=sizes.__getitem__)}; let its "
            "state_dict return tensors or arrays instead of long or deep lists"
        )


# Recipe keys that may not change. The contents of model and data are compared directly (interfaces/task.py), so
# their paths may change.
FIXED = ("task", "seed", "optimizer.name", "optimizer.bf16_rounding", "embed.queue")
# Recipe keys that change the rows.
_OF_ROWS = ("data.", "tokenizer.", "batch.sequence_length", "batch.global_batch_size")
_OF_ROWS += ("evaluate.path", "evaluate.split")  # with which no rows of the training data are held out
# Recipe keys whose changes are not logged.
SILENT = (
    *("output_dir", "data.cache_dir", "data.num_workers", "logging.every_steps", "logging.on_failure"),
    *("profile.steps", "profile.ranks", "rehearse", "memory.limit_gib", "checkpoint.mirror"),
)


def refusals(saved: dict, now: dict) -> list[str]:
    """List every reason why the run may not resume; [] if it may.

    Args:
        saved: the content of the checkpoint's state.json: `recipe`, `model`, `data`, `step`, ...
        now: the same facts about the current run.
    """
    recipe_changes = list(_differences(saved["recipe"], now["recipe"]))
    # what an older checkpoint does not know had no effect then
    reasons = [text for key, text, was_known in recipe_changes if key in FIXED and was_known]
    reasons += [f"model.{text}" for _, text, _ in _differences(*_shared(saved["model"], now["model"]))]
    of_rows = [text for key, text, _ in recipe_changes if key.startswith(_OF_ROWS) and key not in SILENT]
    for key, text, _ in _differences(saved["data"], now["data"]):
        # of the rows only a hash is known, which nobody can read
        source = now["recipe"].get("data", {})
        mixed = ", ".join(part["path"] for part in source.get("mixture") or ())
        named = source.get("path") or source.get("source") or mixed or "the data"
        causes = ", ".join(of_rows) or f"the content of {named}, or of the tokenizer, has changed"
        reasons.append(f"other rows: {causes}" if key == "rows" else f"data, changed since the checkpoint: {text}")
    before, after = ({"adapter": facts.get("adapter")} for facts in (saved, now))
    path = now["recipe"].get("model", {}).get("path")
    base = f"model.path: the weights of {path} are not those that the adapter of the checkpoint belongs to"
    start = "adapter.path: the adapter there is not the one that the checkpoint's run went on with"
    known = {"adapter.base_model": base, "adapter.path": start}
    reasons += [known.get(key, text) for key, text, _ in _differences(before, after)]
    was, is_now = saved.get("frozen") or {}, now.get("frozen") or {}
    if was.get("names") != is_now.get("names"):
        counts = f"{was.get('count', 0)} parameters then, {is_now.get('count', 0)} now"
        reasons.append(f"optimizer.groups: the frozen parameters are others ({counts}), and the checkpoint lacks those")
    elif was.get("weights") != is_now.get("weights"):
        text = "are not those that the run's frozen parameters have; give the folder of the initial weights"
        reasons.append(f"model.path: the weights of {path} {text}")
    if saved.get("reference") != now.get("reference"):
        reasons.append(
            "model.path: the run's loss uses its initial weights as reference, and these weights differ from "
            "them; give the folder of the initial weights"
        )
    reasons += _lost_values(saved, now)
    steps, epochs = now["recipe"]["steps"], now["recipe"].get("epochs")
    if steps < saved["step"]:
        given = f"epochs: {epochs:g}, which are {steps} steps" if epochs else f"steps: {steps}"
        reasons.append(f"{given}, but the checkpoint already is at step {saved['step']}")
    return reasons


# Keys of which no loss depends, and keys that say the same as another one.
_NOT_OF_THE_CURVE = ("batch.micro_batch_size", "compile", "memory.")
_OTHER_WAYS = {"steps": "epochs", "schedule.warmup_steps": "schedule.warmup_ratio"}


def _lost_values(saved: dict, now: dict) -> Iterator[str]:
    """Yield the reason that values of an earlier strategy's file would silently become defaults; arguments as above."""
    changed = {key for key, *_ in _differences(saved["recipe"], now["recipe"])}
    known = {*now.get("from_strategy", ()), *now.get("given", ())}
    lost = [
        key
        for key in saved.get("from_strategy", ())
        if key in changed and not ({key, _OTHER_WAYS.get(key, key)} & known or key.startswith(_NOT_OF_THE_CURVE))
    ]
    if lost:
        recipes = (Document("recipe", facts["recipe"]) for facts in (saved, now))
        kept, defaults = ([f"{key}={_typed(recipe.get(*key.split('.')))}" for key in lost] for recipe in recipes)
        yield (
            "the strategy's file of the checkpoint gave values that neither the recipe nor the present file gives; add "
            f"them, {' '.join(kept)}, or the defaults, {' '.join(defaults)}"
        )


def _typed(value: Any) -> str:
    """The value as an argument of the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def without_effect(saved: dict, now: dict) -> list[str]:
    """List the changed recipe keys that have no effect on a run without a step left. Arguments as in `refusals`."""
    used = ("steps", "epochs", "batch.micro_batch_size", *SILENT)
    recipe_changes = _differences(saved["recipe"], now["recipe"])
    known = ((key, text) for key, text, was_known in recipe_changes if was_known)
    return [text.replace(":", "", 1) for key, text in known if key not in used and not key.startswith("export.")]


def changes(saved: dict, now: dict) -> list[str]:
    """List the allowed changes: recipe keys, strategy, number of processes, versions, own code, validation rows.

    Arguments as in `refusals`.
    """
    recipe_changes = _differences(saved["recipe"], now["recipe"])
    # `refusals` compares the adapter as a whole, with a fingerprint of its base model instead of a path
    unlogged = (*FIXED, *SILENT)
    allowed = [text for key, text, _ in recipe_changes if key not in unlogged and not key.startswith("adapter")]
    for key in ("strategy", "world_size", "versions", "own_code"):
        before, after = ({key: facts.get(key, {})} for facts in (saved, now))
        allowed += [text for _, text, _ in _differences(before, after)]
    common = _shared(saved["model"], now["model"])[0].keys()
    for key in sorted((saved["model"].keys() | now["model"].keys()) - common):
        allowed.append(f"model.{key}: known to only one of the two versions of transformers")
    if saved.get("evaluation") != now.get("evaluation"):
        text = "not the checkpoint's rows, or in other batches; checkpoint.best and evaluate.patience start anew"
        allowed.append(f"evaluation: {text}")
    return allowed


def comparable(saved: dict, now: dict) -> dict:
    """Return `saved` without metrics and early stopping if these are of another evaluation. Arguments as above."""
    if saved.get("evaluation") == now.get("evaluation"):
        return saved
    record = {key: value for key, value in saved["record"].items() if not key.startswith("eval_")}
    return saved | {"record": record, "stopping": {}}


def _shared(before: dict, after: dict) -> tuple[dict, dict]:
    """Reduce both configurations to their common keys: the fields differ between versions of transformers.

    Ignoring a field is safe because the shapes of the trained parameters are compared too.
    """
    common = before.keys() & after.keys()
    return {key: before[key] for key in common}, {key: after[key] for key in common}


def _differences(before: dict, after: dict, prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield (dotted key, "key: before -> after", whether `before` has the key) for every leaf that differs."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            was = _shown(old) if key in before else "unknown then"
            yield f"{prefix}{key}", f"{prefix}{key}: {was} -> {_shown(new)}", key in before


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
