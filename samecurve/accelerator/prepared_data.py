"""Data loaders of a script of one's own: the same rows per step, and after a resume, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import accelerate
import torch
from accelerate.data_loader import get_sampler
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object, recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from samecurve.accelerator import deepspeed_introspection
from samecurve.accelerator.prepared_loader import GlobalBatches, PreparedLoader, Units
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import ConfigurationError
from samecurve.losses.cross_entropy import IGNORE_INDEX

logger = get_logger(__name__)

# transformers' LOSS_MAPPING: the losses in which token t predicts label t + 1
_SHIFTED_LOSSES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def count_units(batch: Any, model: Any = None, rows: int | None = None) -> int:
    """Count the units that the loss of transformers' models, and of most scripts, is a mean over.

    Labels other than -100 are counted if `batch` has integer "labels" of shape (rows,) or (rows, tokens, ...). Where
    the model predicts the next token, the first label of each row is not counted. Without such labels, rows are.

    Args:
        batch: a batch as the collate function returned it.
        model: the model that is trained; None if it is unknown.
        rows: rows of the batch; None: the length of its first tensor.

    Raises:
        ConfigurationError: there is no tensor to count rows of.
    """
    mapping = batch if isinstance(batch, Mapping) else {}
    if (shifted := mapping.get("shift_labels")) is not None:
        return int((shifted != IGNORE_INDEX).sum())
    labels = mapping.get("labels")
    if isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point():
        config, kind = getattr(model, "config", None), getattr(model, "loss_type", None)
        is_decoder = config is not None and not getattr(config, "is_encoder_decoder", False)
        # LMHeadModel (GPT-2, BERT): transformers derives no loss from such a name, and takes that of ForCausalLM
        is_shifted = kind in _SHIFTED_LOSSES or (kind is None and type(model).__name__.endswith("LMHeadModel"))
        counted = labels[:, 1:] if labels.ndim == 2 and is_decoder and is_shifted else labels
        return int((counted != IGNORE_INDEX).sum())
    rows = _length(batch) if rows is None else rows
    if rows is None:
        raise ConfigurationError(
            "a batch without tensors cannot be counted: give Accelerator(count=...) a function that returns the number "
            "of units (rows, tokens) that your loss is a mean over"
        )
    # Not counted as labels: another batch, or another process's part of this one, may have no -100
    if any(not tensor.is_floating_point() and (tensor == IGNORE_INDEX).any() for tensor in _tensors(batch)):
        logger.warning_once(
            f'a batch without "labels" has {IGNORE_INDEX} in an integer tensor, and its rows are counted. If your loss '
            f"is a mean over labels other than {IGNORE_INDEX}, the curve will depend on the number of processes. Name "
            'the tensor "labels", or count them: '
            f"Accelerator(count=lambda batch: int((batch[1] != {IGNORE_INDEX}).sum()))"
        )
    return rows


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, but for scalars."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
        return
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ():
        yield from _tensors(part)


def _length(batch: Any) -> int | None:
    """Return the length of the first tensor in nested containers; None without one."""
    return next((len(tensor) for tensor in _tensors(batch)), None)


def _cut_to_rows(values: Tensor, loader: PreparedLoader) -> Tensor:
    """Return one value for each row that this process has of the batch. See gather_for_metrics."""
    batches, rank = loader.batches, loader.batches.shard[0]
    rows, size = loader.part.rows[rank], batches.batch_size
    if not values.ndim or len(values) in (1, rows, _length(loader.part.batch)):
        return values
    if size and len(values) in (size, batches.rows(size)[rank]):
        return values[:rows]
    raise ConfigurationError(
        f"gather_for_metrics: {len(values)} values for {rows} rows; give a tensor of shape (rows, ...), such as "
        "loss.repeat(len(batch)), or take `gather` for values that are not of rows"
    )


class PreparedData(accelerate.Accelerator):
    """The part of samecurve.Accelerator that prepares data loaders, and gathers what is computed of their batches.

    `DataLoader(batch_size=...)` is the global batch size of a micro-step (split_batches=True). What Accelerate alone
    prepares is named in a warning: its rows depend on the number of processes.
    """

    count: Callable[[Any], int] | None = None  # the constructor's argument
    accumulates = False  # by `accumulate`, not by a count of the script's own
    _is_reduced = False  # a gradient of DeepSpeed's that waits for its step

    @cached_property
    def _control(self) -> ControlGroup:
        """Group for small messages on the CPU: they do not wait for a GPU's queue. Construction is collective."""
        return ControlGroup()

    def drop_gradients(self) -> None:
        """Forget the gradients of an optimizer step that is not finished."""
        for wrapper in self._optimizers:
            wrapper.optimizer.zero_grad()
        if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_engine_wrapped is not None:
            deepspeed_introspection.drop_gradients(self.deepspeed_engine_wrapped.engine)
        self._is_reduced = False

    @property
    def units(self) -> Units | None:
        """Units of the current micro-batch and its optimizer step, as its prepared loader counts them.

        Counted when they are asked for, so that an evaluation neither looks ahead nor communicates. None outside of a
        prepared loader's loop, and where its batches are not trained in turn, each once.
        """
        active = self.gradient_state.active_dataloader
        return active.units() if isinstance(active, PreparedLoader) else None

    def count_units(self, batch: Any, rows: int | None = None) -> int:
        """Count a batch by the constructor's `count`, else by `samecurve.accelerator.prepared_data.count_units`."""
        if self.count is not None:
            return self.count(batch)
        return count_units(batch, self.unwrap_model(self._models[0]) if self._models else None, rows)

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch=None
    ) -> DataLoader:
        """Prepare a loader as Accelerate does, with the same rows per global batch on any number of processes."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if reason := self._left_to_accelerate(data_loader):
            logger.warning_once(
                f"a data loader is prepared by Accelerate alone, because of {reason}: its rows per step depend on the "
                "number of processes, its micro-batches count alike, and a checkpoint has no position in it"
            )
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        sampler = data_loader.sampler
        batches = sampler if isinstance(sampler, BatchSampler) else data_loader.batch_sampler
        generator = getattr(get_sampler(data_loader), "generator", None) or data_loader.generator
        seed = self.dataloader_config.data_seed
        if seed is None:
            seed = generator.initial_seed() if generator is not None else torch.initial_seed()
        shard, control = (self.process_index, self.num_processes), self._control

        def from_main(work: Callable) -> Any:
            return control.broadcast(work() if control.is_main else None)

        placed = self.device_placement if device_placement is None else device_placement
        batches = GlobalBatches(batches, control.broadcast(seed), shard, from_main)
        device = self.device if placed else None
        prepared = PreparedLoader(self, data_loader, batches, device, self.count_units, control)
        self._dataloaders.append(prepared)
        return cast(DataLoader, prepared)

    def _left_to_accelerate(self, loader: DataLoader) -> str:
        """Name what keeps a loader's rows from being exact; "" if nothing does."""
        batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        mesh: Any = self._prepare_device_mesh()
        try:
            sized = batches is not None and len(cast(Any, batches)) >= 0
        except TypeError:
            sized = False
        reasons = {
            "DataLoaderConfiguration(split_batches=False)": not self.split_batches,
            "DataLoaderConfiguration(dispatch_batches=True)": self.dispatch_batches,
            "DataLoaderConfiguration(use_stateful_dataloader=True)": self.use_stateful_dataloader,
            f"its dataset, the IterableDataset {type(loader.dataset).__name__}": isinstance(
                loader.dataset, IterableDataset
            ),
            "a DistributedSampler, which Accelerate's scripts must not have": isinstance(
                get_sampler(loader), DistributedSampler
            ),
            "batch_size=None": batches is None,
            f"its batch sampler {type(batches).__name__}, which has no length": not sized,
            "in_order=False": not getattr(loader, "in_order", True),
            "ranks that share their rows (tensor or context parallelism)": mesh is not None
            and any(mesh[name].size() > 1 for name in mesh.mesh_dim_names if name in ("tp", "cp", "sp")),
            f"distributed type {self.distributed_type.value}": self.distributed_type
            in (DistributedType.XLA, DistributedType.MEGATRON_LM),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """Return a loader of one epoch from its global batch `num_batches` on, without reading those before.

        `num_batches` replaces a position that load_state restored. Batches of an optimizer step that the checkpoint
        found unfinished are not skipped, because their gradients are not in it.
        """
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        position = dataloader.position
        if position.unfinished is not None:
            if position.start <= num_batches <= position.start + position.unfinished:
                num_batches = position.start
            else:
                logger.warning(
                    f"skip_first_batches({num_batches}): the loaded checkpoint was taken after {position.start} "
                    f"batches of epoch {position.epoch}. The epoch begins after {num_batches}, as the call says."
                )
        skipping = dataloader.__copy__()
        skipping.skip = num_batches
        position.move(position.epoch)  # the restored position is replaced
        return cast(DataLoader, skipping)

    def gather(self, tensor: Any) -> Any:
        """See Accelerate. Within a prepared loader's loop processes may have differently many rows, copies included."""
        loader = self.gradient_state.active_dataloader
        if self.num_processes == 1 or not isinstance(loader, PreparedLoader) or len(set(loader.part.rows)) == 1:
            return super().gather(tensor)
        return self._gather_rows(tensor, [True] * self.num_processes)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values per row from all processes: each row of the data set once, in the order of the loader.

        Args:
            input_data: nested containers of tensors, or a list of objects, one per row. The first dimension of a tensor
                is this process's part of the batch, or one value for the process. A tensor as long as a whole batch
                (`loss.repeat(batch_size)`) is cut to the process's rows.
            use_gather_object: gather tensors of different shapes as objects.

        Raises:
            ConfigurationError: a tensor has another length. On all ranks.
        """
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, PreparedLoader):
            return super().gather_for_metrics(input_data, use_gather_object)
        counted = [rows > 0 for rows in loader.part.rows]
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            own = counted[self.process_index]
            return gather_object(input_data if own or isinstance(input_data, Mapping) else input_data[:0])
        values, problem = input_data, ""
        try:
            values = recursively_apply(lambda tensor: _cut_to_rows(tensor, loader), input_data)
        except ConfigurationError as error:
            problem = str(error)
        if problem := self._control.conclude(problem, max):
            raise ConfigurationError(problem)
        return values if self.num_processes == 1 else self._gather_rows(values, counted)

    def _gather_rows(self, values: Any, counted: list[bool]) -> Any:
        """Concatenate the rows of the processes that count, which may be differently many."""
        lengths: list[int] = []
        recursively_apply(lambda tensor: lengths.append(len(tensor) if tensor.ndim else 1), values)
        lengths_by_tensor = zip(*self._control.conclude(lengths, list), strict=True)

        def gather_rows(tensor: Tensor) -> Tensor:
            of_ranks = next(lengths_by_tensor)
            tensor = tensor if tensor.ndim else tensor[None]
            padding = tensor.new_zeros(max(of_ranks) - len(tensor), *tensor.shape[1:])
            gathered: Any = super(PreparedData, self).gather(torch.cat([tensor, padding]))
            parts = zip(gathered.tensor_split(self.num_processes), of_ranks, counted, strict=True)
            return torch.cat([part[:length] for part, length, counts in parts if counts])

        return recursively_apply(gather_rows, values)
