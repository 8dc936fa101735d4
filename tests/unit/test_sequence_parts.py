"""Context parallelism without processes: the tokens of a rank, and the masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from samecurve.data.micro_batch import BatchFacts, MicroBatch
from samecurve.engines.context_parallel import SequencePart
from samecurve.losses.cross_entropy import count_trained
from samecurve.models.attention import varlen
from samecurve.models.attention.context import GatheredKeys, Ring, Ulysses


def row() -> MicroBatch:
    """Documents of 3 and 2 tokens; the prompt of the second one is not trained."""
    inputs = {"input_ids": torch.tensor([[10, 11, 12, 20, 21]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    batch = MicroBatch(inputs, {"labels": torch.tensor([[11, 12, -100, -100, 22]])}, places=torch.tensor([7]))
    return MicroBatch(batch.inputs, batch.targets, 0, batch.places, BatchFacts.of(batch, count_trained))


def test_a_rank_has_its_tokens_and_the_positions_of_the_whole_row():
    first, second = (SequencePart(index, 2).cut(row()) for index in (0, 1))
    assert first.inputs["input_ids"].tolist() == [[10, 11, 12]]
    assert second.inputs["input_ids"].tolist() == [[20, 21, 0]]
    assert first.labels.tolist() == [[11, 12, -100]] and second.labels.tolist() == [[-100, 22, -100]]
    for part in (first, second):
        assert part.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
        assert part.facts is not None and part.facts.counts.trained == 3 and part.facts.packed
        assert part.places is not None and part.places.tolist() == [7]
    positions = [part.facts.positions for part in (first, second) if part.facts]
    assert [each.tolist() for each in positions if each is not None] == [[0, 1], [1]]


def test_a_balanced_part_has_a_chunk_from_either_end():
    first, second = (SequencePart(index, 2, is_balanced=True).cut(row()) for index in (0, 1))
    assert first.inputs["input_ids"].tolist() == [[10, 11, 0, 0]]  # padded from 5 to 8 tokens
    assert second.inputs["input_ids"].tolist() == [[12, 20, 21, 0]]
    assert first.labels.tolist() == [[11, 12, -100, -100]] and second.labels.tolist() == [[-100, -100, 22, -100]]
    assert first.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    part = SequencePart(1, 2, is_balanced=True)
    ids = torch.cat([first.inputs["input_ids"], second.inputs["input_ids"]], dim=1)
    assert part.join(ids).tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def documents(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Documents of 5 and 7 tokens."""
    return causal_mask_function(batch, head, query, key) & ((query < 5) == (key < 5))


def test_masks_are_those_of_the_whole_row():
    """What transformers passes for a rank's 4 of 12 tokens: its own length, and the mask function of the row."""
    passed = {"batch_size": 2, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}
    whole = sdpa_mask(batch_size=2, q_length=12, kv_length=12, mask_function=documents, allow_is_causal_skip=False)
    assert whole is not None and whole[0, 0, 6].tolist() == 5 * [False] + 2 * [True] + 5 * [False]
    for rank in range(3):
        given = {**passed, "mask_function": documents, "allow_is_causal_skip": False}
        assert torch.equal(Ulysses(group(rank, 3), "sdpa").mask(**given), whole)
        head, tail = GatheredKeys(group(rank, 3), "sdpa").mask(**given)
        stop, end = 2 * rank + 2, 12 - 2 * rank  # of the two chunks
        assert torch.equal(head, whole[:, :, stop - 2 : stop, :stop])
        assert torch.equal(tail, whole[:, :, end - 2 : end, :end])
    found = Ulysses(group(0, 3), varlen.NAME).mask(**passed, mask_function=documents)
    assert found.first[0, 0, :, 0].tolist() == 5 * [0] + 7 * [5]
    found = Ring(group(1, 3), "sdpa").mask(**passed, mask_function=documents)
    assert found.first[0, 0, :, 0].tolist() == [0, 0, 5, 5] and found.bounds == [[0, 0], [5, 5]]


def test_only_whole_rows_can_do_without_a_mask():
    """A rank with the first and the last of four tokens: the first must not see the second."""
    passed = {"batch_size": 1, "q_length": 2, "kv_length": 2, "q_offset": 0, "kv_offset": 0}
    given = {**passed, "mask_function": causal_mask_function, "allow_is_causal_skip": True}
    assert Ulysses(group(0, 2), "sdpa").mask(**given) is None
    head, tail = GatheredKeys(group(0, 2), "sdpa").mask(**given)
    assert head[0, 0].tolist() == [[True]] and tail[0, 0].tolist() == [4 * [True]]
