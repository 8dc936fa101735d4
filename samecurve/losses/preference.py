"""Losses on preference pairs.

Log-probabilities are those of whole answers in nats: (pairs, 2), fp32, with the chosen answer first. Every loss returns
one number per pair, or per answer (KTO); a step's loss is their sum, divided once by their global count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from samecurve.losses.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from samecurve.config.schema import Dpo

# Upper bound of a length-normalized log-probability in the odds ratio, because log(1 - exp(x)) is -inf at x = 0.
_LARGEST_LOG_PROBABILITY = -1e-6


def sequence_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the log-probabilities of each sequence's trained tokens: (sequences,), fp32, in nats.

    Args:
        logits: (sequences, length, vocabulary), any float type, or the labels' log-probabilities (sequences, length).
        labels: (sequences, length), already shifted.
    """
    if logits.ndim == labels.ndim:
        return logits.sum(dim=-1)
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses.view(labels.shape).sum(dim=-1)


def pair_losses(settings: Dpo, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None) -> Tensor:
    """Compute the loss `settings.loss` of each pair.

    Args:
        log_probabilities: (pairs, 2), of the answers under the trained model.
        lengths: (pairs, 2), number of trained tokens of each answer.
        reference: (pairs, 2), log-probabilities under the reference model; needed by sigmoid and ipo.

    Returns:
        (pairs,).
    """
    # pairs that only pad a micro-batch have no trained token
    beta, lengths = settings.beta, lengths.clamp(min=1)
    mean = log_probabilities / lengths
    if settings.loss == "simpo":  # arXiv:2405.14734, equation 6
        assert settings.gamma is not None  # a rule of the configuration
        return -F.logsigmoid(beta * (mean[:, 0] - mean[:, 1]) - settings.gamma)
    if settings.loss == "orpo":
        # ORPO, arXiv:2403.07691, equations 6 and 7, with beta as its lambda. The first term is the mean over the chosen
        # answer's tokens for each pair. TRL averages over all tokens of a batch, prompts included, so its value depends
        # on the distribution of the batch over devices.
        bounded = mean.clamp(max=_LARGEST_LOG_PROBABILITY)
        # log(1 - exp(bounded)) by the numerically stable form on either side of -ln 2 (Maechler, 2012)
        near = bounded > -math.log(2)
        log_complement = torch.where(near, torch.log(-torch.expm1(bounded)), torch.log1p(-torch.exp(bounded)))
        log_odds = bounded - log_complement
        return -mean[:, 0] - beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    assert reference is not None  # see Dpo.has_reference
    ratios = log_probabilities - reference
    if settings.loss == "ipo":
        # arXiv:2310.12036, equation 17, with beta as its tau. Log-ratios are means over tokens, as in TRL, whose
        # authors consulted the paper's authors: a sum would grow with the answer's length, the target of the square
        # does not.
        means = ratios / lengths
        return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    # DPO, arXiv:2305.18290, equation 7; the smoothing is the probability of a wrong label (conservative DPO)
    scaled, smoothing = beta * (ratios[:, 0] - ratios[:, 1]), settings.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def rewards(settings: Dpo, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None) -> Tensor:
    """Compute the implicit reward of each answer, (pairs, 2), as TRL reports it. Arguments: see `pair_losses`.

    The reward is beta times the log-ratio to the reference; for orpo and simpo, beta times the mean log-probability of
    a token.
    """
    if settings.loss in ("orpo", "simpo"):
        return settings.beta * log_probabilities / lengths.clamp(min=1)
    assert reference is not None  # see Dpo.has_reference
    return settings.beta * (log_probabilities - reference)


def kto_losses(settings: Dpo, ratios: Tensor, drift: Tensor, is_good: Tensor) -> Tensor:
    """Compute KTO's loss of each answer (arXiv:2402.01306, equation 8), (answers,).

    Args:
        ratios: (answers,), log-probabilities minus those under the reference model.
        drift: (answers,), the reference point: how far the model is from the reference model, see `kto_drift`.
        is_good: (answers,).
    """
    gains = settings.beta * (ratios - drift)
    good, bad = 1 - torch.sigmoid(gains), 1 - torch.sigmoid(-gains)
    return torch.where(is_good > 0, settings.desirable_weight * good, settings.undesirable_weight * bad)


def kto_drift(ratios: Tensor) -> Tensor:
    """Estimate the model's divergence from the reference (z_ref) by log-ratios (answers,) of wrong answers.

    It is their mean over the global batch, not below 0, and the same for all: (answers,).
    """
    return ratios.mean(dim=0).clamp(min=0).expand_as(ratios)
