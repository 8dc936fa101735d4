"""What a proof says of a run by itself: trained tokens, texts beside others, and weights that move or do not."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, LlamaConfig, LlamaForCausalLM

from samecurve.prove.judge import Differences, Run, logged_findings, own_findings
from samecurve.prove.masks import Masks, apart, mask_problem

IGNORED = -100


def row(trained=3, tokens=9, last=2, follows=None, turns=()) -> dict:
    return {"trained": trained, "tokens": tokens, "last": last, "next": follows, "turns": [*turns]}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(), row()], ""),
        ([row(), row(trained=0, last=None)], "1 of 2 rows have no trained token"),
        ([row(last=5, follows=1), row(last=6, follows=1)], "goes on with token 1, which is never trained"),
        ([row(last=1, follows=7), row(last=1, follows=7)], ""),  # all end alike: that is the end
        ([row(last=5, follows=1), row(last=1)], ""),  # 1 is trained elsewhere
        ([row(turns=[("user", 3, 1)])], "1 of 1 turns of user have trained tokens"),
        ([row(turns=[("assistant", 3, 2), ("assistant", 3, 3)])], "1 of 2 turns of assistant are trained in part"),
        ([row(turns=[("assistant", 3, 0)])], ""),  # an earlier answer may be left out as a whole
        ([row(trained=9, turns=[("user", 3, 3)])], ""),  # every token is trained, as asked for
    ],
)
def test_trained_tokens(rows, said):
    problem = mask_problem(rows)
    assert said in problem and bool(said) == bool(problem)


class Words:
    """A tokenizer of single characters, and its template."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


def test_the_roles_of_tokens_are_those_of_the_rendered_messages():
    masks = Masks()
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    text = "".join(f"<{message['content']}>" for message in chat)
    assert masks.render(lambda tokenizer, messages: text, Words(), chat) == text
    ids = torch.tensor([[ord(letter) for letter in text] + [0]])
    labels = torch.where((ids == ord("c")) | (ids == ord("b")), ids, IGNORED)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    (seen,) = masks.of_rows({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert seen["turns"] == [("user", 2, 1), ("assistant", 2, 1)]
    assert (seen["tokens"], seen["trained"], seen["last"], seen["next"]) == (8, 2, ord("c"), ord("d"))


@pytest.mark.parametrize(("label", "empty"), [(5, 1), (6, 0)])
def test_a_masked_language_model_may_leave_rows_out(label, empty):
    """Its labels are the tokens that the inputs hide: 6 in place of 5."""
    labels = torch.tensor([[IGNORED, label, IGNORED], [IGNORED] * 3])
    rows = [*Masks().of_rows({"input_ids": torch.tensor([[4, 5, 7], [4, 8, 7]]), "labels": labels})]
    assert sum(not row["trained"] for row in rows) == empty


def test_a_text_whose_padding_is_attended_to_is_apart():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(20)
    ids, mask = torch.randint(1, 40, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0  # on the left
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    right = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    assert apart(model, right, model(**right)) == (0.0, "")
    forgotten = model(input_ids=ids, position_ids=positions)
    value, text = apart(model, right, forgotten)
    assert value > 0.01 and text.startswith("the model's outputs for text 1 of row 2")


def test_a_loss_that_counts_padding_is_apart():
    """BERT's loss of an answer's place is a softmax over all columns, also those of padding."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    batch = {"input_ids": torch.randint(1, 40, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    places = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    model = BertForQuestionAnswering(config).eval()
    value, text = apart(model, batch | places, model(**batch, **places))
    assert value > 1e-3 and text.startswith("one more column of padding changes the loss")
    masked, labels = BertForMaskedLM(config).eval(), {"labels": batch["input_ids"]}
    assert apart(masked, batch | labels, masked(**batch, **labels)) == (0.0, "")


def step(**changed) -> dict:
    weights = {"first": [1.0] * 9, "second": [2.0] * 9}
    record = {"gradients": {name: [1.0] * 9 for name in weights}, "weights": weights, "masks": [], "apart": (0.0, "")}
    frozen = {"third": [3.0] * 9}
    return record | {"start": {name: [0.5] * 9 for name in weights} | frozen, "end": weights | frozen} | changed


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({}, "", ""),
        ({"end": {"third": [3.1] * 9}}, "frozen weights", "1 weights move that are not trained, third"),
        ({"start": {"second": [2.0] * 9}}, "trained weights", "1 weights have gradients and do not move, second"),
        ({"apart": (0.5, "the outputs for text 1 are away")}, "context", "for text 1 are away: padding"),
        ({"masks": [row(trained=0)]}, "labels", "1 of 1 rows have no trained token"),
    ],
)
def test_a_run_by_itself(changed, kind, text):
    seen = [*own_findings(Run("run", [[step(**changed)]]))]
    assert [finding.kind for finding in seen] == [kind] * bool(kind)
    assert all(text in finding.text for finding in seen)


@pytest.mark.parametrize(("value", "is_named"), [(0.5, False), (0.6, True)])
def test_an_evaluation_that_differs_is_named(value, is_named):
    def logged(loss: float) -> Run:
        return Run("run", [[step()]], [{"event": "log", "step": 1, "value": {"eval_loss": loss, "eval_runtime": loss}}])

    seen = [*logged_findings(logged(value), logged(0.5), Differences())]
    assert [finding.kind for finding in seen] == ["logged"] * is_named


LOSS = {"eval_loss": 0.5}
TRAINED = {"loss": 2.0, "eval_runtime": 1.0}


@pytest.mark.parametrize(
    ("ours", "theirs", "is_named"),
    [
        ([TRAINED, LOSS], [LOSS, TRAINED], False),  # only what is measured has an order
        ([TRAINED], [TRAINED, LOSS], True),
        ([LOSS, LOSS], [LOSS], True),
        ([LOSS], [LOSS | {"eval_accuracy": 0.5}], True),
        ([TRAINED, {"eval_loss": 0.6}], [{"eval_loss": 0.5}, TRAINED], True),
    ],
)
def test_an_evaluation_that_one_of_both_logs_is_named(ours, theirs, is_named):
    runs = [Run("run", [[step()]], [{"event": "log", "value": log} for log in logs]) for logs in (ours, theirs)]
    assert [finding.kind for finding in logged_findings(*runs, Differences())] == ["logged"] * is_named
