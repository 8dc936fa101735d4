from __future__ import annotations

import copy

import pytest

from samecurve.checkpoint.resume import CheckpointSelector, changes, comparable, refusals, without_effect
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import CheckpointError
from samecurve.storage.filesystem import LocalFileSystem, next_free

SAVED = {
    "step": 40,
    "recipe": {"task": "pretrain", "seed": 0, "steps": 100, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
    "model": {"hidden_size": 8, "rope": {"theta": 1.0}},
    "data": {"rows": "abc", "vocabulary_size": 300},
    "strategy": "ddp",
    "world_size": 2,
    "versions": {"torch": "2.13.0"},
}


def now(**changed) -> dict:
    content = copy.deepcopy(SAVED)
    for dotted, value in changed.items():
        *path, last = dotted.split("__")
        block = content
        for key in path:
            block = block[key]
        block[last] = value
    return content


OF_FILE = {"optimizer.learning_rate": "z.json:3", "steps": "z.json:4", "batch.micro_batch_size": "z.json:1"}
ARGUMENTS = (
    "add them, optimizer.learning_rate=0.001 steps=100, or the defaults, optimizer.learning_rate=0.0003 steps=1000"
)


def test_values_of_an_earlier_strategys_file_are_not_lost():
    before = now(from_strategy=OF_FILE, recipe__batch={"micro_batch_size": 4})
    after = now(recipe__optimizer__learning_rate=3e-4, recipe__steps=1000, recipe__batch={"micro_batch_size": 1})
    (reason,) = refusals(before, {**after, "given": ["task"]})
    assert reason.endswith(ARGUMENTS)
    given = {**after, "given": ["epochs"], "from_strategy": {"optimizer.learning_rate": "other.json:3"}}
    assert refusals(before, given) == []
    assert refusals(before, now(from_strategy=OF_FILE)) == []


def test_metrics_of_other_validation_rows_are_not_compared():
    before = {**SAVED, "evaluation": "abc", "record": {"loss": 2.0, "eval_loss": 1.0}, "stopping": {"value": 1.0}}
    assert comparable(before, {**SAVED, "evaluation": "abc"}) == before
    other = {**SAVED, "evaluation": "def"}
    assert comparable(before, other) == {**before, "record": {"loss": 2.0}, "stopping": {}}
    (line,) = changes(before, other)
    assert line.startswith("evaluation: ") and refusals(before, other) == []


def test_nothing_changed():
    assert refusals(SAVED, now()) == changes(SAVED, now()) == []


def test_what_may_change_is_told():
    after = now(recipe__steps=50, recipe__optimizer__learning_rate=1e-4, strategy="fsdp", world_size=4)
    assert refusals(SAVED, after) == []
    assert changes(SAVED, after) == [
        "optimizer.learning_rate: 0.001 -> 0.0001",
        "steps: 100 -> 50",
        "strategy: ddp -> fsdp",
        "world_size: 2 -> 4",
    ]


def test_changed_code_of_the_users_own_is_told():
    before, after = now(own_code={"mine:Task": "abc"}), now(own_code={"mine:Task": "def"})
    assert refusals(before, after) == []
    assert changes(before, after) == ["own_code.mine:Task: abc -> def"]
    assert changes(SAVED, after) == ["own_code.mine:Task: unknown then -> def"]


def test_a_key_that_the_checkpoint_lacks_is_not_called_null():
    after = now(recipe__optimizer__momentum=0.9)
    assert changes(SAVED, after) == ["optimizer.momentum: unknown then -> 0.9"]
    assert changes(now(recipe__optimizer__momentum=None), after) == ["optimizer.momentum: null -> 0.9"]


def test_a_version_is_told():
    assert changes(SAVED, now(versions__torch="2.14.0")) == ["versions.torch: 2.13.0 -> 2.14.0"]


def test_a_field_that_another_version_of_transformers_added_is_told():
    after = now(model__new_default=False)
    assert refusals(SAVED, after) == []
    assert changes(SAVED, after) == ["model.new_default: known to only one of the two versions of transformers"]


def test_another_reference_is_refused():
    before = now(reference="abc")
    assert refusals(before, now(reference="abc")) == refusals(SAVED, now(reference=None)) == []
    (told,) = refusals(before, now(reference="xyz"))
    assert told.startswith("model.path: the run's loss uses its initial weights as reference")


def test_another_optimizer_is_refused():
    assert refusals(SAVED, now(recipe__optimizer__name="lion")) == ["optimizer.name: adamw -> lion"]
    before = now(recipe__optimizer__bf16_rounding="stochastic")
    told = refusals(before, now(recipe__optimizer__bf16_rounding="kahan"))
    assert told == ["optimizer.bf16_rounding: stochastic -> kahan"]


def test_another_queue_is_refused_unless_the_checkpoint_is_older_than_the_key():
    before = now(recipe__embed={"queue": 16})
    assert refusals(before, now(recipe__embed={"queue": 24})) == ["embed.queue: 16 -> 24"]
    assert refusals(now(recipe__embed={}), now(recipe__embed={"queue": 0})) == []


def test_what_may_not_change_is_refused_all_at_once():
    after = now(recipe__seed=1, model__rope__theta=2.0, data__rows="xyz", recipe__steps=30)
    assert refusals(SAVED, after) == [
        "seed: 0 -> 1",
        "model.rope.theta: 1.0 -> 2.0",
        "other rows: the content of the data, or of the tokenizer, has changed",
        "steps: 30, but the checkpoint already is at step 40",
    ]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"data": {"path": "b.jsonl"}}, "other rows: data.path: a.jsonl -> b.jsonl"),
        ({"data": {"path": "a.jsonl"}}, "other rows: the content of a.jsonl, or of the tokenizer, has changed"),
        (
            {"data": {"path": "a.jsonl", "num_workers": 2}, "batch": {"sequence_length": 64}},
            "other rows: batch.sequence_length: 32 -> 64",
        ),
    ],
)
def test_other_rows_are_named_not_hashed(changed, reason):
    recipe = SAVED["recipe"] | {"data": {"path": "a.jsonl"}, "batch": {"sequence_length": 32}}
    after = now(recipe=recipe | changed, data__rows="xyz")
    assert refusals(now(recipe=recipe), after) == [reason]


def test_changes_without_a_step_left():
    after = now(recipe__optimizer__learning_rate=1e-2, recipe__optimizer__momentum=0.9, recipe__steps=40, strategy="tp")
    assert without_effect(SAVED, after) == ["optimizer.learning_rate 0.001 -> 0.01"]
    assert without_effect(SAVED, now(recipe__export={"verify": "off"}, recipe__output_dir="runs/y")) == []


@pytest.mark.parametrize(
    ("name", "there", "free"), [("lora", "", "lora-2"), ("lora", "lora-2", "lora-3"), ("lora-2", "lora-2", "lora-3")]
)
def test_the_first_free_folder(name, there, free, tmp_path):
    (tmp_path / there).mkdir(exist_ok=True)
    assert next_free(tmp_path / name) == tmp_path / free


def test_a_damaged_checkpoint_that_was_named_says_nothing_about_its_neighbours(tmp_path):
    named = tmp_path / "step_00000002"
    named.mkdir()
    selector = CheckpointSelector(tmp_path, {}, ControlGroup(), print, LocalFileSystem())
    for resume, said in (
        (str(named), f"{named} cannot be used; "),
        ("auto", f"no checkpoint in {tmp_path} can be used; "),
    ):
        with pytest.raises(CheckpointError) as caught:
            selector.select(resume)
        assert str(caught.value).startswith(said)
