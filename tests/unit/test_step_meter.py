import math

import pytest
import torch
from report_cases import missing

from samecurve.interfaces.engine import StepResult
from samecurve.metrics.meter import Machine, Meter, peak_memory_bytes
from samecurve.models.flops import Peak, TokenFlops
from samecurve.specs.gpus import GIB

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "input_tokens",
    "samples",
    "epoch",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "hfu",
    "peak_memory_gib",
    "data_wait_fraction",
]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


FLOPS, PEAK = TokenFlops(6e9, 8e9), Peak(1.0, "by hand")


def meter(clock=None, flops=FLOPS, peak=PEAK):
    machine = Machine(num_devices=4, peak=peak, peak_memory=lambda: 3 * GIB)
    return Meter(flops=flops, machine=machine, clock=clock or Clock(), num_rows=32)


def result(loss=2.0, tokens=800):
    return StepResult(loss=loss, grad_norm=0.5, tokens=tokens, applied=True)


def test_record_by_hand():
    clock = Clock()
    measured = meter(clock)
    clock.now += 2.0
    record = measured.step(3, result(), learning_rate=1e-3, samples=48, data_wait_seconds=0.5)
    # 800 tokens in 2 s on 4 devices: 100 tokens/s each, x 6e9 FLOPs = 0.6 TFLOP/s of 1.0
    assert record == pytest.approx(
        {
            "step": 3,
            "loss": 2.0,
            "grad_norm": 0.5,
            "learning_rate": 1e-3,
            "tokens": 800,
            "input_tokens": 800,
            "samples": 48,
            "epoch": 1.5,
            "step_seconds": 2.0,
            "tokens_per_second": 400.0,
            "tflops_per_device": 0.6,
            "mfu": 0.6,
            "hfu": 0.8,
            "peak_memory_gib": 3.0,
            "data_wait_fraction": 0.25,
        }
    )
    assert list(record) == KEYS


def test_work_is_counted_for_prompts_too():
    clock = Clock()
    measured = meter(clock)
    clock.now += 2.0
    record = measured.step(3, result(tokens=200), 1e-3, 48, 0.5, num_inputs=800)
    assert (record["tokens_per_second"], record["mfu"], record["hfu"]) == pytest.approx((100.0, 0.6, 0.8))
    assert record["input_tokens"] == 800


def test_a_chunked_head_works_for_trained_tokens_alone():
    """By hand: 800 tokens of 6e9 less 600 of 1e9, in 2 s on 4 devices of 1 TFLOP/s: 0.525; hardware 0.725."""
    clock = Clock()
    machine = Machine(num_devices=4, peak=PEAK, peak_memory=lambda: 0)
    measured = Meter(TokenFlops(6e9, 8e9, head=1e9), machine, clock, chunked=True)
    clock.now += 2.0
    record = measured.step(3, result(tokens=200), 1e-3, 48, 0.5, num_inputs=800)
    assert (record["mfu"], record["hfu"]) == pytest.approx((0.525, 0.725))


def test_a_chunked_head_of_pairs_works_for_their_answers():
    """The same work, of which a step counts 2 pairs: a quarter of their tokens is trained."""
    clock = Clock()
    machine = Machine(num_devices=4, peak=PEAK, peak_memory=lambda: 0)
    measured = Meter(TokenFlops(6e9, 8e9, head=1e9), machine, clock, "pairs", chunked=True, trained_share=0.25)
    clock.now += 2.0
    record = measured.step(3, result(tokens=2), 1e-3, 48, 0.5, num_inputs=800)
    assert (record["mfu"], record["hfu"]) == pytest.approx((0.525, 0.725))


def test_attention_counts_the_width_of_the_steps_rows():
    """By hand: a quarter of the width, 800 tokens of 6e9 - 3/4 x 2e9 in 2 s on 4 devices; hardware 8e9 - 3/4 x 4e9."""
    clock = Clock()
    measured = meter(clock, TokenFlops(6e9, 8e9, attention=2e9, hardware_attention=4e9))
    clock.now += 2.0
    record = measured.step(3, result(), 1e-3, 48, 0.5, width_share=0.25)
    assert (record["tflops_per_device"], record["mfu"], record["hfu"]) == pytest.approx((0.45, 0.45, 0.5))


def test_a_resumed_run_measures_its_own_seconds():
    """Going on from a checkpoint brings the smoothed loss along, and neither time nor work of the earlier session."""
    first = meter(clock := Clock())
    clock.now += 1000.0
    first.step(1, result(loss=4.0), 1e-3, 16, 0.0)
    clock.now += 5000.0
    second = meter(clock)
    second.state = first.state
    clock.now += 70.0  # the model is built and the checkpoint read
    second.restart_clock()
    clock.now += 2.0
    record = second.step(2, result(loss=2.0), 1e-3, 32, 0.5)
    assert {key: record[key] for key in ("step_seconds", "tokens_per_second", "mfu", "hfu", "data_wait_fraction")} == (
        pytest.approx(
            {"step_seconds": 2.0, "tokens_per_second": 400.0, "mfu": 0.6, "hfu": 0.8, "data_wait_fraction": 0.25}
        )
    )
    assert second.smoothed_loss == pytest.approx(0.56 / 0.19)


def test_a_step_of_pairs_is_told_in_the_tokens_that_were_read():
    clock = Clock()
    measured = Meter(FLOPS, Machine(4, PEAK, lambda: 0), clock, counts="pairs")
    clock.now += 2.0
    record = measured.step(3, result(tokens=8), 1e-3, 8, 0.5, num_inputs=800)
    assert (record["tokens"], record["tokens_per_second"], record["mfu"]) == pytest.approx((8, 400.0, 0.6))


def test_evaluation_is_not_a_steps_time():
    clock = Clock()
    measured = meter(clock)
    seconds = []
    for step, passed in enumerate((2.0, 4.0, 3.0), 1):
        clock.now += passed
        seconds.append(measured.step(step, result(), 1e-3, 16, 0.0)["step_seconds"])
        if step == 2:
            clock.now += 50.0
            measured.restart_clock()
    assert seconds == [2.0, 4.0, 3.0]


def test_more_than_the_peak_is_told_once():
    """By hand: 800 tokens of 6e9 in 1 s on 4 devices of 1 TFLOP/s: 1.2; hardware 1.6."""
    clock = Clock()
    measured = meter(clock, TokenFlops(6e9, 8e9, attention=3e9), Peak(1.0, "by hand"))
    told = []
    for seconds in (2.0, 1.0, 1.0):
        clock.now += seconds
        told.append(measured.doubt(measured.step(3, result(), 1e-3, 48, 0.0)))
    assert (told[0], told[2]) == ("", "")
    expected = "step 3 has mfu 1.20 and hfu 1.60", "1 TFLOP/s (by hand)", "attention", "(50% of the FLOPs)"
    assert not missing(told[1], expected)


@pytest.mark.parametrize("unknown", [{"flops": None}, {"peak": None}])
def test_what_is_not_known_is_not_doubted(unknown):
    clock = Clock()
    measured = meter(clock, **unknown)
    clock.now += 1e-6
    assert measured.doubt(measured.step(3, result(), 1e-3, 48, 0.0)) == ""


@pytest.mark.parametrize(
    ("flops", "peak", "unknown"),
    [
        (None, Peak(1.0, ""), {"tflops_per_device", "mfu", "hfu"}),
        (TokenFlops(1e9, 1e9), None, {"mfu", "hfu"}),
    ],
)
def test_what_is_not_known_is_none(flops, peak, unknown):
    clock = Clock()
    measured = meter(clock, flops, peak)
    clock.now += 1.0
    record = measured.step(1, result(), 1e-3, 16, 0.0)
    assert {key for key, value in record.items() if value is None} == unknown
    assert list(record) == KEYS


def test_smoothed_loss_by_hand():
    clock = Clock()
    measured = meter(clock)
    seen = []
    for loss in (4.0, 2.0, math.nan, 1.0):
        clock.now += 1.0
        measured.step(1, result(loss), 1e-3, 16, 0.0)
        seen.append(measured.smoothed_loss)
    # 0.1 x 4 / 0.1; (0.36 + 0.2) / 0.19; a step without a loss changes nothing; (0.504 + 0.1) / 0.271
    assert seen == pytest.approx([4.0, 0.56 / 0.19, 0.56 / 0.19, 0.604 / 0.271])


def test_a_step_without_trained_tokens_has_no_loss():
    clock = Clock()
    measured = meter(clock)
    clock.now += 1.0
    record = measured.step(1, result(loss=0.0, tokens=0), 1e-3, 16, 0.0, num_inputs=800)
    assert (record["loss"], record["grad_norm"], record["tokens_per_second"]) == (None, None, 0.0)
    assert (record["tflops_per_device"], record["mfu"], record["hfu"]) == (0.0, 0.0, 0.0)  # of what was computed
    assert measured.smoothed_loss is None


def test_scalars_are_grouped_and_finite():
    clock = Clock()
    measured = meter(clock, flops=None)
    clock.now += 1.0
    record = measured.step(1, result(math.nan), 1e-3, 16, 0.0) | {"eval_loss": 3.0}
    scalars = measured.scalars(record)
    assert scalars["evaluate/eval_loss"] == 3.0
    assert scalars["train/grad_norm"] == 0.5
    assert scalars["speed/tokens_per_second"] == 800.0
    assert not {"train/loss", "train/smoothed_loss", "speed/mfu", "speed/step", "train/step"} & scalars.keys()
    assert all(math.isfinite(value) for value in scalars.values())


def test_peak_memory_of_a_process_is_in_bytes():
    assert 50 * 2**20 < peak_memory_bytes(torch.device("cpu")) < 2**40
