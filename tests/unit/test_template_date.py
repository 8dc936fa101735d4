"""The day that a chat template takes for today: part of the run, from its first start on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from saved_state import saved_state, seal

from samecurve.config import loader
from samecurve.errors import ConfigurationError
from samecurve.tasks import registry
from samecurve.training import settle

TODAY = "2024-12-31"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A run of the tests may go on over midnight."""
    monkeypatch.setattr(settle, "date", SimpleNamespace(today=lambda: date.fromisoformat(TODAY)))


@dataclass(frozen=True)
class Planned:
    recipe: Any
    resume: str


@dataclass(frozen=True)
class Started:
    """What settle_date reads of a Context."""

    plan: Planned
    run: Any
    world: Any


def settled(run: Path, *keys: str, resume: str = "auto", on_main=lambda choose: choose(), recipe: str = "sft") -> Any:
    loaded = loader.load_recipe(f"recipes/{recipe}.yaml", list(keys))
    started = Started(
        Planned(loaded, resume), SimpleNamespace(checkpoints=run / "checkpoints"), SimpleNamespace(on_main=on_main)
    )
    return settle.settle_date(cast(Any, started)).plan.recipe


def checkpoint(run: Path, step: int, day: str | None) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "rank_00000.safetensors").write_bytes(b"")
    tokenizer = {"path": None} if day is None else {"template_date": day}
    (folder / "state.json").write_text(json.dumps(saved_state(recipe={"tokenizer": tokenizer})))
    seal(folder)
    return folder


def test_the_first_day_stays(tmp_path):
    assert settled(tmp_path).tokenizer.template_date == TODAY
    newest = checkpoint(tmp_path, 20, "2024-07-26")
    checkpoint(tmp_path, 10, "2024-07-25")
    for resume, day in (("auto", "2024-07-26"), ("none", TODAY), (str(newest), "2024-07-26")):
        assert settled(tmp_path, resume=resume).tokenizer.template_date == day
    for damaged in ("", (newest / "state.json").read_text().replace("07-26", "07-27")):  # which is a day, too
        (newest / "state.json").write_text(damaged)
        assert settled(tmp_path).tokenizer.template_date == "2024-07-25"
    assert settled(tmp_path, "tokenizer.template_date=2020-02-29").tokenizer.template_date == "2020-02-29"


def test_rank_0_has_the_clock(tmp_path):
    assert settled(tmp_path, on_main=lambda choose: "2024-01-01").tokenizer.template_date == "2024-01-01"


def test_only_chats_have_a_day(tmp_path):
    assert settled(tmp_path, recipe="quickstart").tokenizer.template_date is None
    assert settled(tmp_path, recipe="dpo").tokenizer.template_date == TODAY
    plain = ("data.chat=false", f"data.path={tmp_path}", "data.prompt_column=a", "data.completion_column=b")
    assert settled(tmp_path, *plain).tokenizer.template_date is None


@pytest.mark.parametrize("day", ["2024-02-30", "20240226", "today"])
def test_what_is_no_day(day):
    with pytest.raises(ConfigurationError, match=rf"tokenizer.template_date: .*{day}"):
        loader.load_recipe("recipes/sft.yaml", [f"tokenizer.template_date={day}"])


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_day_changes_the_rows_that_write_it(task, tmp_path):
    turns = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    (tmp_path / "plain.jinja").write_text(turns + prompt)
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + turns + prompt)
    answers = {"completion": "a"} if task == "sft" else {"chosen": "a", "rejected": "b"}
    rows = [{"prompt": f"{n}?", **answers} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fingerprint(template: str, day: str) -> str:
        keys = [f"data.path={tmp_path}/rows.jsonl", f"data.cache_dir={tmp_path}", "data.validation_fraction=0"]
        keys += [
            "evaluate.every_steps=0",
            "batch.global_batch_size=4",
            "batch.micro_batch_size=4",
            "data.packing=false",
        ]
        keys += [f"tokenizer.chat_template={tmp_path}/{template}.jinja", f"tokenizer.template_date={day}"]
        keys += ["model.path=null", "model.config={model_type: llama}"] if task == "dpo" else []
        keys += ["tokenizer.vocabulary_size=300"]
        return registry.load_task(loader.load_recipe(f"recipes/{task}.yaml", keys)).train.fingerprint

    days = ("2024-07-26", "2024-07-27")
    assert len({fingerprint("dated", day) for day in days}) == 2
    assert len({fingerprint("plain", day) for day in days}) == 1
