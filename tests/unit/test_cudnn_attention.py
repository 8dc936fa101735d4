"""cuDNN's attention kernels: where they are turned off, and what run.json and the header say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_console import facts

from samecurve.config.schema import Batch
from samecurve.metrics import console
from samecurve.models.attention import cudnn

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def enabled(monkeypatch):
    """torch's own switch, which works in a CPU build, too."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def recipe(length: int, grouped: bool = False) -> SimpleNamespace:
    batch, data = SimpleNamespace(sequence_length=length), SimpleNamespace(group_by_length=grouped)
    return SimpleNamespace(batch=batch, data=data)


@pytest.mark.parametrize(
    ("length", "capability", "stays"),
    [(704, (9, 0), False), (64, (10, 0), False), (640, (9, 0), True), (768, (9, 0), True), (704, (8, 9), True)],
)
def test_lengths_of_nan_gradients_get_other_kernels(length, capability, stays, enabled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cudnn.configure(recipe(length), GPU, environ={})
    assert enabled() == stays
    assert cudnn.describe(GPU) == ("on" if stays else "off")


@pytest.mark.parametrize(
    ("length", "chunks", "grouped", "stays"),
    [
        (1024, 4, False, True),
        (768, 4, False, False),
        (1024, 8, False, True),
        (512, 8, False, False),
        (1024, 4, True, False),
    ],
)
def test_chunks_of_gathered_keys_have_masks_of_their_own(length, chunks, grouped, stays, enabled, monkeypatch):
    """768 tokens are 4 chunks of 192: the first one has 192 keys, which is 64 modulo 128."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cudnn.configure(recipe(length, grouped), GPU, {}, chunks)
    assert enabled() == stays


def test_a_cpu_is_left_alone(enabled):
    environ = {}
    cudnn.configure(recipe(704, grouped=True), CPU, environ)
    assert enabled() and environ == {} and cudnn.describe(CPU) is None


def test_varying_widths_share_plans_unless_the_user_says_otherwise(enabled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    name, environ, users = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE", {}, {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "0"}
    cudnn.configure(recipe(512), GPU, environ)
    assert environ == {}
    for given in (environ, users):
        cudnn.configure(recipe(512, grouped=True), GPU, given)
    assert (environ[name], users[name]) == ("1", "0")


def test_the_header_says_why_the_kernels_are_off():
    batch = Batch(global_batch_size=2, micro_batch_size=2, sequence_length=704)
    on, off = (facts({"batch": batch}, model={"attention": "sdpa"}, cudnn_attention=value) for value in ("on", "off"))
    assert console.attention_line(on) == "sdpa"
    told = console.attention_line(off)
    assert "without cuDNN" in told and "704 tokens" in told
    chunked = facts(
        {"batch": batch.model_copy(update={"sequence_length": 768})}, model={"attention": "sdpa"}, cudnn_attention="off"
    )
    assert "part of a row" in console.attention_line(chunked)
