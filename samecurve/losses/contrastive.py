"""Contrastive loss and retrieval ranks of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from samecurve.config.schema import Pooling
from samecurve.errors import ConfigurationError

# Content of modules.json.
MODULES = [{"type": str, "*": object}]
# Number of anchors, and of similarities, that are in memory at a time.
_ANCHORS, _SIMILARITIES = 1024, 2**24
# by sentence-transformers' names; embeddings have length 1, where mean_sqrt_len is the mean
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "lasttoken": "last", "mean": "mean", "mean_sqrt_len": "mean"}


def check_modules(model: str, modules: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigurationError for layers behind the pooling, as LaBSE has one: they are neither computed nor trained.

    Args:
        model: name of the folder, for messages.
        modules: content of the folder's modules.json, of sentence-transformers.
    """
    kinds = (module["type"].rpartition(".")[2] for module in modules)
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ConfigurationError(
            f"{model} has {', '.join(others)} behind its pooling (modules.json), which is neither computed nor trained "
            "here; use a model without it"
        )


def stated_pooling(model: str, modes: Mapping[str, object]) -> Pooling:
    """Return what a sentence-transformers folder's 1_Pooling/config.json says; the mean where it says nothing.

    Version 6 writes {"pooling_mode": name or names}, earlier ones a boolean for each: "pooling_mode_cls_token".

    Args:
        model: name of the folder, for messages.
        modes: content of the file.

    Raises:
        ConfigurationError: for a pooling that is not computed here.
    """
    stated = modes.get("pooling_mode")
    if stated is None:
        stated = [key.removeprefix("pooling_mode_") for key, used in modes.items() if "pooling_mode_" in key and used]
    stated = stated if isinstance(stated, list) else [stated]
    names = [str(name).removesuffix("_tokens").removesuffix("_token") for name in stated] or ["mean"]
    if len(names) > 1 or names[0] not in _POOLINGS:
        raise ConfigurationError(
            f"{model}: 1_Pooling/config.json says {' and '.join(names)}, but only the pooling of one of cls, lasttoken "
            "and mean is computed here; use another model, or name the pooling to train with in embed.pooling"
        )
    return _POOLINGS[names[0]]


def pool(states: Tensor, attention_mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool token states into one vector per sequence: (sequences, n), fp32.

    Args:
        states: (sequences, sequence_length, n), any float type, padded at the end.
        attention_mask: (sequences, sequence_length), 1 for tokens and 0 for padding.
        pooling: cls (the first token), last (the last token), or the mean over tokens.
    """
    states = states.float()
    if pooling == "cls":
        return states[:, 0]
    lengths = attention_mask.sum(dim=1)
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    return (states * attention_mask[..., None]).sum(dim=1) / lengths[:, None]


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """Compute InfoNCE (arXiv:1807.03748) on cosine similarities divided by the temperature.

    Each row's positive is classified among the positives and hard negatives of all rows. sentence-transformers calls
    the loss MultipleNegativesRankingLoss.

    Args:
        embeddings: (rows, 1 + candidates, n), normalized to length 1: anchor, positive, hard negatives.
        temperature: divisor of the similarities.

    Returns:
        (rows,): loss of each row in nats.
    """
    return torch.cat(list(_losses(embeddings[:, 0], _candidates(embeddings[:, 1:]), temperature)))


def info_nce_context(embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row, (rows,) as info_nce, and the gradient of their sum, in the embeddings' shape."""
    return _with_gradient(embeddings, lambda leaf: _losses(leaf[:, 0], _candidates(leaf[:, 1:]), temperature))


def momentum_context(anchors: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As info_nce_context, with negatives from a queue, for the anchors alone (MoCo, arXiv:1911.05722).

    Args:
        anchors: (rows, n), normalized to length 1, as are the others.
        keys: (rows, candidates, n): positive and hard negatives of each row.
        queue: (any number, n): further negatives of all rows.

    Returns:
        (rows,): loss of each row in nats; (rows, n): the gradient of their sum with respect to the anchors.
    """
    candidates = torch.cat([_candidates(keys), queue])
    return _with_gradient(anchors, lambda leaf: _losses(leaf, candidates, temperature))


def _candidates(keys: Tensor) -> Tensor:
    """Flatten (rows, candidates, n), the positives first: that of row i is candidate i, its class."""
    return keys.transpose(0, 1).flatten(0, 1)


def _with_gradient(values: Tensor, losses_of: Callable[[Tensor], Iterator[Tensor]]) -> tuple[Tensor, Tensor]:
    """Compute the losses of some values, in parts, and the gradient of their sum."""
    with torch.enable_grad():
        leaf, row_losses = values.detach().requires_grad_(), []
        for losses in losses_of(leaf):
            # part by part, so that autograd keeps the similarities of one part only
            losses.sum().backward()
            row_losses.append(losses.detach())
    assert leaf.grad is not None  # every part of the loss went backward
    return torch.cat(row_losses), leaf.grad


def _losses(anchors: Tensor, candidates: Tensor, temperature: float) -> Iterator[Tensor]:
    count = max(1, min(_ANCHORS, _SIMILARITIES // len(candidates)))
    for own in torch.arange(len(anchors), device=anchors.device).split(count):
        similarities = anchors[own] @ candidates.T
        yield functional.cross_entropy(similarities / temperature, own, reduction="none")


def ranks(embeddings: Tensor, candidates: np.ndarray) -> Tensor:
    """Rank each row's positive by similarity to its anchor among the distinct candidates of all rows.

    `candidates`, (rows, candidates per row), has one id per text. Returns (rows,), ranks from 1.
    """
    _, first, places = np.unique(candidates.ravel(), return_index=True, return_inverse=True)
    corpus = embeddings[:, 1:].flatten(0, 1)[torch.from_numpy(first)]
    positives = torch.from_numpy(places.reshape(candidates.shape)[:, :1])
    ranks_of_rows = []
    for anchors, own in zip(embeddings[:, 0].split(_ANCHORS), positives.split(_ANCHORS), strict=True):
        similarities = anchors @ corpus.T
        # not `>`, which is false for NaN: such a row would have rank 1
        ranks_of_rows.append(1 + (~(similarities <= similarities.gather(1, own))).sum(dim=1))
    return torch.cat(ranks_of_rows)
