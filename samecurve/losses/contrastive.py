"""The contrastive loss of embeddings, and how well they retrieve."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from samecurve.config.schema import Pooling

# Anchors whose similarities to all candidates are held at a time.
_ANCHORS = 1024


def pool(states: Tensor, attention_mask: Tensor, pooling: Pooling) -> Tensor:
    """states: (sequences, sequence_length, n), any float type; the padding is at the end. (sequences, n), fp32."""
    states = states.float()
    if pooling == "cls":
        return states[:, 0]
    lengths = attention_mask.sum(dim=1)
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    return (states * attention_mask[..., None]).sum(dim=1) / lengths[:, None]


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """(rows,): in nats, how surprising each row's positive is among the positives and negatives of all rows.

    embeddings: (rows, 1 + candidates, n) of length 1: anchor, positive, hard negatives. InfoNCE (arXiv:1807.03748) on
    cosine similarities divided by the temperature, which sentence-transformers calls MultipleNegativesRankingLoss.
    """
    return torch.cat(list(_losses(embeddings, temperature)))


def info_nce_context(embeddings: Tensor, temperature: float) -> dict[str, Tensor]:
    """row_loss: (rows,), as info_nce. gradient: of their sum with respect to the embeddings, in their shape."""
    with torch.enable_grad():
        leaf = embeddings.detach().requires_grad_()
        found = []
        for losses in _losses(leaf, temperature):
            losses.sum().backward()
            found.append(losses.detach())
    return {"row_loss": torch.cat(found), "gradient": leaf.grad}


def _losses(embeddings: Tensor, temperature: float) -> Iterator[Tensor]:
    anchors, candidates = embeddings[:, 0], embeddings[:, 1:].transpose(0, 1).flatten(0, 1)
    for own in torch.arange(len(anchors), device=anchors.device).split(_ANCHORS):
        similarities = anchors[own] @ candidates.T
        yield functional.cross_entropy(similarities / temperature, own, reduction="none")


def ranks(embeddings: Tensor, candidates: np.ndarray) -> Tensor:
    """(rows,): the place, from 1, of each row's positive among the different candidates of all rows by similarity.

    embeddings: as info_nce's. candidates: (rows, number of candidates), equal where their texts are.
    """
    _, first, places = np.unique(candidates.ravel(), return_index=True, return_inverse=True)
    corpus = embeddings[:, 1:].flatten(0, 1)[torch.from_numpy(first)]
    positives = torch.from_numpy(places.reshape(candidates.shape)[:, :1])
    found = []
    for anchors, own in zip(embeddings[:, 0].split(_ANCHORS), positives.split(_ANCHORS), strict=True):
        similarities = anchors @ corpus.T
        found.append(1 + (similarities > similarities.gather(1, own)).sum(dim=1))
    return torch.cat(found)
