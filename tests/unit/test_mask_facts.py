"""Transformers' masks are the same with the loader's answers as with its own questions to the device."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from samecurve.data.micro_batch import BatchFacts, MicroBatch
from samecurve.models.attention.mask_facts import MaskFacts, masks_from

ROWS = [
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]],
    [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]],
    [[0, 0, 0, 1, 2], [4, 0, 1, 2, 0]],
    [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]],
]
PADDING = [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 0]], [[0, 1, 1], [1, 1, 1]]]


def facts(**inputs: torch.Tensor) -> BatchFacts:
    (like,) = inputs.values()
    labels = torch.full(like.shape, -100)
    labels[0, 0], labels[1, 1] = 1, 2
    batch = MicroBatch({"input_ids": torch.zeros(like.shape, dtype=torch.long), **inputs}, {"labels": labels})
    return BatchFacts.of(batch, lambda labels: int((labels >= 0).sum()))


def test_what_the_host_finds_by_hand():
    found = facts(position_ids=torch.tensor(ROWS[2]))
    assert (found.counts[:3], found.packed, found.padded) == ((2, 2, 3), True, None)
    assert found.positions is not None and found.positions.tolist() == [0, 6]
    assert not facts(position_ids=torch.tensor(ROWS[1])).packed


@pytest.mark.parametrize("rows", ROWS)
def test_documents_are_those_of_transformers(rows):
    positions = torch.tensor(rows)
    expected = masking_utils.find_packed_sequence_indices(positions)
    packed = facts(position_ids=positions).packed
    with masks_from(MaskFacts(packed, None)):
        found = masking_utils.find_packed_sequence_indices(positions)
    assert packed == (expected is not None)
    assert found is None if expected is None else torch.equal(found, expected)


@pytest.mark.parametrize("rows", PADDING)
def test_a_mask_is_left_out_where_transformers_does(rows):
    mask = torch.tensor(rows).bool()
    padded = facts(attention_mask=mask).padded
    for causal, ask in (
        (True, masking_utils._ignore_causal_mask_sdpa),
        (False, masking_utils._ignore_bidirectional_mask_sdpa),
    ):
        for window in (None, 2, 9):
            arguments = (mask, 3, 3, 0, 0, window) if causal else (mask, 3, window)
            expected = bool(ask(*arguments))
            with masks_from(MaskFacts(None, padded)):
                assert ask(*arguments) is expected, (causal, window)


def test_no_answer_outlives_its_forward_pass():
    with pytest.raises(RuntimeError), masks_from(MaskFacts(packed=False)):
        raise RuntimeError
    assert masking_utils.find_packed_sequence_indices(torch.tensor(ROWS[2])) is not None
