"""The losses on preference pairs: one number each worked out by hand, gradients, and what may not matter."""

from __future__ import annotations

import math

import pytest
import torch

from samecurve.config.schema import Dpo, Reward
from samecurve.interfaces.engine import EvalResult
from samecurve.losses.preference import kto_drift, kto_losses, pair_losses, rewards, sequence_log_probabilities
from samecurve.tasks.dpo import DpoTask, KtoTask
from samecurve.tasks.reward import RewardTask
from samecurve.tasks.splits import Splits

# one pair: log-probabilities -2 (4 tokens) and -6 (2 tokens), -3 and -5 under the reference
CHOSEN, REJECTED, LENGTHS, REFERENCE = -2.0, -6.0, [[4, 2]], [[-3.0, -5.0]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss_of(**settings) -> float:
    found = pair_losses(
        Dpo(**settings), torch.tensor([[CHOSEN, REJECTED]]), torch.tensor(LENGTHS), torch.tensor(REFERENCE)
    )
    assert found.shape == (1,)
    return found.item()


def log_odds(x: float) -> float:
    return math.log(math.exp(x) / (1 - math.exp(x)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # the log-ratios are 1 and -1, so their difference is 2
        ({"beta": 0.5}, -math.log(sigmoid(1))),
        ({"beta": 0.5, "label_smoothing": 0.1}, -0.9 * math.log(sigmoid(1)) - 0.1 * math.log(sigmoid(-1))),
        # per token 1 / 4 and -1 / 2; the target is 1 / (2 * 0.5)
        ({"loss": "ipo", "beta": 0.5}, (0.75 - 1) ** 2),
        # per token -1 / 2 and -3
        ({"loss": "simpo", "beta": 2.0, "gamma": 1.0}, -math.log(sigmoid(2 * 2.5 - 1))),
        ({"loss": "orpo", "beta": 0.3}, 0.5 - 0.3 * math.log(sigmoid(log_odds(-0.5) - log_odds(-3.0)))),
    ],
)
def test_each_loss_by_hand(settings, expected):
    assert loss_of(**settings) == pytest.approx(expected, rel=1e-6)


def test_rewards_by_hand():
    def found(**settings):
        values = torch.tensor([[CHOSEN, REJECTED]]), torch.tensor(LENGTHS), torch.tensor(REFERENCE)
        return rewards(Dpo(**settings), *values)[0].tolist()

    assert found(beta=0.5) == [0.5, -0.5]
    assert found(beta=0.5, loss="kto") == found(beta=0.5, loss="ipo") == [0.5, -0.5]
    assert found(beta=0.5, loss="orpo") == found(beta=0.5, loss="simpo", gamma=1.0) == [-0.25, -1.5]


def test_an_answer_that_is_certain_has_finite_odds_and_gradients():
    values = torch.tensor([[0.0, -1e-9], [-1e-4, -50.0]], requires_grad=True)
    pair_losses(Dpo(loss="orpo"), values, torch.ones(2, 2), None).sum().backward()
    assert torch.isfinite(values.grad).all()


def test_the_odds_keep_their_digits_on_both_sides_of_log_2():
    values = torch.tensor([[-1e-5, -0.5], [-0.7, -30.0]], dtype=torch.float64)
    expected = [math.log(math.exp(x) / -math.expm1(x)) for x in values.flatten().tolist()]
    found = pair_losses(Dpo(loss="orpo", beta=1.0), values, torch.ones(2, 2), None)
    for index in range(2):
        by_hand = -values[index, 0].item() - math.log(sigmoid(expected[2 * index] - expected[2 * index + 1]))
        assert found[index].item() == pytest.approx(by_hand, rel=1e-9)


def test_sequences_are_summed_over_their_trained_tokens():
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]])).repeat(2, 1, 1)
    labels = torch.tensor([[-100, 1, 2], [-100, -100, -100]])
    found = sequence_log_probabilities(logits.bfloat16(), labels)
    assert found.dtype == torch.float32 and found.tolist() == [pytest.approx(math.log(0.8 * 0.6), abs=5e-3), 0.0]


def test_ktos_loss_by_hand():
    settings = Dpo(loss="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=0.75)
    drift = kto_drift(torch.tensor([1.0, -0.5]))
    found = kto_losses(settings, torch.tensor([1.0, -1.0]), drift, torch.tensor([1, 0]))
    assert drift.tolist() == [0.25, 0.25]
    assert found.tolist() == pytest.approx([2 * (1 - sigmoid(0.5 * 0.75)), 0.75 * (1 - sigmoid(0.5 * 1.25))])
    assert kto_drift(torch.tensor([1.0, -3.0])).tolist() == [0.0, 0.0]


def batch(num_pairs: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 11, (2 * num_pairs, 6), generator=draw)
    labels[:, :2] = -100
    labels[::3, 4:] = -100
    return {
        "logits": torch.randn(2 * num_pairs, 6, 11, generator=draw),
        "labels": labels,
        "reference": -10 + torch.randn(num_pairs, 2, generator=draw),
    }


def pairs_of(values: dict[str, torch.Tensor], *which: int) -> dict[str, torch.Tensor]:
    together = {"logits": torch.stack, "labels": torch.stack}
    found = {}
    for name, tensor in values.items():
        rows = tensor.view(-1, 2, *tensor.shape[1:]) if name in together else tensor
        found[name] = rows[list(which)].flatten(0, 1) if name in together else rows[list(which)]
    return found


def task_of(**settings) -> DpoTask:
    chosen = Dpo(**settings)
    return (KtoTask if chosen.loss == "kto" else DpoTask)(None, Splits(None, [0] * 3, 0, {}), chosen)


EVERY = [{}, {"loss": "ipo"}, {"loss": "kto"}, {"loss": "orpo"}, {"loss": "simpo", "gamma": 0.5}]


@pytest.mark.parametrize("settings", EVERY, ids=lambda s: s.get("loss", "sigmoid"))
def test_the_sum_over_a_batch_does_not_depend_on_how_it_is_cut(settings):
    """Also of the gradient; what fills up is nothing, and the context is that of the whole batch."""
    task, values = task_of(**settings), batch(4)
    values |= {"is_good": torch.arange(4) % 3} if settings.get("loss") == "kto" else {}
    features = task.features(**values)
    context = task.context(features) if settings.get("loss") == "kto" else {}
    whole = {**values, **context}
    parts = [pairs_of(whole, 0), pairs_of(whole, 1, 2, 3)]
    filled = pairs_of(whole, 0, 0)
    filled["labels"] = torch.cat([filled["labels"][:2], torch.full_like(filled["labels"][2:], -100)])
    for cut in ([whole], parts, [filled, parts[1]]):
        logits = [part["logits"].clone().requires_grad_() for part in cut]
        total = sum(task.loss(**{**part, "logits": given}) for part, given in zip(cut, logits, strict=True))
        total.backward()
        norm = sum(given.grad.square().sum() for given in logits).sqrt()
        counted = sum(task.count(**{k: v for k, v in part.items() if k != "logits"}) for part in cut)
        found = (total.item(), norm.item(), counted, sum(task.statistics(**part) for part in cut).tolist())
        if cut[0] is whole:
            expected = found
        assert found[0] == pytest.approx(expected[0], rel=1e-6) and found[1] == pytest.approx(expected[1], rel=1e-6)
        assert found[2] == 4 and found[3] == pytest.approx(expected[3], rel=1e-6)


def test_metrics_by_hand():
    task = task_of()
    assert task.metrics(EvalResult(loss=0.5, tokens=3, statistics=(6.0, -3.0, 2.0))) == {
        "eval_loss": 0.5,
        "eval_rewards_chosen": 2.0,
        "eval_rewards_rejected": -1.0,
        "eval_margin": 3.0,
        "eval_accuracy": pytest.approx(2 / 3),
        "eval_pairs": 3,
    }


def test_the_reward_loss_by_hand():
    """Rewards 2 and 1, 0 and 3; the third pair only fills up."""
    logits = torch.tensor([[2.0], [1.0], [0.0], [3.0], [9.0], [9.0]])
    labels = torch.tensor([0, 0, -100])
    task = RewardTask(None, Splits(None, None, 0, {}), Reward())
    plain = -math.log(sigmoid(1)) - math.log(sigmoid(-3))
    assert task.loss(logits, labels).item() == pytest.approx(plain)
    assert (task.count(labels), task.statistics(logits, labels).tolist()) == (2, [2.0, 4.0, 1.0])
    centred = RewardTask(None, Splits(None, None, 0, {}), Reward(center_rewards_coefficient=0.1))
    assert centred.loss(logits, labels).item() == pytest.approx(plain + 0.1 * (9 + 9))
