"""`prove`: what is recorded of a step, and what the judge says of planted differences."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from samecurve.prove import recipe, script
from samecurve.prove.exported import _saved_name, export_problem
from samecurve.prove.judge import (
    Differences,
    Run,
    data_findings,
    distance,
    drop_copies,
    findings,
    why_not_compared,
    why_nothing_is_shown,
)
from samecurve.prove.modules import sketch
from samecurve.prove.recorder import Batches, Reading
from samecurve.prove.rows import rows_of


def test_distance_of_sketches_is_that_of_tensors():
    one = torch.randn(400, generator=torch.Generator().manual_seed(1))
    other = one + 1e-3 * torch.randn(400, generator=torch.Generator().manual_seed(2))
    true = ((one - other).norm() / max(one.norm(), other.norm())).item()
    assert distance(sketch("w", one), sketch("w", other)) == pytest.approx(true, rel=0.7)
    assert distance(sketch("w", one), sketch("w", one)) == 0
    assert distance(sketch("w", one), sketch("w", one.flip(0))) > 0.5  # of the same norm


def test_padding_does_not_change_a_row():
    short = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2)}
    padded = {
        "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]),
        "labels": torch.tensor([[5, 6, -100], [7, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    assert rows_of((), short) == rows_of((), padded)[:1]
    choices = [{name: value[:, None] for name, value in batch.items()} for batch in (short, padded)]
    assert rows_of((), choices[0]) == rows_of((), choices[1])[:1]
    assert rows_of((), {**short, "labels": torch.tensor([[5, -100]])}) != rows_of((), short)
    assert rows_of((torch.ones(3, 2),), {}) == rows_of((torch.ones(1, 2),), {}) * 3
    halves = torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)  # NumPy has no such numbers
    assert rows_of(halves[:1], {}) == rows_of(halves[1:], {}) * 3 != rows_of((torch.ones(3, 2),), {})


def test_padding_of_answers_does_not_change_a_row():
    """A decoder's tokens are padded to the longest answer of a batch, an encoder's to the longest text."""
    text = torch.tensor([[5, 6]])
    short = {"labels": torch.tensor([[7, 8]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    long = {"labels": torch.tensor([[7, 8, -100]]), "decoder_input_ids": torch.tensor([[0, 7, 8]])}
    rows = [rows_of((), {"input_ids": text, "attention_mask": text > 0, **answer}) for answer in (short, long)]
    assert rows[0] == rows[1]
    long["labels"][0, 2] = 9
    assert rows[0] != rows_of((), {"input_ids": text, "attention_mask": text > 0, **long})


@dataclass
class Batch:
    """As scripts have of their own."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.mark.parametrize("kind", [UserDict, lambda batch: Batch(**batch), lambda batch: [UserDict(given=batch)]])
def test_rows_are_seen_inside_of_what_a_model_is_given(kind):
    ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    rows = rows_of((kind({"input_ids": ids, "attention_mask": ids > 0}),), {})
    short = {"input_ids": ids[:1, :2], "attention_mask": ids[:1, :2] > 0}
    assert len({*rows}) == 2 and rows[:1] == rows_of((kind(short),), {})


def test_inputs_that_a_script_differentiates_are_rows():
    points = torch.randn(3, 2, requires_grad=True)
    assert len(rows_of((points,), {})) == 3
    assert rows_of((points * 2, torch.nn.Parameter(torch.ones(3))), {}) == []  # values of weights, which differ


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_several_processes_become_one(drop_last):
    batches = Batches(BatchSampler(SequentialSampler(range(11)), 2, drop_last), 2)
    assert [*batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9] if drop_last else [8, 9, 10]]
    assert len(batches) == 3
    batches.sampler = SequentialSampler(range(3))  # as Accelerate replaces it
    assert [*batches] == [[0, 1] if drop_last else [0, 1, 2]]


def test_only_the_first_data_set_is_replayed():
    reading, train, held_out = Reading(replay=[[7, 8], [9]], backwards=True), [1, 2], [3]

    def read(dataset: list, rows: list[int]) -> list[int]:
        return reading._next(lambda _: rows, SimpleNamespace(_dataset=dataset))

    assert [read(train, [0, 1]), read(held_out, [4, 5]), read(train, [2])] == [[8, 7], [4, 5], [9]]
    assert reading.take(2) == [[7, 8], [9]]


ROWS = ["a", "b", "c", "d"]


def step(
    rows=ROWS, losses=(2.0,), labels=((4, 3),), norm=1.0, clip=2.0, rates=(0.1,), gradient=1.0, weight=1.0, by="ddp"
) -> dict:
    return {
        "strategy": by,
        "rows": [*rows],
        "indices": [[ord(row) for row in rows]],
        "losses": [*losses],
        "labels": [*labels],
        "gradients": {"first": [1.0] * 9, "second": [abs(gradient), *[gradient] * 8]},
        "norm": norm,
        "clip": clip,
        "rates": [*rates],
        "weights": {"first": [1.0] * 9, "second": [weight] * 9},
        "start": {"first": [1.0] * 9, "second": [1.0] * 9},
        "end": {},
        "masks": [],
        "apart": (0.0, ""),
    }


def run(*ranks: list[dict]) -> Run:
    return Run("run", [*ranks])


MOVED = step(weight=1.5)
ALONE = run([step(by="single"), MOVED])
HALVES = ({"rows": ROWS[:2]}, {"rows": ROWS[2:]})


def two(first: Mapping = MappingProxyType({}), **both) -> Run:
    """Two ranks with half of the rows each; `first`: what is different on rank 0."""
    ranks = [[step(**{**half, **both, **own}), MOVED] for half, own in zip(HALVES, (first, {}), strict=True)]
    for rank, half in zip(ranks, HALVES, strict=True):
        rank[1] = {**rank[1], "rows": half["rows"]}
    return run(*ranks)


def found_in(run: Run, rounding: Differences) -> list:
    return [*findings(run, "ddp", ALONE, Differences.between(run, ALONE), rounding)]


def judged(run: Run) -> list[tuple[str, int, str]]:
    nothing = Differences.between(ALONE, ALONE)
    return [*data_findings(run, ALONE), *found_in(run, nothing)]


def test_a_script_that_draws_its_rows_anew_is_not_judged():
    again = run([step(losses=(2.1,)), step()])
    assert why_not_compared(Differences.between(ALONE, ALONE)) == ""
    assert why_not_compared(Differences.between(again, ALONE)).startswith("not judged: ")


def test_equal_runs_have_no_findings():
    assert judged(two()) == judged(two(clip=None)) == []  # no norm is above 2
    assert why_nothing_is_shown(ALONE) == ""


@pytest.mark.parametrize(
    ("different", "kind", "text"),
    [
        (two({"rows": ["a", "x"]}), "rows", "1 of 4 rows are others"),
        (two({"rows": ["c", "d"]}), "rows", "2 of 4 rows are read twice, as 2 others are not"),
        (two({"rows": ["a", "b", "x"]}), "rows", "5 rows in a step, one process has 4"),
        (two(rates=[0.2]), "learning rate", "0.2, in one process 0.1"),
        (two(losses=[2.1]), "loss", "4.8e-02 away"),
        (two(losses=[1.0]), "loss", "0.5 times that of one process"),
        (two({"losses": [3.0], "labels": [(1, 1)]}, losses=[5 / 3], labels=[(3, 3)]), "loss", "a mean of means"),
        (two(gradient=1.1), "gradients", "9.1e-02 of second away"),
        (two(gradient=-1.0), "gradients", "2.0e+00 of second away"),
        (two(norm=1.1), "norm", "9.1e-02 away"),
        (two(clip=0.5), "norm", "clipped to a norm of 0.5, in one process clipped to a norm of 2"),
        (two(weight=1.1), "weights", "7.1e-02 of second away"),
        (two({"weight": 1.0 + 1e-12}), "ranks", "1 weights are not the same on all of them, second the first"),
        (two(by="single"), "strategy", "trained under single, not under ddp"),
    ],
)
def test_planted_difference_is_named(different, kind, text):
    assert [(finding.kind, finding.step) for finding in judged(different)] == [(kind, 1)]
    assert text in judged(different)[0].text


def test_a_wrong_update_is_found_however_small():
    """At the rates of a warm-up; the weights themselves are the same to 2e-6."""
    slow, wrong, rounded = (step(weight=1 + change) for change in (1e-6, 2e-6, 1.1e-6))
    alone, twice, same = (run([step(), step(), last]) for last in (slow, wrong, rounded))
    nothing = Differences.between(alone, alone)
    (finding,) = findings(twice, "ddp", alone, Differences.between(twice, alone), nothing)
    assert (finding.kind, finding.step) == ("weights", 3) and "of the change since the start" in finding.text
    assert [*findings(same, "ddp", alone, Differences.between(same, alone), nothing)] == []  # fp32 has no more digits
    assert "which fp32 rounds" in why_nothing_is_shown(alone)
    beside = step() | {"start": {"a large frozen one": [1e6] * 9, **step()["start"]}}
    assert why_nothing_is_shown(run([beside, MOVED])) == ""  # of an adapter's weights, not the base model's


def test_hidden_rows_are_known_by_their_places_in_the_data_set():
    hidden = {"rows": []}
    alone, same, apart = (
        run(*([step() | hidden | {"indices": [[*places]]}] for places in of_ranks))
        for of_ranks in ([range(4)], [(0, 1), (2, 3)], [(0, 1), (0, 1)])
    )
    assert [*data_findings(same, alone)] == []
    (finding,) = data_findings(apart, alone)
    assert finding.kind == "rows" and "2 of 4 rows are read twice" in finding.text
    assert why_nothing_is_shown(run([step(), MOVED | hidden])) == ""
    unknown = run([step(), MOVED | hidden | {"indices": [[]]}])
    assert why_nothing_is_shown(unknown).startswith("no row can be seen in step 2")


@pytest.mark.parametrize("names", [("gradients",), ("weights",), ("gradients", "weights")])
def test_a_number_that_is_nan_is_a_difference(names):
    broken = run([step(), MOVED | {name: {"first": [1.0] * 9, "second": [math.nan] * 9} for name in names}])
    nothing, itself = (Differences.between(one, ALONE) for one in (ALONE, broken))
    for rounding in (nothing, itself):
        assert {finding.kind for finding in found_in(broken, rounding)} >= {*names}
    again = Differences.between(broken, broken)
    assert {finding.kind for finding in findings(broken, "ddp", broken, again, again)} == {*names}


@pytest.mark.parametrize(("loss", "rows"), [(0.0, 1), (1.0, 2)])
def test_a_copied_row_without_weight_is_no_row(loss, rows):
    ranks = [[step(rows=["a"], losses=[loss])], [step(rows=["a"])]]
    drop_copies(ranks)
    assert (run(*ranks).rows(0).total(), len(run(*ranks).indices[0])) == (rows, rows)


def test_rounding_is_no_finding():
    rounding = Differences.between(two(gradient=1.01), ALONE)
    assert [*found_in(two(gradient=1.1), rounding)] == []
    assert [finding.kind for finding in found_in(two(gradient=2.0), rounding)] == ["gradients"]
    chaos = Differences.between(two(gradient=1.05), ALONE)  # 20 times as much would excuse anything
    assert [finding.kind for finding in found_in(two(gradient=1.2), chaos)] == ["gradients"]


def test_other_trained_weights_are_named():
    different = two()
    for rank in different.ranks:
        del rank[0]["weights"]["second"]
    assert (
        "1 are trained in one of the two alone, second"
        in {finding.text.partition(" the first")[0] for finding in judged(different)}.pop()
    )


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([step(gradient=0.0), MOVED], ""),
        ([step(), step()], "no weight moves"),
        ([step()], "no weight moves"),
        ([MOVED], ""),
    ],
)
def test_a_dead_model_shows_nothing(records, text):
    said = why_nothing_is_shown(run(records))
    assert said.startswith(text) and bool(said) == bool(text)
    still = [record | {"gradients": {"first": [1e-9] * 9}} for record in records]
    assert "learns nothing" in why_nothing_is_shown(run(still))


def test_an_export_without_weights_is_named(tmp_path):
    """As Trainer leaves a checkpoint under ZeRO-3 without stage3_gather_16bit_weights_on_save."""
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    assert "no file named model.safetensors" in export_problem(tmp_path, "", [{"weights": {}, "end": {}, "masks": []}])


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_an_adapters_weights_have_the_names_that_peft_saves(options):
    import peft

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = peft.LoraConfig(target_modules=["q_proj"], **options)
    model = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), config)
    trained = {_saved_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == peft.get_peft_model_state_dict(model).keys()


@pytest.mark.parametrize(
    ("line", "status", "largest"),
    [("export reloaded by transformers 5: logits differ by at most 1e-6 (allowed: 1e-3)", "PASS", 1e-6)]
    + [("export not verified", "not judged", None)],
)
def test_an_export_that_nothing_verifies_is_not_judged(line, status, largest, tmp_path):
    """As that of a quantized model."""
    (tmp_path / "log").write_text(f"loading\n{line}\n")
    job, curves = script.ALONE, recipe.Curves([1.0], [1.0], {"w": torch.ones(2)}, first=recipe.STEPS)
    expected = recipe.Curves([1.0] * recipe.STEPS, [1.0] * recipe.STEPS, curves.weights)
    proof = recipe.Proof.__new__(recipe.Proof)
    proof.__dict__.update(
        train=lambda *_, **__: recipe.Outcome(job, tmp_path, tmp_path / "log", curves, {}),
        weights_of=lambda _: curves.weights,
        _judge_rows=lambda *_: None,
        expected=expected,
        start={"w": torch.zeros(2)},
        rounding=Differences(),
    )
    verdict = recipe.Verdict(job)
    proof.judge_resume(verdict, recipe.Outcome(job, tmp_path, tmp_path / "log", curves, {}))
    assert verdict.status("weights") == "PASS"
    assert (verdict.status("export"), verdict.largest.get("export")) == (status, largest)


@pytest.mark.parametrize(
    ("precision", "loss", "norm", "status"),
    [
        ("fp16", 1.0, 1.0, "PASS"),
        ("fp16", 1.0, math.nan, "not judged"),  # the loss scale
        ("fp16", math.nan, math.nan, "FAIL"),
        ("bf16", 1.0, math.nan, "FAIL"),
    ],
)
def test_steps_that_the_loss_scale_skips_are_not_judged(precision, loss, norm, status):
    of_loop = recipe.Curves([1.0, 1.0], [1.0, 1.0])
    seen = {"killed": of_loop, precision: recipe.Curves([loss, 1.0], [norm, 1.0])}
    proof = recipe.Proof.__new__(recipe.Proof)
    proof.__dict__.update(
        train=lambda job, kind, *_, **__: recipe.Outcome(job, Path(), Path(), seen[kind], {}),
        twin=SimpleNamespace(recipe=SimpleNamespace(precision=precision), not_judged=[]),
        _judge_rows=lambda *_: None,
        expected=of_loop,
        rounding=Differences(),
        lower=(of_loop, Differences()),
    )
    for _ in range(2):
        assert proof.judge_start(script.ALONE)[0].status("precision") == status
    assert len(proof.twin.not_judged) == (status == "not judged")


def test_a_script_sees_no_gpu(monkeypatch):
    started: list[dict] = []
    monkeypatch.setattr(script, "processes", lambda *words: started.append(words[-1]) or nullcontext(SimpleNamespace()))
    with script.Processes():
        assert started == [{"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}]


HEADS = [
    (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    (BertConfig, BertForMaskedLM, BertForTokenClassification),
    (BertConfig, BertForPreTraining, BertForMaskedLM),  # the weights of bert-base-cased
]


@pytest.mark.parametrize(("configuration", "of_base", "trained"), HEADS)
def test_a_head_that_another_one_replaces_is_not_missing(tmp_path, configuration, of_base, trained):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = configuration(vocab_size=8, num_labels=1, **sizes)
    of_base(config).save_pretrained(tmp_path / "base")
    trained(config).save_pretrained(tmp_path / "trained")
    record = {"weights": {}, "end": {}, "masks": []}
    assert export_problem(tmp_path / "trained", str(tmp_path / "base"), [record]) == ""
    if of_base is LlamaForCausalLM:
        assert "tensors of trained" in export_problem(tmp_path / "base", str(tmp_path / "trained"), [record])
