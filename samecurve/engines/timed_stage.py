"""A stage of PyTorch's pipeline schedules that names its work in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from samecurve.strategy.timetables import Pass


class TimedStage(PipelineStage):
    """A PipelineStage with a profiler range around each pass. Sends and receives are outside of the ranges.

    Args:
        begin: called with a micro-batch's number before each of its passes, because the passes of micro-batches
            alternate.
    """

    def __init__(self, begin: Callable[[int], None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._begin = begin

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._range("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._range("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._range("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _range(self, kind: str, micro_batch: int) -> record_function:
        self._begin(micro_batch)
        return record_function(Pass(self.stage_index, kind, micro_batch).range)
