"""Losses on preference pairs.

Log-probabilities are those of whole answers in nats: (pairs, 2), fp32, with the chosen answer first. Every loss returns
one number per pair; a step's loss is the sum over pairs, divided once by their global count.
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
    """Sum the log-probabilities of each sequence's trained tokens.

    Args:
        logits: (sequences, length, vocabulary), any float type.
        labels: (sequences, length), already shifted.

    Returns:
        (sequences,), fp32, in nats.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses.view(labels.shape).sum(dim=-1)


def pair_losses(
    settings: Dpo, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None, drift: Tensor | None
) -> Tensor:
    """Compute the loss `settings.loss` of each pair.

    Args:
        settings: the recipe's DPO settings.
        log_probabilities: (pairs, 2), of the answers under the trained model.
        lengths: (pairs, 2), number of trained tokens of each answer.
        reference: (pairs, 2), log-probabilities under the reference model; needed by sigmoid, ipo and kto.
        drift: (pairs, 2), reference point of each answer for kto (see `kto_drift`).

    Returns:
        (pairs,).
    """
    mean = log_probabilities / lengths.clamp(min=1)
    if settings.loss == "simpo":
        return _simpo(settings, mean)
    if settings.loss == "orpo":
        return _orpo(settings, mean)
    ratios = log_probabilities - reference
    if settings.loss == "ipo":
        return _ipo(settings, ratios / lengths.clamp(min=1))
    if settings.loss == "kto":
        return _kto(settings, ratios, drift)
    return _sigmoid(settings, ratios)


def rewards(settings: Dpo, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None) -> Tensor:
    """Compute the implicit reward of each answer, (pairs, 2), as TRL reports it.

    The reward is beta times the log-ratio to the reference; for orpo and simpo, beta times the mean log-probability of
    a token.
    """
    if settings.loss in ("orpo", "simpo"):
        return settings.beta * log_probabilities / lengths.clamp(min=1)
    return settings.beta * (log_probabilities - reference)


def kto_drift(ratios: Tensor) -> Tensor:
    """Estimate the model's divergence from the reference, (pairs, 2), from the log-ratios (pairs, 2) of a batch.

    KTO's z_ref (arXiv:2402.01306, section 4.1) is computed over answers paired with other prompts, which costs another
    forward pass. For pairs the KTO report uses the other half of the batch instead, as TRL's loss `kto_pair` did:
    chosen answers are compared with the mean of the rejected ones and vice versa, each mean clamped at 0.
    """
    return ratios.mean(dim=0).clamp(min=0).flip(0).expand_as(ratios)


def _sigmoid(settings: Dpo, ratios: Tensor) -> Tensor:
    """DPO (arXiv:2305.18290, equation 7); label_smoothing is the probability of a wrong label (conservative DPO)."""
    scaled, smoothing = settings.beta * (ratios[:, 0] - ratios[:, 1]), settings.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def _ipo(settings: Dpo, mean_ratios: Tensor) -> Tensor:
    """IPO (arXiv:2310.12036, equation 17), with beta as its tau.

    Log-ratios are means over tokens, as in TRL, whose authors consulted the paper's authors: a sum would grow with the
    answer's length, while the target of the square does not.
    """
    return (mean_ratios[:, 0] - mean_ratios[:, 1] - 1 / (2 * settings.beta)).square()


def _kto(settings: Dpo, ratios: Tensor, drift: Tensor) -> Tensor:
    """KTO (arXiv:2402.01306, equation 8) with equally many good and bad answers; mean over a pair's two answers."""
    sign = torch.tensor([1.0, -1.0], device=ratios.device)
    return (1 - torch.sigmoid(settings.beta * sign * (ratios - drift))).mean(dim=1)


def _simpo(settings: Dpo, mean: Tensor) -> Tensor:
    """SimPO (arXiv:2405.14734, equation 6)."""
    return -F.logsigmoid(settings.beta * (mean[:, 0] - mean[:, 1]) - settings.gamma)


def _orpo(settings: Dpo, mean: Tensor) -> Tensor:
    """ORPO (arXiv:2403.07691, equations 6 and 7), with beta as its lambda.

    The first term is the mean over the chosen answer's tokens for each pair. TRL averages over all tokens of a batch,
    prompts included, so its value depends on the distribution of the batch over devices.
    """
    bounded = mean.clamp(max=_LARGEST_LOG_PROBABILITY)
    log_odds = bounded - _log1mexp(bounded)
    return -mean[:, 0] - settings.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 by the numerically stable form on either side of -ln 2 (Maechler, 2012)."""
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
