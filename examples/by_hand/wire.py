"""Ranks, and a wire that counts bytes: all data of these examples leave a rank through `send`.

Numbers are float64 (8 bytes each), so that a mistake cannot pass for rounding. Every rank draws the same weights and
data from one seed and then keeps its own part, so that nothing has to be sent before the lesson begins.
"""

import atexit
import os

import torch
from torch import Tensor
from torch import distributed as dist

_bytes_sent = 0
_under_way: list = []  # a tensor must live until it has left


def start() -> tuple[int, int]:
    """Join the ranks that torchrun started, or be the only one under plain python. Returns (rank, number of ranks)."""
    global _bytes_sent
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)
        atexit.register(dist.destroy_process_group)
    _bytes_sent = 0
    return dist.get_rank(), dist.get_world_size()


def send(tensor: Tensor, to: int) -> None:
    """Begin to send, without waiting for the receiver."""
    global _bytes_sent
    if tensor.numel():
        tensor = tensor.detach().contiguous()
        _under_way.append((dist.isend(tensor, to), tensor))
        _bytes_sent += tensor.numel() * tensor.element_size()


def receive(shape: tuple[int, ...], source: int, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        dist.recv(tensor, source)
    return tensor


def exchange(tensor: Tensor, to: int, source: int, shape: tuple[int, ...] | None = None) -> Tensor:
    """Send to one rank while receiving from another one; the received tensor has `shape`, or that of the sent one."""
    if to == dist.get_rank():
        return tensor.clone()
    send(tensor, to)
    received = receive(tensor.shape if shape is None else shape, source, tensor.dtype)
    wait()
    return received


def wait() -> None:
    """Wait until all that this rank sends has left."""
    while _under_way:
        _under_way.pop()[0].wait()


def bytes_sent() -> int:
    """Bytes that this rank has sent since `start`."""
    return _bytes_sent


def report(title: str, holds: str, found: list[Tensor], expected: list[Tensor]) -> None:
    """Print what each rank holds and has sent, and its largest difference, as a share of a tensor's largest number."""
    wait()
    pairs = [(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True)]
    deviation = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (holds, _bytes_sent, deviation))
    worst = max(each for _, _, each in ranks)
    if dist.get_rank() == 0:
        lines = [f"  rank {rank} holds {holds}; sent {sent} bytes" for rank, (holds, sent, _) in enumerate(ranks)]
        print("\n".join([title, *lines, f"  deviation from one process {worst:.1e}"]), flush=True)
    if not worst < 1e-12:  # NaN, too
        raise SystemExit(f"{title}: {worst:.1e} away from one process")
