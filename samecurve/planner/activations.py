"""Bytes that a forward pass keeps for the backward pass, per token and layer.

GPT: s b h (34 + 5 a s / h), where 5 a s / h are the attention scores that a fused kernel does not keep
(arXiv:2205.05198, section 4). Tensor parallelism divides 24 of the 34; sequence parallelism divides the rest, too.
Stacks with fused attention train without dropout, whose two masks are 2 of the 34.
Llama: s b (28 h + 8 f), no dropout, of which norms and residuals, 10 h, need sequence parallelism to be divided.
"""

from __future__ import annotations

from samecurve.planner.job import Job

COMPILED = 0.75  # torch.compile recomputes cheap element-wise results in the backward pass


def layer_bytes(job: Job, gathered_inputs: float = 0.0, compiled: bool | None = None) -> float:
    """Return the bytes of one layer and one micro-batch on one rank without recomputation.

    Args:
        gathered_inputs: bytes per token and unit of hidden size that stay whole under sequence parallelism.
        compiled: overrides job.compile.
    """
    shape, layout = job.shape, job.layout
    split, whole = _per_token(job)
    whole_ranks = layout.tp if layout.sequence_parallel else 1
    kept = split / layout.tp + whole / whole_ranks
    if job.compile if compiled is None else compiled:
        kept *= COMPILED
    if layout.tp > 1 and layout.sequence_parallel:
        kept += gathered_inputs * shape.hidden
    if layout.exchange == "allgather":  # those of the row's other parts are kept, too
        kept += 4 * (layout.cp - 1) * shape.attention_width * shape.kv_share / layout.tp
    return job.tokens * (kept + _score_bytes(job))


def _per_token(job: Job) -> tuple[float, float]:
    """Return (bytes that tensor parallelism divides, other bytes) of one token in one layer."""
    shape, experts = job.shape, max(job.shape.top_k, 1)
    dispatched = 4 * shape.hidden * experts if shape.experts else 0  # inputs and outputs of the experts, permuted
    if shape.gated:
        attention = (8 + 10 * shape.kv_share) * shape.attention_width
        return attention + 8 * shape.ffn * experts + dispatched, 10 * shape.hidden
    ffn = 4 * shape.ffn * experts  # 16 h of the 34 h in a GPT with ffn = 4 h
    return (2 + 6 * shape.kv_share) * shape.attention_width + ffn + dispatched, (8 if job.flash else 10) * shape.hidden


def _score_bytes(job: Job) -> float:
    """Bytes of the attention scores of one token; 0 with a fused kernel or selective recomputation."""
    if job.flash or job.checkpointing == "selective":
        return 0
    return 5 * job.shape.heads * job.seq / job.layout.tp


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes that one layer keeps when it is recomputed: its input, 2 s b h."""
    ranks = job.layout.tp if job.layout.sequence_parallel else 1
    return 2 * job.tokens * job.shape.hidden / ranks
