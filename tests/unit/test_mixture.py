from __future__ import annotations

import json
import random
from fractions import Fraction

import numpy as np
import pytest
from tiny_recipes import jsonl, recipe_file

from samecurve.checkpoint.resume import refusals
from samecurve.config import loader
from samecurve.config.schema import Batch
from samecurve.data import token_store
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.data.datasets.base import PackedRows
from samecurve.data.datasets.mixture import MixedRows, WeightedInterleaver
from samecurve.errors import ConfigurationError, DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.tasks import registry


def bound(num_sources: int) -> float:
    return (1 + sum(1 / j for j in range(1, num_sources))) / 2


def test_turns_worked_out_by_hand():
    """round(0.75 n) = 0, 1, 2, 2, 3, 4, 5, 5, 6: the first source has the turns 0, 1, 3, 4, 5, 7."""
    sources, counts = WeightedInterleaver([0.75, 0.25]).at(np.arange(8))
    assert sources.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert counts.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]


def test_turns_are_pinned():
    """A change of these numbers changes what every mixture's run reads, and breaks going on from an older one."""
    assert WeightedInterleaver([1, 5, 2]).at(np.arange(16))[0].tolist() == [
        1,
        2,
        1,
        1,
        0,
        1,
        2,
        1,
        1,
        2,
        1,
        1,
        0,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_most_turns_in_a_step_are_what_the_worst_step_takes(seed):
    """More than the share rounded up, in some steps: a source of that many rows would give one of them twice."""
    draw = random.Random(seed)
    weights = [draw.randint(1, 9) for _ in range(draw.randint(2, 4))]
    size, turns = draw.randint(2, 12), WeightedInterleaver(weights)
    sources, _ = turns.at(np.arange(4000))
    for source in range(len(weights)):
        worst = np.convolve(sources == source, np.ones(size, dtype=int), "valid").max()
        assert worst <= turns.most(source, size) <= worst + (len(weights) > 2), (weights, size, source)


@pytest.mark.parametrize("seed", range(20))
def test_random_weights_keep_their_proportions_everywhere(seed):
    """In any window each source has its share up to twice the bound of a prefix, and its count goes up one by one."""
    draw = random.Random(seed)
    weights = [round(10 ** draw.uniform(-3, 3), draw.randint(2, 6)) + 1e-6 for _ in range(draw.randint(1, 12))]
    start = draw.choice([0, draw.randrange(10**4), draw.randrange(10**12)])
    turns = WeightedInterleaver(weights)
    positions = np.arange(start, start + 3000)
    sources, counts = turns.at(positions)
    exact = [Fraction(str(weight)) for weight in weights]
    for source, weight in enumerate(exact):
        share = weight / sum(exact)
        own = counts[sources == source]
        assert np.array_equal(own, np.arange(len(own)) + (own[0] if len(own) else 0))
        had = np.concatenate([[0], np.cumsum(sources == source)])
        before = int(own[0]) if len(own) else None
        for length in (1, 7, 100, 2999, 3000):
            assert abs(had[length] - length * share) <= 2 * bound(len(weights))
            if before is not None:
                assert abs(before + had[length] - (start + length) * share) <= bound(len(weights)) + 1e-3


def test_a_turn_depends_on_its_position_alone():
    turns = WeightedInterleaver([3, 1, 0.5, 0.123456])
    positions = np.random.default_rng(0).permutation(np.arange(10**9, 10**9 + 500))
    sources, counts = turns.at(positions)
    for place in (0, 77, 499):
        source, count = turns.at(positions[place : place + 1])
        assert (source[0], count[0]) == (sources[place], counts[place])


def make_rows(num_tokens: int, first: int, length: int = 4) -> PackedRows:
    stream = token_store.TokenStream(np.arange(first, first + num_tokens), np.array([0, num_tokens]), f"{first}")
    return PackedRows(stream, length, padding_token=0)


def test_each_source_reads_its_rows_once_per_epoch_of_its_own():
    parts = [make_rows(4 * 50 + 1, 1000), make_rows(4 * 7 + 1, 5000), make_rows(4 * 20 + 1, 9000)]
    rows = MixedRows(parts, [5, 2, 1])
    assert len(rows) == 77
    indices = rows.at_positions(np.arange(400), seed=4)
    by_step = [rows.at_positions(np.arange(start, start + 8), seed=4) for start in range(0, 400, 8)]
    assert np.array_equal(np.concatenate(by_step), indices)
    for start, size, share in ((0, 50, 5 / 8), (50, 7, 2 / 8), (57, 20, 1 / 8)):
        own = indices[(indices >= start) & (indices < start + size)] - start
        assert abs(len(own) - 400 * share) <= 1
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    shuffled = indices[(indices >= 50) & (indices < 57)][:7]
    assert shuffled.tolist() != sorted(shuffled.tolist())


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 80))])
def test_no_step_reads_a_row_of_any_source_twice(seed):
    """Sources of many sizes, from what a step takes of them at most; the last session has another batch size."""
    draw = random.Random(seed)
    weights = [round(10 ** draw.uniform(-1.5, 1.5), 3) + 1e-3 for _ in range(draw.randint(2, 5))]
    size, turns = draw.choice([4, 12, 32]), WeightedInterleaver(weights)
    num_steps = 200
    sources, _ = turns.at(np.arange(num_steps * size))
    taken = np.stack([(sources == source).reshape(-1, size).sum(axis=1) for source in range(len(weights))])
    sizes = [int(most) + draw.choice([0, 1, 1, 2, most // 2, 2 * most, 40]) + (most == 0) for most in taken.max(axis=1)]
    rows = MixedRows([make_rows(4 * num + 1, 1000 * nth) for nth, num in enumerate(sizes)], weights)
    assert [len(part) for part in rows.parts] == sizes
    batch = Batch(global_batch_size=size, micro_batch_size=1, sequence_length=4)
    first = StepBatches(rows, seed, batch, (0, 1), 150)
    first.step = 150
    other = Batch(global_batch_size=size // 2, micro_batch_size=1, sequence_length=4)
    second = StepBatches(rows, seed, other, (0, 1), 250, 150, first.samples, first.anchor)
    steps = [first.rows_of(step) for step in range(150)] + [second.rows_of(step) for step in range(150, 250)]
    assert all(len(set(step.tolist())) == len(step) for step in steps)
    read, start = np.concatenate(steps), 0
    for num in sizes:
        own = read[(read >= start) & (read < start + num)] - start
        for begin in range(0, len(own) - num + 1, num):
            assert len(set(own[begin : begin + num].tolist())) == num
        start += num
    second.step = 170
    third = StepBatches(rows, seed, other, (0, 1), 250, 170, second.samples, second.anchor)
    assert np.array_equal(second.rows_of(170), third.rows_of(170))


def test_where_a_turn_is_found_again():
    turns = WeightedInterleaver([3, 1, 0.5, 0.0123])
    sources, counts = turns.at(np.arange(3000))
    for position in (0, 1, 77, 1234, 2999):
        source, count = int(sources[position]), int(counts[position])
        assert turns.position(source, count) == position
        assert (turns.before(source, position), turns.before(source, position + 1)) == (count, count + 1)


def test_rows_come_from_the_source_that_their_index_says():
    parts = [make_rows(41, 1000), make_rows(21, 5000), make_rows(0, 0), make_rows(81, 9000)]
    rows = MixedRows(parts, [1, 1, 1, 1])
    indices = np.array([14, 0, 9, 10, 33, 34 - 1, 3])
    found = rows[indices]
    firsts = [9000, 1000, 1036, 5000, 9076, 9076, 1012]
    assert found.inputs["input_ids"][:, 0].tolist()[1:4] == firsts[1:4]
    assert found.inputs["input_ids"][0, 0] == 5000 + 16 and found.inputs["input_ids"][4, 0] == 9000 + 18 * 4
    assert rows.num_inputs(indices) == 7 * 4
    assert rows.num_targets == 40 + 20 - 1 + 1 + 80 if len(parts[2]) else 40 + 20 + 80


@pytest.fixture
def folder(tmp_path):
    """Three sources of different size, one of them with another column."""
    draw = random.Random(1)
    for name, column, count in (("a", "text", 60), ("b", "body", 25), ("c", "text", 40)):
        texts = (" ".join(f"{name}{draw.randrange(30)}" for _ in range(draw.randint(5, 40))) for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return tmp_path


def checked(folder, weights=(0.6, 0.3, 0.1), *overrides):
    parts = [
        {"path": str(folder / f"{name}.jsonl"), "weight": weight} for name, weight in zip("abc", weights, strict=True)
    ]
    parts[1]["text_column"] = "body"
    blocks = {"tokenizer": {"vocabulary_size": 300}, "batch": {"global_batch_size": 8, "sequence_length": 32}}
    blocks |= {"data": {"validation_fraction": 0.15, "mixture": parts}, "evaluate": {"every_steps": 10}}
    file = recipe_file(folder, None, "pretrain", steps=20, schedule={"warmup_steps": 2}, **blocks)
    return loader.load_recipe(file, overrides)


@pytest.mark.parametrize("packing", [True, False])
def test_all_worlds_read_the_same_rows(folder, packing):
    found = checked(folder, (0.6, 0.3, 0.1), f"data.packing={str(packing).lower()}")
    task = registry.load_task(found)
    orders = []
    for world in (1, 2, 4):
        ranks = [StepBatches(task.train, 5, found.batch, (rank, world), 20) for rank in range(world)]
        orders.append([m.inputs["input_ids"].tolist() for step in range(20) for rank in ranks for m in rank.at(step)])
    assert orders[0] == orders[1] == orders[2]
    going_on = StepBatches(task.train, 5, found.batch, (0, 1), 20, start_step=13)
    assert [m.inputs["input_ids"].tolist() for m in next(iter(going_on))] == orders[0][13 * 8 : 14 * 8]


def test_the_held_out_rows_are_evaluated_once_and_never_trained_on(folder):
    task = registry.load_task(checked(folder))
    batches = EvaluationBatches(task.validation, 4, (0, 1))
    assert sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches) == task.validation.num_targets
    described = task.describe()
    assert described["train"]["documents"] + described["held_out"]["documents"] == 125
    kept = task.tokenizer.decode(np.concatenate([part.stream.tokens for part in task.train.parts]).tolist())
    for part in task.validation.parts:
        for start, end in zip(part.stream.offsets[:-1], part.stream.offsets[1:], strict=True):
            assert task.tokenizer.decode(part.stream.tokens[start:end].tolist()) not in kept


def test_run_json_says_what_each_source_gives(folder):
    described = registry.load_task(checked(folder)).describe()
    sources = [described[f"source {index}"] for index in range(3)]
    assert [source["weight"] for source in sources] == pytest.approx([0.6, 0.3, 0.1])
    assert [source["path"] for source in sources] == [str(folder / f"{name}.jsonl") for name in "abc"]
    assert sum(source["tokens"] for source in sources) == described["train"]["tokens"]
    assert sources[1]["epochs"] == pytest.approx(20 * 8 * 0.3 / sources[1]["rows"])


def test_another_weight_is_another_data_set_and_tokenises_nothing(folder, monkeypatch):
    before = registry.load_task(checked(folder)).train

    def refuse(*_, **__):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(token_store, "_write", refuse)
    assert registry.load_task(checked(folder, (6, 3, 1))).train.fingerprint == before.fingerprint
    after = registry.load_task(checked(folder, (0.5, 0.4, 0.1))).train
    assert after.fingerprint != before.fingerprint
    saved = {"step": 1, "recipe": {"steps": 20}, "model": {}, "data": {"shares": list(before.shares)}}
    now = {**saved, "data": {"shares": list(after.shares)}}
    assert refusals(saved, now) == ["data, changed since the checkpoint: shares: [0.6, 0.3, 0.1] -> [0.5, 0.4, 0.1]"]


def test_all_sources_are_told_about_together(folder):
    trained = registry.load_task(checked(folder)).tokenizer
    trained.save_pretrained(folder / "tokenizer")
    (folder / "a.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    (folder / "b.jsonl").write_text("{\n")
    with pytest.raises(DataError) as caught:
        registry.load_task(checked(folder, (6, 3, 1), f"tokenizer={{path: {folder / 'tokenizer'}}}"))
    first, second = str(caught.value).splitlines()
    assert "a.jsonl:2" in first and "b.jsonl:" in second


def test_a_source_with_less_than_a_batch_takes(folder):
    (folder / "b.jsonl").write_text('{"body": "short"}\n')
    (folder / "c.jsonl").write_text((folder / "a.jsonl").read_text())
    with pytest.raises(DataError) as caught:
        registry.load_task(checked(folder, (6, 3, 1), "data.validation_fraction=0", "evaluate.every_steps=0"))
    small, twice = str(caught.value).splitlines()
    assert small.startswith(f"data.mixture.1: {folder / 'b.jsonl'}: 1 training rows of batch.sequence_length=32 are")
    assert "fewer than the 3 that its weight takes of a global batch of 8" in small
    assert twice.startswith(
        f"data.mixture.2: {folder / 'c.jsonl'} has the same data as data.mixture.0; keep one of the"
    )


def test_the_place_of_a_mistake_is_its_line(folder):
    file = folder / "lines.yaml"
    file.write_text(
        "base: recipe.yaml\ndata:\n  mixture:\n    - {path: a, weight: 1}\n    - path: b\n      weight: -2\n"
    )
    checked(folder)
    with pytest.raises(ConfigurationError) as caught:
        loader.load_recipe(str(file))
    assert "lines.yaml:6: data.mixture.1.weight: found -2, expected a number above 0" in str(caught.value)


def test_conversations_are_mixed_too(tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(30)]
    turns = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(30)]
    other = [{"messages": messages} for messages in turns]
    files = [jsonl(tmp_path / f"{name}.jsonl", *found) for name, found in (("a", rows), ("b", other))]
    data = {"mixture": [{"path": str(file), "weight": 1} for file in files], "packing": False}
    batch = {"global_batch_size": 4}
    task = registry.load_task(loader.load_recipe(recipe_file(tmp_path, None, steps=5, data=data, batch=batch)))
    assert len(task.train) == 60
    assert {int(index) // 30 for index in task.train.at_positions(np.arange(2), 0)} == {0, 1}
