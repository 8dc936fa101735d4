"""What PyTorch's pipeline schedules hold beside states and activations, worked out by hand."""

from __future__ import annotations

import pytest
from test_planner_anatomy import LLAMA, a_job, strategy

from samecurve.planner import tensor_lines
from samecurve.planner.stages import stages

HIDDEN = 4 * 4096 * LLAMA.hidden  # bytes of a micro-batch's hidden state in fp32


def scheduled(name: str, ranks: int, micro_batches: int, **keys):
    """A job and its stages, one for each class of ranks."""
    job = a_job(strategy=strategy(pp=ranks, schedule=name), grad_accum=micro_batches, flow="autocast", **keys)
    return job, stages(job, by_cost=False)


def test_a_buffer_for_each_neighbour_and_micro_batch():
    """1F1B on 4 ranks, 8 micro-batches: one neighbour at the ends, two in the middle. Gradients come whole."""
    job, (first, middle, last) = scheduled("1F1B", 4, 8)
    assert tensor_lines.kept_until_next_step(job, first) == (8 * HIDDEN, 0, 0)
    assert tensor_lines.kept_until_next_step(job, middle) == (16 * HIDDEN, 0, 0)
    assert tensor_lines.kept_until_next_step(job, last) == (8 * HIDDEN, 0, 0)


def test_a_backward_pass_in_halves_leaves_the_gradients_of_inputs():
    """ZBV on 2 ranks: stages 0 and 3 on the first, 1 and 2 on the second, where 2 hands on to 1 in a buffer."""
    job, found = scheduled("ZBVZeroBubble", 2, 8)
    ends, middle = found[0], found[-1]
    # Gradients: of stage 3's inputs, as stage 0 has tokens; of stage 1's, as those of stage 2 are in a buffer. While
    # the last two micro-batches keep their activations, those of the six before them are there.
    assert tensor_lines.kept_until_next_step(job, ends) == (2 * 8 * HIDDEN, 6 * HIDDEN, 8 * HIDDEN)
    assert tensor_lines.kept_until_next_step(job, middle) == (4 * 8 * HIDDEN, 6 * HIDDEN, 8 * HIDDEN)


@pytest.mark.parametrize(("name", "ranks", "sending"), [("1F1B", 2, (1, 0)), ("Interleaved1F1B", 2, (2, 1))])
def test_a_stage_keeps_what_it_sends(name, ranks, sending):
    """The last stage sends nothing; of interleaved stages 0 to 3 the second rank has 1 and 3."""
    job, found = scheduled(name, ranks, 8)
    assert [tensor_lines.outputs(job, each) for each in (found[0], found[-1])] == [HIDDEN * each for each in sending]


def test_every_micro_batch_casts_the_layers_again():
    """In 16 bits; a recomputed layer casts them in the backward pass, one layer at a time."""
    job, (first, last) = scheduled("1F1B", 2, 8)
    layers = 2 * LLAMA.layer_parameters * LLAMA.layers / 2
    head = 2 * LLAMA.head_parameters
    assert tensor_lines.cast_weights(job, first, 2) == pytest.approx((2 * layers, 2 * layers))
    assert tensor_lines.cast_weights(job, last, 1) == pytest.approx((layers + head, layers), rel=1e-4)
    job, (first, _) = scheduled("1F1B", 2, 8, checkpointing="full")
    assert tensor_lines.cast_weights(job, first, 2) == pytest.approx((layers, 2 * LLAMA.layer_parameters))
