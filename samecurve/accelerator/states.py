"""`save_state` and `load_state` of the Accelerator: Accelerate's signatures, this project's checkpoints.

A folder that `save_state` returned is complete, survives a power cut and can be loaded under any strategy on any number
of processes (docs/checkpoints.md). It replaces an older one only once it is complete itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from samecurve.accelerator.portable_values import decode, encode
from samecurve.accelerator.prepared_state import PreparedState
from samecurve.checkpoint import commit, format, manifest
from samecurve.checkpoint.resume import FORMAT, STATE, CheckpointSelector, check_readable, read_state
from samecurve.checkpoint.snapshot import BUFFER, Snapshot, generators_of, restore
from samecurve.distributed.control_group import ARRIVE_SECONDS, ControlGroup
from samecurve.errors import CheckpointError, ConfigurationError
from samecurve.storage.atomic import storage_errors, utc_timestamp
from samecurve.storage.filesystem import LocalFileSystem, make_durable_folder

if TYPE_CHECKING:
    from samecurve.checkpoint.manager import Checkpoints, TrainProgress
    from samecurve.interfaces.engine import Engine

logger = get_logger(__name__)

SERIES = "checkpoint_[0-9]+"
"""Names of ProjectConfiguration.automatic_checkpoint_naming, as a regular expression."""
_FILES = LocalFileSystem()
_LATE_SECONDS = 1800.0  # for what the main process does before it saves, such as an evaluation of its own
_OWN = re.compile(rf"rank_\d+\.safetensors|{STATE}|{format.INDEX}|{manifest.MANIFEST}|{manifest.MARKER}")
# how a group computes, which depends on the device, and not what
_OF_DEVICE = ("params", "foreach", "fused", "capturable", "differentiable")


class States(accelerate.Accelerator):
    """The part of `samecurve.Accelerator` that saves and loads."""

    _control: ControlGroup  # of PreparedData
    drop_gradients: Callable[[], None]  # of PreparedData
    _run: tuple[Engine, Checkpoints] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._calls: Counter[str] = Counter()

    def attach_run(self, engine: Engine, checkpoints: Checkpoints) -> None:
        """Let save_state and load_state save and load a run of train.py, with the position that it gives."""
        self._run = engine, checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike | None = None,
        safe_serialization: bool = True,
        *,
        position: TrainProgress | None = None,
        wait: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save models, optimizers, schedulers, loaders' positions, registered objects and generators. Collective.

        Without sharding the main process may call alone, as scripts for Accelerate do; it waits a few seconds first.
        Gradients of an unfinished accumulation are not saved. What `register_save_state_pre_hook`'s hooks write goes
        into the folder with all else, unhashed; what they take out of `weights` is saved nevertheless.

        Args:
            output_dir: the folder, replaced if it exists, but for files that are no checkpoint's. Ignored with
                automatic_checkpoint_naming, which makes it project_dir/checkpoints/checkpoint_ITERATION.
            safe_serialization: without effect, nothing is pickled.
            position: in train.py, the position to save.
            wait: in train.py, return once the checkpoint is complete.

        Returns:
            The folder.

        Raises:
            ValueError: checkpoint_ITERATION exists already, as in Accelerate.
            CheckpointError: an object's state_dict or an optimizer's state has what checkpoints cannot hold.
            StorageError: it could not be written; an older checkpoint is as it was. On all ranks.
            NumericError: a weight is not finite. On all ranks.
        """
        if self._run is not None:
            engine, checkpoints = self._run
            assert position is not None, "train.py knows the position"
            checkpoints.save(engine, position, wait)
            return checkpoints.folder(position)
        self._report_unused(save_model_func_kwargs)
        project, final = self.project_configuration, self._destination(output_dir)
        names = SERIES if project.automatic_checkpoint_naming else re.escape(final.name)
        world = self._savers(final)
        if world is None:
            project.iteration += 1
            return final
        if project.automatic_checkpoint_naming and world.broadcast(final.exists()):
            raise ValueError(
                f"Checkpoint directory {final} ({self.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
        self._commit(final, names, world)
        if world.is_main:
            problem = commit.sweep(_FILES, final.parent, names)
            if project.automatic_checkpoint_naming and project.total_limit is not None:
                problem = commit.rotate(_FILES, final.parent, project.total_limit, (), names)
            if problem:
                self.print(f"could not remove all old checkpoints in {final.parent}: {problem}")
        project.iteration += 1
        return final

    def _savers(self, final: Path) -> ControlGroup | None:
        """Return who saves: all processes, or the main one alone, as scripts for Accelerate do; None on the others."""
        world = self._control
        if self._shards or self._all_call(f"save_state/{final}"):
            return world
        logger.warning_once(
            f"save_state: not all processes came within {ARRIVE_SECONDS:g} s, so the main process saves alone, without "
            "the others' random generators. Call it on all of them, not `if accelerator.is_main_process`"
        )
        return ControlGroup(alone=True) if world.is_main else None

    def _all_call(self, place: str) -> bool:
        """Whether all processes make this call, which one may have made before."""
        self._calls[place] += 1
        return self._control.all_arrive(f"{place}/{self._calls[place]}", _LATE_SECONDS)

    def _commit(self, final: Path, names: str, world: ControlGroup) -> None:
        """Write a script's checkpoint; see commit.Content for `names`. Collective in `world`. Raises as save_state."""
        live, tensors = PreparedState(self, shard=(world.rank, world.size)), {}
        script = {
            "states": encode(live.states, "optimizer", {}),
            "buffers": {name: list(buffer.shape) for name, buffer in live.buffers.items()},
            "values": self._encoded(tensors, world),
            "seed": torch.initial_seed() % 2**53,
        }
        tensors |= {f"{BUFFER}/{name}": buffer for name, buffer in live.buffers.items()}
        state = {"format": FORMAT, "step": live.updates, "updates": live.updates, "samples": 0, "meter": {}}
        state |= {"record": {}, "loss_scale": live.loss_scale_state, "generators": generators_of(live, world)}
        state |= {"recipe": {}, "strategy": self.distributed_type.value, "world_size": world.size, "model": {}}
        state |= {"versions": {"torch": torch.__version__, "accelerate": accelerate.__version__}, "data": {"rows": ""}}
        state |= {"time": utc_timestamp(), "script": script}
        snapshot, text = Snapshot(live), json.dumps(state).encode()
        taken = snapshot.take(copy=False, whole=tensors if world.is_main else {})

        def write(folder: Path) -> tuple:
            hooks = self._save_model_state_pre_hook.values()
            weights = [self.get_state_dict(model, unwrap=False) for model in self._models if hooks and not self._shards]
            for hook in hooks:
                hook(self._models, weights, str(folder))
            wrote = snapshot.write(_FILES, folder, world.rank, taken, lambda: None)
            if world.is_main and final.exists():
                _keep_others(final, folder)
            return wrote

        def prepare() -> None:
            check_readable(text, script["values"])
            with storage_errors(final):
                make_durable_folder(final.parent)
                commit.recover(_FILES, final)

        world.on_main(prepare)
        num_bytes = sum(entry.nbytes for entry in taken[0])
        small_files = partial(snapshot.small_files, text)
        content = commit.Content(live.updates, num_bytes, write, small_files, final.name, names)
        commit.commit(_FILES, final.parent, content, world.conclude, world.rank)

    def load_state(
        self, input_dir: str | os.PathLike | None = None, load_kwargs: dict | None = None, **load_model_func_kwargs: Any
    ) -> TrainProgress | None:
        """Load what `save_state` saved, under any strategy and on any number of processes. Collective.

        Args:
            input_dir: the folder. None: the newest good one of automatic_checkpoint_naming.
            load_kwargs: without effect, nothing is unpickled.

        Returns:
            In train.py, the checkpoint's position; otherwise None.

        Raises:
            ValueError: there is no such folder, or no name and no automatic naming, as in Accelerate.
            CheckpointError: the checkpoint is damaged, or of other models, optimizers or objects. On all ranks.
        """
        if self._run is not None:
            engine, checkpoints = self._run
            assert input_dir is not None, "train.py knows the folder"
            return checkpoints.load(Path(input_dir), engine)
        self._report_unused(load_model_func_kwargs | (load_kwargs or {}))
        world = self._control
        folder = self._chosen(input_dir)
        saved = world.on_main(lambda: read_state(folder, of_script=True))
        script = saved["script"]
        models = [] if self._shards else [*self._models]
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(folder))
        live = PreparedState(self, decode(script["states"]))
        self._check(folder, script, live)
        self.drop_gradients()  # of a step that the checkpoint does not know
        reader = restore(folder, live, saved, world, script["seed"], lambda: None)
        with torch.no_grad():
            for name, buffer in live.buffers.items():
                buffer.copy_(reader.tensor(0, f"{BUFFER}/{name}").reshape(buffer.shape))
        values = script["values"]
        self.step = values["step"] - values["step"] % self.gradient_accumulation_steps  # a whole step begins
        for label, part in self._parts():
            if label in values:
                part.load_state_dict(decode(values[label], lambda key: reader.tensor(0, key)))
            else:
                self.print(f"{folder}: no position of {label} was saved; it begins with its first batch")
        return None

    def save_whole(self, model: Any) -> None:
        """Let save_pretrained of a prepared model write whole weights, where they are divided over the processes."""
        whole: Any = self.unwrap_model(model)
        divided = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in whole.parameters())
        if not divided or not hasattr(whole, "save_pretrained"):
            return
        save, place = whole.save_pretrained, f"save_pretrained/{len(self._models)}"

        @wraps(save)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("state_dict") is None:
                if not self._all_call(place):
                    raise ConfigurationError(
                        "save_pretrained: the weights are divided over all processes. Call it on all of them, or give "
                        "state_dict=accelerator.get_state_dict(model), which all have called"
                    )
                kwargs["state_dict"] = self.get_state_dict(model)
            return save(*args, **{"is_main_process": self.is_main_process} | kwargs)

        whole.save_pretrained = gathered

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield all objects with a state of their own, by the name that errors give them."""
        for kind, objects in (
            ("optimizer", [_Groups(wrapper.optimizer) for wrapper in self._optimizers]),
            ("scheduler", self._schedulers),
            ("loader", self._dataloaders),
            ("registered object", self._custom_objects),
        ):
            yield from ((f"{kind} {index}", part) for index, part in enumerate(objects))

    def _encoded(self, tensors: dict[str, Tensor], world: ControlGroup) -> dict:
        """Encode the states of all parts; a loader without one is left out. Raises as save_state, on all ranks."""
        values, problems = {}, []
        for label, part in self._parts():
            try:
                state = part.state_dict()
            except AttributeError:
                if not label.startswith("loader"):
                    raise
                continue  # torch's DataLoader has none
            try:
                values[label] = encode(state, f"{label} ({type(part).__name__})", tensors)
            except CheckpointError as error:
                problems.append(str(error))
        problems = world.conclude(problems, lambda of_all: sorted(set().union(*of_all)))
        if problems:
            raise CheckpointError("\n".join(problems))
        # an unfinished step is done again, from the position that the loaders give
        return values | {"step": self.step - self.step % self.gradient_accumulation_steps}

    def _check(self, folder: Path, script: dict, live: PreparedState) -> None:
        """Raise CheckpointError on all ranks if buffers or objects differ; `restore` compares the parameters."""
        buffers = {name: list(buffer.shape) for name, buffer in live.buffers.items()}
        loaders = {f"loader {index}" for index in range(len(self._dataloaders))}  # may have no position
        values, labels = script["values"].keys() - {"step", *loaders}, {label for label, _ in self._parts()} - loaders
        here, there = {*buffers, *labels}, {*script["buffers"], *values}
        problems = [f"{name}: only in the checkpoint" for name in there - here]
        problems += [f"{name}: only in the script" for name in here - there]
        problems += [
            f"{name}: {script['buffers'][name]} in the checkpoint, {shape} in the model"
            for name, shape in buffers.items()
            if script["buffers"].get(name, shape) != shape
        ]
        for index, wrapper in enumerate(self._optimizers):
            if saved := script["values"].get(f"optimizer {index}"):
                problems += _Groups(wrapper.optimizer).differences(saved, f"optimizer {index}")
        if problems:
            shown = "\n".join(f"  {problem}" for problem in sorted(problems)[:8])
            raise CheckpointError(f"{folder}: the checkpoint is of other models or objects\n{shown}")

    @property
    def _shards(self) -> bool:
        return self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

    def _report_unused(self, arguments: dict) -> None:
        if arguments:
            self.print(f"save_state and load_state write and read one format; without effect: {', '.join(arguments)}")

    def _destination(self, output_dir: str | os.PathLike | None) -> Path:
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            return Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}").absolute()
        if output_dir is None:
            raise ValueError("save_state needs output_dir, or a ProjectConfiguration with automatic_checkpoint_naming")
        final = Path(os.path.abspath(os.path.expanduser(output_dir)))
        if final in (Path.cwd(), *Path.cwd().parents):
            raise ValueError(f"{final}: save_state replaces its folder as a whole; give it one of its own in there")
        return final

    def _chosen(self, input_dir: str | os.PathLike | None) -> Path:
        """Return the checkpoint to load, verified. Raises as load_state."""
        project, world = self.project_configuration, self._control
        if input_dir is None and not project.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        if input_dir is None:
            directory, resume = Path(self.project_dir, "checkpoints").absolute(), "auto"
        else:
            given = Path(os.path.abspath(os.path.expanduser(input_dir)))

            def is_there() -> bool:
                with storage_errors(given):
                    commit.recover(_FILES, given)
                    return given.is_dir()

            if not world.on_main(is_there):
                raise ValueError(f"Tried to find {input_dir} but folder does not exist")
            directory, resume = given.parent, str(given)
        selector = CheckpointSelector(directory, None, world, self.print, _FILES, SERIES)
        candidates = selector.candidates(resume)
        if not candidates:
            raise CheckpointError(f"{directory}: there is no checkpoint to load")
        world.on_main(lambda: _refuse_accelerates_own(candidates[0]))
        folder = selector.select(resume)
        assert folder is not None
        if input_dir is None:  # the next save makes another folder, as none is replaced
            project.iteration = max(project.iteration, int(candidates[0].name.rpartition("_")[2]) + 1)
        return folder


class _Groups:
    """What an optimizer's groups say, such as learning rates. What it keeps by parameter is in PreparedState."""

    def __init__(self, optimizer: Any):
        self._groups = optimizer.param_groups
        # ZeRO's class has the optimizer inside of it
        self._class = type(getattr(optimizer, "optimizer", optimizer)).__name__

    def state_dict(self) -> dict:
        groups = [{key: value for key, value in group.items() if key not in _OF_DEVICE} for group in self._groups]
        return {"class": self._class, "groups": groups}

    def differences(self, saved: dict, label: str) -> list[str]:
        if len(saved["groups"]) != len(self._groups):
            counts = f"{len(saved['groups'])} parameter groups in the checkpoint, {len(self._groups)} in the script"
            return [f"{label}: {counts}"]
        # DeepSpeed makes its own Adam of torch's
        same = saved["class"] == self._class or ("Adam" in saved["class"] and "Adam" in self._class)
        return [] if same else [f"{label}: {saved['class']} in the checkpoint, {self._class} in the script"]

    def load_state_dict(self, state: dict) -> None:
        for group, saved in zip(self._groups, state["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(float(value))  # a learning rate that compiled steps read
                else:
                    group[key] = value.item() if isinstance(value, Tensor) else value


def _refuse_accelerates_own(folder: Path) -> None:
    if not (folder / manifest.MARKER).exists() and any(folder.glob("random_states_*.pkl")):
        raise CheckpointError(
            f"{folder}: written by Accelerate's own save_state. Read it once under the strategy that wrote it, by "
            f"accelerate.Accelerator.load_state(accelerator, {str(folder)!r}), and save it by save_state. A run of "
            "train.py goes on from it by python -m samecurve adopt"
        )


def _keep_others(final: Path, folder: Path) -> None:
    """Link into `folder` the files of `final`, which it will replace, that are no checkpoint's."""

    def link(source: str, target: str) -> None:
        if not os.path.lexists(target):
            try:
                os.link(source, target)
            except OSError:  # not on every disk
                shutil.copy2(source, target)

    def own(path: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(path) == final and _OWN.fullmatch(name)]

    shutil.copytree(final, folder, symlinks=True, ignore=own, copy_function=link, dirs_exist_ok=True)
