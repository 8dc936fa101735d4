"""Attention in a ring, with threads as ranks, against torch's attention of whole rows."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from samecurve.models.attention import head_tail, ring, varlen

ROWS, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 8


@pytest.fixture
def sent(monkeypatch) -> dict[int, list[torch.Size]]:
    """The shapes that each rank has sent. Small tiles, which end anywhere in a chunk."""
    queues, shapes = defaultdict(Queue), defaultdict(list)

    def send_on(tensor: torch.Tensor, group: Any):
        queues[(group.rank() + 1) % group.size()].put(tensor.clone())
        shapes[group.rank()].append(tensor.shape)
        return lambda: queues[group.rank()].get(timeout=30)

    monkeypatch.setattr(ring, "_send_on", send_on)
    monkeypatch.setattr(ring, "QUERIES", 4)
    monkeypatch.setattr(ring, "KEYS", 5)
    return shapes


def visible(window: int, length: int) -> Any:
    """Mask function of two rows with other documents; a document may begin anywhere in a chunk."""
    places = torch.arange(length)
    documents = torch.stack([(places >= 11).int() + (places >= 25), (places >= 3).int()])

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < window) & (documents[row, query] == documents[row, key])

    return seen


@pytest.mark.parametrize(("size", "window"), [(1, 99), (2, 99), (3, 99), (3, 6)])
def test_equals_attention_of_whole_rows(size, window, sent):
    torch.manual_seed(0)
    length = 2 * size * 7
    seen, places = visible(window, length), torch.arange(length)
    whole = [torch.randn(ROWS, heads, length, WIDTH).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    given = torch.randn(ROWS, length, HEADS, WIDTH)
    mask = seen(torch.arange(ROWS)[:, None, None], None, places[:, None], places)[:, None]
    expected = scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True, scale=0.3).transpose(1, 2)
    expected.backward(given)
    first = varlen.first_visible(ROWS, length, seen)

    def rank(index: int) -> None:
        group: Any = SimpleNamespace(rank=lambda: index, size=lambda: size)
        own = [head_tail.cut(each.detach(), index, size, dim=2).requires_grad_() for each in whole]
        query, key, value = own
        found = ring.attend(query, key, value, ring.RingMask.of(head_tail.cut(first, index, size, 1)), 0.3, group)
        torch.testing.assert_close(found, head_tail.cut(expected, index, size, dim=1), rtol=1e-5, atol=1e-5)
        assert len(sent[index]) == size - 1
        found.backward(head_tail.cut(given, index, size, dim=1))
        for mine, all_of_it in zip(own, whole, strict=True):
            assert all_of_it.grad is not None
            torch.testing.assert_close(mine.grad, head_tail.cut(all_of_it.grad, index, size, 2), rtol=1e-5, atol=1e-5)
        # forward keys and values; backward these and their gradients
        assert sent[index] == 3 * (size - 1) * [(2, ROWS, KEY_HEADS, length // size, WIDTH)]

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(rank, range(size)))


def test_every_rank_computes_the_same_share(sent):
    """Of one long document; consecutive parts would be 1, 3, 5 and 7 shares of 16."""
    size, chunk = 4, 20
    first = torch.zeros(1, 2 * chunk, dtype=torch.long)
    computed = []
    for index in range(size):
        group: Any = SimpleNamespace(rank=lambda index=index: index, size=lambda: size)
        tiles = [tile for source in range(size) for tile in ring._tiles(ring.RingMask.of(first), group, source)]
        hidden = sum(0 if tile.hidden is None else int(tile.hidden.sum()) for tile in tiles)
        pairs = sum((tile.at.stop - tile.at.start) * (tile.seen.stop - tile.seen.start) for tile in tiles)
        computed.append(pairs)
        assert pairs - hidden == 2 * chunk * (2 * size * chunk + 1) // 2
    assert len(set(computed)) == 1


def test_parts_put_together_are_the_row():
    row = torch.arange(24).view(2, 12)
    parts = [head_tail.cut(row, index, 3, dim=1) for index in range(3)]
    assert parts[1][0].tolist() == [2, 3, 8, 9]
    assert torch.equal(head_tail.join(torch.cat(parts, dim=1), 3, dim=1), row)
