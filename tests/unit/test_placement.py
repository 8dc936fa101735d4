"""How many processes each strategy of the repository is given, and what is suggested after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samecurve.strategy import placement

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
ASKED = (1, 2, 3, 8)
GIVEN = {
    "single": (1, 1, 1, 1),
    "hsdp": (4, 4, 4, 8),
    "tp": (2, 2, 2, 2),
    "fsdp_tp": (4, 4, 4, 8),
    "fsdp_ulysses": (2, 2, 4, 8),
    "fsdp_cp": (2, 2, 4, 8),
    "fsdp_ep": (2, 2, 4, 8),
    "fsdp_ep_tp": (4, 4, 4, 8),
    "zero3_hpz": (4, 4, 4, 8),
    "pp_fsdp_tp": (8, 8, 8, 8),
    "fsdp_tp_cp": (4, 4, 4, 8),
    "pipeline": (2, 2, 4, 8),
    **dict.fromkeys((name for name in STRATEGIES if name.startswith("pipeline_")), (2, 2, 4, 8)),
    "pipeline_fsdp": (4, 4, 4, 8),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_processes(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = [placement.place_strategy(STRATEGIES[name], asked) for asked in ASKED]
    assert tuple(each.world_size for each in given) == GIVEN.get(name, ASKED)
    assert {each.path for each in given} == {None if name == "single" else STRATEGIES[name]}


def test_the_table_is_about_files_that_exist():
    assert {*GIVEN, placement.REFERENCE} < set(STRATEGIES)


def test_a_broken_file_is_left_to_the_run(tmp_path):
    broken = tmp_path / "x.yaml"
    broken.write_text("distributed_type: FSDP\nparallelism_config: [1")
    assert placement.place_strategy(broken, 3) == placement.Placement(broken, 3)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_another_strategy_is_another_one(name):
    assert placement.another_strategy(name) in set(STRATEGIES) - {name, name.partition("_")[0]}


@pytest.mark.parametrize(("world_size", "gpu", "again"), [(4, False, 4), (1, True, 1), (1, False, None)])
def test_processes_of_the_next_run(world_size, gpu, again, monkeypatch):
    monkeypatch.setattr(placement, "has_accelerator", lambda: gpu)
    assert placement.num_processes_again(world_size) == again


def test_nothing_heavy_is_loaded():
    heavy = "{'torch', 'transformers', 'accelerate', 'deepspeed'} & sys.modules.keys()"
    code = f"import sys, samecurve.strategy.placement; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
