"""The fields that are read from transformers' source, against transformers itself."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from samecurve.config import rules_model_config, transformers_source
from samecurve.config.transformers_source import family, model_types
from samecurve.models import hf_config
from samecurve.specs.model_families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
EVERY_DAY = ["llama", "gpt2", "bert", "qwen3_moe", "mamba2", "gemma3_text", "distilbert"]
# Their classes are not in the folder of their name.
NOT_READ = {"gpt-sw3", "patchtst"}
PROBES = ["text", "", 0, 3, 1.5, True, None, [3], ["a"], {"a": 1}]
UNKNOWN = [
    "num_hiden_layers",
    "rope_theta",
    "rope_scaling",
    "max_length",
    "temperature",
    "num_labels",
    "n_embd",
    "d_model",
]


def refuses(config_class: type, name: str, value: object) -> bool:
    """Whether transformers does, when the field is set."""
    for check in getattr(config_class, "__validators__", {}).get(name, ()):
        try:
            check(value)
        except (TypeError, ValueError):
            return True
    return False


def test_every_family_is_known():
    assert set(model_types()) == set(CONFIG_MAPPING.keys())
    assert not FAMILIES.keys() & NOT_READ


def fields_that_differ(name: str) -> list[str]:
    found, config_class = family(name), CONFIG_MAPPING[name]
    known = {field.name for field in fields(config_class)}
    differ = sorted(known ^ set(found.fields)) + sorted(set(config_class.attribute_map) - set(found.aliases))
    for field in (field for field in fields(config_class) if field.name in found.fields):
        probes = [value for value in PROBES if not found.fields[field.name].accepts(value)]
        differ += [f"{field.name}={value}" for value in probes if not refuses(config_class, field.name, value)]
        default = field.default
        if isinstance(default, (bool, int, float, str, list)):
            differ += [field.name] * (rules_model_config._complaint(found, field.name, default) is not None)
    return differ


def keys_that_transformers_takes(name: str) -> list[str]:
    """Of those that are unknown here; it drops others without a trace, which the later check refuses, too."""
    found = []
    for key in UNKNOWN:
        early = dict(rules_model_config._keys({"model.config": {"model_type": name, key: 1}}.get))
        if "no such key" in early.get(f"model.config.{key}", ""):
            with contextlib.suppress(Exception):  # what has no default config, or refuses the key by itself
                config = CONFIG_MAPPING[name](**{key: 1})
                found += [key] * (not hf_config._unknown({key: 1}, config))
    return found


@pytest.mark.parametrize("name", EVERY_DAY)
def test_nothing_is_refused_that_transformers_takes(name):
    assert (fields_that_differ(name), keys_that_transformers_takes(name)) == ([], [])
    integers = [field.name for field in fields(CONFIG_MAPPING[name]) if field.type is int]
    assert integers
    for key in integers:
        assert not family(name).fields[key].accepts("text") and not family(name).fields[key].accepts(True)


@pytest.mark.full
def test_nothing_is_refused_that_transformers_takes_of_all_families():
    assert {name for name in CONFIG_MAPPING if family(name) is None} <= NOT_READ
    wrong = {
        name: (fields_that_differ(name), keys_that_transformers_takes(name)) for name in CONFIG_MAPPING if family(name)
    }
    assert {name: found for name, found in wrong.items() if any(found)} == {}


def test_infinity_in_a_list_may_be_meant():
    given = {"model_type": "mamba2", "time_step_limit": [0.0, math.inf], "initializer_range": math.inf}
    assert [key for key, _ in rules_model_config._numbers({"model.config": given}.get)] == [
        "model.config.initializer_range"
    ]


def test_without_its_source_the_later_check_remains(monkeypatch):
    for cached in (transformers_source.model_types, transformers_source.family):
        cached.cache_clear()
    monkeypatch.setattr(transformers_source, "_root", lambda: Path("/nowhere"))
    value = {"model.config": {"model_type": "llama", "num_hiden_layers": 1}}.get
    assert [*rules_model_config._known_family(value), *rules_model_config._keys(value)] == []
    for cached in (transformers_source.model_types, transformers_source.family):
        cached.cache_clear()


def test_it_loads_nothing_and_takes_no_time():
    code = """
import sys, time
from samecurve.config.transformers_source import family
began = time.process_time()
assert "hidden_size" in family("llama").fields
assert time.process_time() - began < 0.5, time.process_time() - began
assert not {"transformers", "torch", "huggingface_hub", "numpy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
