"""What a machine lacks for a strategy: faked machines in a table, and the trial build against the real compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace

import pytest

from samecurve.config import loader
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError, StorageError
from samecurve.specs import environment
from samecurve.strategy import preflight
from samecurve.strategy.plan import Strategy

NOTHING: tuple[str, ...] = ()
STRATEGIES: dict[str, dict] = {
    "ddp": {},
    "fsdp": {"sharding": "fsdp"},
    "zero": {"backend": "deepspeed", "deepspeed": {}},
    "pipeline": {"backend": "deepspeed", "deepspeed": {}, "schedule": "deepspeed"},
}


def strategy(family: str, offload: tuple[str, ...] = NOTHING, nvme_path: str = gettempdir(), world_size: int = 2):
    nvme_paths = tuple(Path(nvme_path) for target in offload if target.endswith(":nvme"))
    facts = STRATEGIES[family] | {"offload": offload, "world_size": world_size, "nvme_paths": nvme_paths}
    return Strategy(name="probed", distributed=True, **facts)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with the named executables, with or without libaio and an accelerator. Returns its environment."""

    def build(executables: str = "ninja c++", libaio: bool = True, accelerator: bool = False) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in executables.split():
            (folder / name).touch(mode=0o755)
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        monkeypatch.setenv("PATH", os.environ["PATH"])  # put back afterwards
        monkeypatch.setattr(preflight, "has_accelerator", lambda environ: accelerator)
        monkeypatch.setattr(preflight, "links_libaio", lambda compiler, environ: libaio)
        monkeypatch.setattr(preflight, "_cuda_toolkit", lambda environ, search: False)
        monkeypatch.setattr(preflight, "prebuilt_operators", set)
        return {"PATH": str(folder)}

    return build


CPU_OFFLOAD, NVME = ("optimizer:cpu", "param:cpu"), ("optimizer:nvme", "param:nvme")
CASES = [
    ("a complete machine", strategy("zero", NVME), {}, "fp32", NOTHING),
    ("ddp needs nothing", strategy("ddp"), {"executables": ""}, "fp32", NOTHING),
    ("fsdp needs nothing", strategy("fsdp"), {"executables": ""}, "bf16", NOTHING),
    ("zero without offload", strategy("zero"), {"executables": ""}, "fp32", NOTHING),
    ("pipeline", strategy("pipeline"), {"executables": ""}, "fp32", NOTHING),
    (
        "offload with torch's AdamW",
        replace(strategy("zero", CPU_OFFLOAD), deepspeed={"zero_force_ds_cpu_optimizer": False}),
        {"executables": ""},
        "fp32",
        NOTHING,
    ),
    (
        "no tools at all",
        strategy("zero", CPU_OFFLOAD),
        {"executables": ""},
        "fp32",
        ("pip install ninja", "apt-get install g++"),
    ),
    ("no ninja", strategy("zero", CPU_OFFLOAD), {"executables": "c++"}, "fp32", ("compiles cpu_adam on first use",)),
    (
        "optimizer offload on a GPU",
        strategy("zero", ("optimizer:cpu",)),
        {"executables": "ninja", "accelerator": True},
        "fp16",
        ("compiles cpu_adam on first use, but the C++ compiler 'c++' is not on PATH",),
    ),
    (
        "weight offload on a GPU",
        strategy("zero", ("param:cpu",)),
        {"executables": "", "accelerator": True},
        "bf16",
        NOTHING,
    ),
    ("nvme without libaio", strategy("zero", NVME), {"libaio": False}, "fp32", ("apt-get install libaio-dev",)),
    ("nvme on a GPU", strategy("zero", NVME), {"accelerator": True}, "bf16", ("set CUDA_HOME",)),
    ("fsdp_offload on a CPU", strategy("fsdp", CPU_OFFLOAD), {"executables": ""}, "fp32", ("pinned memory",)),
    ("fsdp_offload on a GPU", strategy("fsdp", CPU_OFFLOAD), {"executables": "", "accelerator": True}, "bf16", NOTHING),
    ("fp16 zero on a GPU", strategy("zero"), {"accelerator": True}, "fp16", NOTHING),
    ("fp16 zero on a CPU", strategy("zero"), {}, "fp16", ("set precision to bf16 or fp32",)),
]


@pytest.mark.parametrize("asked, lacks, precision, expected", [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_what_is_missing(machine, asked, lacks, precision, expected):
    found = preflight.environment_problems(asked, precision, machine(**lacks))
    assert len(found) == len(expected), found
    for line, text in zip(found, expected, strict=True):
        assert line.startswith("strategy probed: ") and text in line


def plain_recipe(precision: str) -> Recipe:
    return loader.load_recipe("recipes/quickstart.yaml", [f"precision={precision}"])


def test_check_raises_all_of_it_and_changes_nothing(machine, monkeypatch):
    environ = machine("")
    monkeypatch.setenv("PATH", "/nowhere")
    plan = SimpleNamespace(strategy=strategy("zero", CPU_OFFLOAD), recipe=plain_recipe(precision="fp16"))
    with pytest.raises(ConfigurationError) as error:
        preflight.check_machine(plan, environ)
    header, *lines = str(error.value).splitlines()
    assert header == "this machine cannot run the strategy"
    assert [line[:19] for line in lines] == ["  strategy probed: "] * 3
    plan.strategy = strategy("ddp")
    preflight.check_machine(plan, environ)
    assert os.environ["PATH"] == "/nowhere"


def test_a_compiler_named_in_the_environment_is_the_one_looked_for(machine):
    environ = machine("ninja clang++") | {"CXX": "clang++ -O1"}
    assert preflight.environment_problems(strategy("zero", CPU_OFFLOAD), "fp32", environ) == []


def test_operators_built_with_deepspeed_need_no_compiler(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "git_version_info_installed.py").write_text(
        "version='0'\ninstalled_ops={'cpu_adam': True, 'async_io': False}\n"
    )
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: spec)
    assert preflight.prebuilt_operators() == {"cpu_adam"}
    monkeypatch.setattr(preflight, "has_accelerator", lambda environ: True)
    assert preflight.environment_problems(strategy("zero", CPU_OFFLOAD), "bf16", {"PATH": str(tmp_path)}) == []


def test_swap_folder_must_be_a_writable_folder_with_room(machine, tmp_path, monkeypatch):
    environ = machine()
    swap = strategy("zero", NVME, str(tmp_path / "made_later"))
    assert preflight.environment_problems(swap, "bf16", environ) == []
    [line] = preflight.environment_problems(strategy("zero", NVME, str(tmp_path / "no" / "swap")), "bf16", environ)
    assert f"no such folder: {tmp_path / 'no'}; create it" in line
    monkeypatch.chdir(tmp_path)
    assert preflight.environment_problems(strategy("zero", NVME, "here"), "bf16", environ) == []
    a_file = tmp_path / "file"
    a_file.touch()
    [line] = preflight.environment_problems(strategy("zero", NVME, str(a_file / "swap")), "bf16", environ)
    assert f"{a_file} is a file" in line
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    [line] = preflight.environment_problems(swap, "bf16", environ)
    assert "is not writable" in line


def test_room_is_judged_by_the_ranks_on_this_machine(tmp_path, monkeypatch):
    swap = strategy("zero", NVME, str(tmp_path / "later"), world_size=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {tmp_path: SimpleNamespace(free=int(17e9))}[path])
    with pytest.raises(StorageError, match="17.0 GB are free.* need 18.0 GB"):
        preflight.check_room(swap, 10**9, {})
    preflight.check_room(swap, 10**9, {"LOCAL_WORLD_SIZE": "2"})
    preflight.check_room(strategy("zero"), 10**15, {})


def test_an_accelerator_is_seen_by_its_device_file_unless_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "version", lambda package: "2.13.0")
    assert not preflight.has_accelerator({}, tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not preflight.has_accelerator({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert preflight.has_accelerator({}, tmp_path)
    assert preflight.has_accelerator({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert not preflight.has_accelerator({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "kfd").touch()  # of an AMD processor's graphics, which a CUDA build does not use
    assert not preflight.has_accelerator({}, tmp_path)
    monkeypatch.setattr(environment, "version", lambda package: "2.13.0+rocm7.0")
    assert preflight.has_accelerator({}, tmp_path)
    monkeypatch.setattr(environment, "version", lambda package: "2.13.0+cpu")
    assert not preflight.has_accelerator({}, tmp_path)


def test_own_bin_folder_comes_first_on_path_and_once(monkeypatch):
    own = str(Path(sys.executable).parent)
    for before in ("/usr/bin", f"/usr/bin{os.pathsep}{own}", f"{own}{os.pathsep}/usr/bin"):
        monkeypatch.setenv("PATH", before)
        preflight.prepare_environment()
        assert os.environ["PATH"].split(os.pathsep) == [own, "/usr/bin"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_trial_build_agrees_with_the_header(tmp_path):
    """With an include path that shadows libaio.h by an empty file, the build must fail."""
    (tmp_path / "libaio.h").write_text("#error shadowed\n")
    assert not preflight.links_libaio(["c++"], {**os.environ, "CPATH": str(tmp_path)})
    if Path("/usr/include/libaio.h").exists():
        assert preflight.links_libaio(["c++"], os.environ)


def test_a_toolkit_is_its_compiler(tmp_path):
    """An image for running programs has the folder without nvcc."""
    folders = {"CUDA_HOME": str(tmp_path)}
    assert not preflight._cuda_toolkit(folders, "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert preflight._cuda_toolkit(folders, "")


def test_headers_are_where_python_was_built(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert not environment.has_python_headers()
    (tmp_path / "Python.h").touch()
    assert environment.has_python_headers()


def test_preflight_does_not_load_torch():
    code = "import samecurve.strategy.preflight, sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "accelerate", "deepspeed", "transformers"} & set(modules)


GROW = "expandable_segments:True"
SET = [
    ("an NVIDIA GPU", ["nvidia0"], True, {}, {"PYTORCH_ALLOC_CONF": GROW}),
    ("no GPU", [], False, {}, {}),
    ("a hidden GPU", ["nvidia0"], False, {}, {}),
    ("AMD's", ["kfd"], True, {}, {}),
    (
        "the user's",
        ["nvidia0"],
        True,
        {"PYTORCH_ALLOC_CONF": "backend:native"},
        {"PYTORCH_ALLOC_CONF": "backend:native"},
    ),
    ("by its old name", ["nvidia0"], True, {"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
]


@pytest.mark.parametrize(("devices", "found", "before", "after"), [case[1:] for case in SET], ids=[c[0] for c in SET])
def test_settings_of_the_allocator(devices, found, before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_accelerator", lambda environ: found)
    for name in devices:
        (tmp_path / name).touch()
    environ = dict(before)
    preflight.prepare_allocator(environ, tmp_path)
    assert environ == after
    assert preflight.allocator_settings(environ) == ", ".join(f"{text} ({name})" for name, text in after.items())
