"""What a training script really does in each step, seen from inside its process by hooks on PyTorch alone.

A step ends with an update of the weights. Its record has the rows that went through the trained model, the loss that
was differentiated, gradients before clipping, and weights after the update. Under sharding these are whole: ranks
gather them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from samecurve.accelerator.states import States
from samecurve.accelerator.trackers import Trackers
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.prove.masks import Masks, apart
from samecurve.prove.modules import Modules, sketch
from samecurve.prove.rows import rows_of

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class Recorder:
    """Writes the records of a process, as lines of JSON, and ends the process after the last step.

    What a script saves, exports and logs goes to events_N.jsonl beside it.

    Args:
        path: file of the records.
        steps: number of updates after which the process ends; 0 lets the script end.
        reading: installed, too.
        rates: learning rates of each step's parameter groups instead of the script's.
        detailed: the step that is recorded module by module; 0 for none.
    """

    def __init__(
        self, path: Path, steps: int, reading: Reading, rates: list[list[float]] | None = None, detailed: int = 0
    ):
        self.steps, self.step, self.reading, self.rates, self.detailed = steps, 0, reading, rates, detailed
        self._modules = Modules()
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._events: TextIO = path.with_name(path.name.replace("rank", "events")).open("w", encoding="utf-8")
        self._masks = Masks()
        self._start: dict[str, list[float]] = {}
        self._depth = 0  # of nested calls of modules
        self._trained: nn.Module | None = None
        self._engine: Any = None  # DeepSpeed's
        self._clear()

    def _clear(self) -> None:
        self._rows: list[str] = []
        self._losses: list[float] = []  # of each micro-batch
        self._labels: list[list[int]] = []  # of each micro-batch: how many are trained, as they are and shifted
        self._masked: list[dict[str, Any]] = []
        self._apart: tuple[float, str] = (0.0, "")
        self._gradients: dict[str, list[float]] = {}
        self._norm: float | None = None
        self._limit: float | None = None  # of the norm

    def install(self) -> None:
        """Hook into PyTorch, and into DeepSpeed when it is imported already."""
        _without_dropout()
        _around(nn.Module, "__call__", self._call)
        _around(Tensor, "backward", self._backward)
        _around(torch.nn.utils, "clip_grad_norm_", self._clip)
        _around(PreTrainedTokenizerBase, "apply_chat_template", self._masks.render)
        _around(torch, "save", self._save)
        for owner in (Accelerator, States):
            _around(owner, "save_state", self._save)
        for owner in (Accelerator, Trackers, Trainer):
            _around(owner, "log", self._log)
        for owner in (PreTrainedModel, PeftModel):
            _around(owner, "save_pretrained", self._export)
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        if "deepspeed" in sys.modules:
            from deepspeed.runtime.engine import DeepSpeedEngine

            _around(DeepSpeedEngine, "_take_model_step", self._engine_step)

    def _call(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_outermost = not self._depth and torch.is_grad_enabled()
        if is_outermost and any(weight.requires_grad for weight in module.parameters()):
            if self._trained is None or any(part is self._trained for part in module.modules()):
                self._trained = module
            if module is self._trained:
                rows = rows_of(args, kwargs)
                self._rows += rows
                if self.step + 1 == self.detailed:
                    self._engine = module if hasattr(module, "zero_optimization_stage") else self._engine
                    # a wrapper has the name of what it wraps
                    names = {id(part): _unwrapped(f"{name}.")[:-1] for name, part in module.named_modules()}
                    self._modules.begin(rows, kwargs.get("attention_mask"), names, self._whole_weights)
                if isinstance(labels := kwargs.get("labels"), Tensor):
                    counted = labels if labels.ndim == 1 else labels[..., 1:]  # a causal model shifts them
                    self._labels.append([int((part != IGNORE_INDEX).sum()) for part in (labels, counted)])
                self._masked += self._masks.of_rows(kwargs)
        self._depth += 1
        try:
            output = self._modules.call(call, module, args, kwargs)
            if is_outermost and module is self._trained and not self.step and not dist.is_initialized():
                self._apart = max(self._apart, apart(module, kwargs, output))
            return output
        finally:
            self._depth -= 1
            if not self._depth:
                self._modules.end_forward()

    def _event(self, kind: str, value: Any) -> None:
        print(json.dumps({"event": kind, "step": self.step, "value": value}), file=self._events, flush=True)

    def _save(self, save: Callable, *args: Any, **kwargs: Any) -> Any:
        saved = save(*args, **kwargs)
        self._event("save", "")
        return saved

    def _export(self, export: Callable, model: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        exported = export(model, folder, *args, **kwargs)
        if not (dist.is_initialized() and dist.get_rank()):
            self._event("export", (str(Path(folder).resolve()), getattr(model.config, "_name_or_path", "")))
        return exported

    def _log(self, log: Callable, owner: Any, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._event("log", {name: float(value) for name, value in values.items() if isinstance(value, float | int)})
        return log(owner, values, *args, **kwargs)

    def _backward(self, backward: Callable, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._depth and loss.numel() == 1:
            self._losses.append(loss.item())
            self._modules.see("backward")
        return backward(loss, *args, **kwargs)

    def _clip(self, clip: Callable, weights: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        self._read_gradients()
        self._limit = float(max_norm)
        norm = clip(weights, max_norm, *args, **kwargs)
        self._norm = _whole(norm).item()
        self._modules.see("norm")
        return norm

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._engine is None and self._norm is None:
            self._read_gradients()
        if self._engine is None and not self.step:
            self._start = self._sketches(self._whole_weights())
        if self.rates and self._trained is not None:
            for group, rate in zip(optimizer.param_groups, self.rates[self.step], strict=True):
                group["lr"] = rate

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._engine is None:
            self._write([group["lr"] for group in optimizer.param_groups])

    def _engine_step(self, take: Callable, engine: Any, *args: Any, **kwargs: Any) -> None:
        self._engine = engine
        self._read_gradients()
        if not self.step:
            self._start = self._sketches(self._whole_weights())
        take(engine, *args, **kwargs)
        self._norm = float(engine.get_global_grad_norm() or 0) or None
        self._limit = float(engine.gradient_clipping()) or None
        self._write([*engine.get_lr()])

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self._trained is not None:
            for name, weight in self._trained.named_parameters():
                yield _unwrapped(name), weight

    def _whole_weights(self) -> dict[str, Tensor]:
        if self._engine is not None:
            from deepspeed.utils import safe_get_full_fp32_param as of_engine
        return {
            name: _whole(weight if self._engine is None else of_engine(weight)).detach()
            for name, weight in self._weights()
            if weight.requires_grad
        }

    def _read_gradients(self) -> None:
        if self._engine is not None:
            from deepspeed.utils import safe_get_full_grad as of_engine
        for name, weight in self._weights():
            if not weight.requires_grad:
                continue
            gradient = weight.grad if self._engine is None else of_engine(weight)
            self._gradients[name] = sketch(name, torch.zeros(1) if gradient is None else _whole(gradient))

    def _write(self, rates: list[float]) -> None:
        if self._trained is None:
            return  # another optimizer's, before the model has seen a row
        if self._engine is not None:
            strategy = f"zero{self._engine.zero_optimization_stage()}"
        elif any(isinstance(weight, DTensor) for weight in self._trained.parameters()):
            strategy = "fsdp"
        else:
            is_ddp = any(isinstance(part, nn.parallel.DistributedDataParallel) for part in self._trained.modules())
            strategy = "ddp" if is_ddp else "single"
        self.step += 1
        weights, is_last = self._whole_weights(), not self.steps or self.step == self.steps
        record = {
            "step": self.step,
            "strategy": strategy,
            "rows": self._rows,
            "indices": self.reading.take(len(self._losses)),
            "losses": self._losses,
            "labels": self._labels,
            "gradients": self._gradients,
            "norm": self._norm,
            "clip": self._limit,
            "rates": rates,
            "weights": {name: sketch(name, weight) for name, weight in weights.items()},
            "start": self._start if self.step == 1 else {},
            "end": self._sketches(weights) if is_last else {},
            "masks": self._masked,
            "apart": self._apart,
        }
        if self.step == self.detailed:
            self._modules.see("update")
            record |= self._modules.record(weights)
        print(json.dumps(record), file=self._file, flush=True)
        self._clear()
        if self.step == self.steps:
            if dist.is_initialized():
                dist.barrier()
            raise SystemExit(0)

    def _sketches(self, trained: dict[str, Tensor]) -> dict[str, list[float]]:
        """Sketch the whole trained weights that are given, and the frozen ones."""
        sketches = {name: sketch(name, values) for name, values in trained.items()}
        for name, weight in self._weights():
            if name not in trained:
                gather = sys.modules["deepspeed"].zero.GatheredParameters if self._engine is not None else nullcontext
                with gather([weight]):
                    sketches[name] = sketch(name, _whole(weight))
        return sketches


class Batches(Sampler):
    """`merged` batches of a sampler as one: what one process reads where several read one each."""

    def __init__(self, batches: Any, merged: int):
        self.batches, self.merged, self.drop_last = batches, merged, getattr(batches, "drop_last", False)
        self.batch_size = merged * (getattr(batches, "batch_size", None) or 1)

    @property
    def sampler(self) -> Any:
        return getattr(self.batches, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # as Accelerate does for use_seedable_sampler
        self.batches.sampler = sampler

    def __iter__(self) -> Iterator[list]:
        batches = iter(self.batches)
        while group := [row for batch in islice(batches, self.merged) for row in batch]:
            yield group

    def __len__(self) -> int:
        return -(-len(self.batches) // self.merged)


class Reading:
    """Sees which rows of the data set a process reads, and can make it read others.

    Args:
        merged: batches of a sampler that become one.
        backwards: reads the rows of each batch in the opposite order, which changes nothing but rounding.
        replay: rows of each batch instead of the sampler's.
    """

    def __init__(self, merged: int = 1, backwards: bool = False, replay: list[list[int]] | None = None):
        self.merged, self.backwards, self.replay = merged, backwards, replay
        self.datasets: list[Any] = []  # in the order in which they are read
        self.batches: list[list[int]] = []  # of the first data set

    def install(self) -> None:
        _around(_BaseDataLoaderIter, "_next_index", self._next)
        if self.merged > 1:
            _around(DataLoader, "__init__", self._construct)

    def take(self, count: int) -> list[list]:
        """Return the rows of the next `count` batches of the data set that is trained on, the first that was read."""
        taken, self.batches = self.batches[:count], self.batches[count:]
        return taken

    def _construct(self, construct: Callable, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        construct(loader, *args, **kwargs)
        if loader.batch_sampler is not None and not isinstance(loader.batch_sampler, Batches):
            merged = Batches(loader.batch_sampler, self.merged)
            loader.__dict__.update(batch_sampler=merged, batch_size=merged.batch_size)  # its setter refuses

    def _next(self, next_index: Callable, batches: Any) -> Any:
        rows, dataset = next_index(batches), batches._dataset
        if not isinstance(rows, list) or not all(isinstance(row, int) for row in rows):
            return rows
        number = next((n for n, known in enumerate(self.datasets) if known is dataset), len(self.datasets))
        if number == len(self.datasets):
            self.datasets.append(dataset)
        if number:
            return rows
        if self.replay:
            rows = self.replay.pop(0)
        self.batches.append(rows)
        return rows[::-1] if self.backwards else rows


def _without_dropout() -> None:
    """Switch dropout off: its masks depend on the shape of a batch, which differs between strategies."""
    functional, attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    @wraps(functional)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return functional(input, 0.0, training, inplace)

    @wraps(attention)
    def without(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args[:4], **{**kwargs, "dropout_p": 0.0}, **({"is_causal": args[5]} if args[5:] else {}))

    nn.functional.dropout, nn.functional.scaled_dot_product_attention = dropout, without


def _around(owner: Any, name: str, wrapper: Callable) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, called)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(value: Any) -> Tensor:
    """None, as DeepSpeed returns for what has no elements, is an empty tensor."""
    value = value.full_tensor() if isinstance(value, DTensor) else () if value is None else value
    return value if isinstance(value, Tensor) else torch.tensor(value)
