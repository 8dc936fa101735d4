"""A stage of PyTorch's pipeline schedules that names its work in a profile."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from samecurve.planner.timetables import Pass


class TimedStage(PipelineStage):
    """Receiving and sending are outside of its ranges, so that they hold computation alone."""

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
        return record_function(Pass(self.stage_index, kind, micro_batch).range)
