from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.data.micro_batch import Counts, MicroBatch
from samecurve.losses.cross_entropy import IGNORE_INDEX, count_trained, token_loss_sum


def test_equals_the_causal_lm_loss_of_transformers():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    input_ids = torch.randint(0, 50, (3, 11))
    unshifted = input_ids.clone()
    unshifted[0, 4:] = unshifted[2, :9] = IGNORE_INDEX
    theirs = model(input_ids, labels=unshifted)
    labels = torch.nn.functional.pad(unshifted[:, 1:], (0, 1), value=IGNORE_INDEX)
    ours = token_loss_sum(theirs.logits, labels) / count_trained(labels)
    torch.testing.assert_close(ours, theirs.loss, rtol=1e-6, atol=0)


def test_a_sum_worked_out_by_hand():
    # softmax([0, ln 3]) = [1/4, 3/4]: targets 0 and 1 cost ln 4 and ln 4/3.
    logits = torch.tensor([[[0.0, 3.0], [0.0, 3.0], [5.0, 1.0]]])
    logits[0, :2, 1] = torch.log(torch.tensor(3.0))
    labels = torch.tensor([[0, 1, IGNORE_INDEX]])
    assert count_trained(labels) == 2
    assert token_loss_sum(logits, labels).item() == pytest.approx(1.386294 + 0.287682, abs=1e-5)


def test_weights_worked_out_by_hand():
    """ln 4 times 0.5 and ln 4/3 times 2; the ignored token's weight does not count."""
    logits = torch.log(torch.tensor([[1.0, 3.0], [1.0, 3.0], [9.0, 1.0]]))
    labels, weights = torch.tensor([0, 1, IGNORE_INDEX]), torch.tensor([0.5, 2.0, 7.0])
    assert token_loss_sum(logits, labels, weights).item() == pytest.approx(0.5 * 1.386294 + 2 * 0.287682, abs=1e-5)
    batch = MicroBatch({"input_ids": torch.zeros(1, 3)}, {"labels": labels[None], "weights": weights[None]})
    counts = Counts.of(batch, lambda labels, weights: count_trained(labels))
    assert (counts.trained, counts.divisor) == (2, 2.5)


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.zeros(4000, 2, dtype=torch.bfloat16)
    loss = token_loss_sum(logits, torch.zeros(4000, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4000 * 0.693147, rel=1e-5)


def test_no_trained_token_gives_zero_with_a_graph():
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
