from dataclasses import dataclass


@dataclass(frozen=True)
class Units:
    """Units (rows, or tokens with a label) of a loss.

    Attributes:
        step: of the whole optimizer step, over all processes and micro-batches.
        micro_batch: of this process's part of the micro-batch.
    """

    step: int
    micro_batch: int = 1
