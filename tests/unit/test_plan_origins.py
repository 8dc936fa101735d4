"""Origins of the planner's constants: in `plan --json`, and in one line of its text."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_plan_cluster import FILE

from samecurve.cli.commands import main
from samecurve.planner import cluster, hardware, memory, plan_text
from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import KINDS, built_in, read_cluster
from samecurve.planner.hardware import ASSUMED, CALIBRATED, DATA_SHEET, MEASURED, Constant
from samecurve.planner.hardware import FILE as OF_FILE

MODEL = "benchmarks/planner/llama_8b.json"
# Exact numbers, which need no origin: units, bytes of a format, counts that follow from an algorithm, thresholds.
EXACT = {
    "hardware": {"_GATHER"},
    "links": {"SMALLEST", "_BUS"},
    "kernels": {"BACKWARD_ATTENTION", "ALIGNED"},
    "step_time": {"GRADIENT_BYTES", "ZERO_BUBBLE_SHARE", "UPDATE_BYTES"},
    "activations": {"NORMS", "PRODUCT_INPUTS", "HEAD_NORM", "POST_NORM", "LAST_NORM"},
    "tensor_lines": {"FULL_LOSS"},
    "memory": {"STATES", "SUMS"},
    "answers": {"ONE_NODE", "LARGE", "SHOWN", "USUAL_HEAD", "USUAL_VOCABULARY"},
    "search": {"CONTEXT_SIZES", "LEAST_CONTEXT", "LONGEST_PIPELINE"},
}


def numbers(value: Any) -> Iterator[float]:
    """Generate the numbers in nested containers and dataclasses."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        value = tuple(getattr(value, each.name) for each in fields(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def without_origin(module: ModuleType) -> set[str]:
    """Name the constants that a module assigns, and does not import, whose numbers have no origin."""
    assert module.__file__
    assigned = [each for each in ast.parse(Path(module.__file__).read_text()).body if isinstance(each, ast.Assign)]
    names = {name.id for each in assigned for name in ast.walk(each.targets[0]) if isinstance(name, ast.Name)}
    assert names
    found = {name: vars(module)[name] for name in names if name.isupper()}
    return {name for name, value in found.items() if any(x and not isinstance(x, Constant) for x in numbers(value))}


@pytest.mark.parametrize("module", [*plan_text.FORMULAS, cluster], ids=lambda module: module.__name__)
def test_no_constant_lacks_an_origin(module):
    """A new number of these modules has to be a Constant, or exact."""
    assert without_origin(module) == EXACT.get(module.__name__.rpartition(".")[2], set())


def test_every_gpu_and_host_has_origins():
    assert len(hardware.rows()) > 30
    for name, card in hardware.rows().items():
        card = replace(card, sms=0)
        assert all(isinstance(each, Constant) for each in numbers(card) if each), name
    kept = [cluster.Host(), *cluster.HOSTS.values()]
    assert all(isinstance(each, Constant) for part in kept for each in numbers(part) if each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_lists_the_constants_that_it_uses(kind):
    machines = built_in(f"{kind}x8")
    found = plan_text.constants_record(machines)
    assert all(each.keys() == {"value", "unit", "origin", "source"} for each in found.values())
    assert all(each["unit"] and each["source"] and each["origin"] for each in found.values())
    assert found["gpu.hbm_gb_per_s"]["value"] == machines.card.hbm_gb_per_s
    assert found["memory.NCCL_GIB"]["value"] == memory.NCCL_GIB
    names = {"links.NIC_SHARE", "links.NODE_STEP_SECONDS", "kernels.UNFUSED", "kernels.CPU_HOST_US.others.0"}
    assert {*names, "host.pcie_gb_per_s", "memory.FRAGMENTATION", "links.NODE_CURVE.5"} <= found.keys()


def test_classes_of_an_h100():
    found = plan_text.constants(built_in("h100x8"))
    named = {"gpu.matmul_tflops": MEASURED, "gpu.bus_gb_per_s": MEASURED, "gpu.hbm_gb_per_s": DATA_SHEET}
    named |= {"gpu.fp32_tflops": ASSUMED, "network.gbit_per_s_per_node": DATA_SHEET, "memory.CONTEXT_GIB": ASSUMED}
    assert {name: found[name].origin for name in named} == named
    assert "ml-engineering: MAMF" in found["gpu.matmul_tflops"].source
    # an H20's products are no measured ones, nor are an H800's links
    estimated = hardware.gpu("H20").matmul_tflops, hardware.gpu("H800").bus_gb_per_s
    assert [each.origin for each in estimated if isinstance(each, Constant)] == [ASSUMED, ASSUMED]


def test_a_cluster_files_own_values_come_from_it(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    found = plan_text.constants(read_cluster(str(path)))
    own = {name: each.source for name, each in found.items() if each.origin == OF_FILE}
    lines = FILE.splitlines()
    assert {
        "links.0.bus_gb_per_s.1", "links.1.gbit_per_s_per_node", "links.2.bus_gb_per_s.32", "links.2.latency_us",
        "host.cpu_cores", "memory.reserved_gib", "network.gbit_per_s_per_node",
    } <= own.keys()  # fmt: skip
    for name, source in own.items():
        place, _, line = source.rpartition(":")
        assert place == str(path) and f"{found[name]:g}" in lines[int(line) - 1], name
    assert found["gpu.matmul_tflops"].origin == MEASURED and found["gpu.memory_gib"].origin == MEASURED
    assert found["links.2.bus_gb_per_s.64"].unit == "GB/s" and found["host.memory_gib"].unit == "GiB"


def test_a_device_of_a_file_is_assumed_to_reach_a_share_of_its_peak(tmp_path):
    path = tmp_path / "cluster.yaml"
    device = "device: {memory_gib: 40, peak_tflops: {bf16: 300}, hbm_gb_per_s: 1500}\n"
    path.write_text(device + "nodes: 1\ngpus_per_node: 4\nlinks: [{level: node, gbit_per_s_per_node: 800}]\n")
    found = plan_text.constants(read_cluster(str(path)))
    products = found["gpu.matmul_tflops"]
    assert (products, products.unit, products.origin) == (240, "TFLOP/s", ASSUMED)
    assert products.source == f"{path}:1, 0.8 (assumed) of the peak"
    assert (found["links.0.bus_gb_per_s.1"], found["links.0.bus_gb_per_s.1"].unit) == (100, "GB/s")
    assert found["gpu.bus_gb_per_s"].origin == ASSUMED  # of PCIe


def test_what_was_learnt_is_listed():
    learnt = Calibration(
        "H100", {"runs": ["a"], "date": "2026-11-27"}, {"compute": 1.2}, memory={"": 1.1}, path="x.json"
    )
    machines = replace(built_in("h100x8"), calibration=learnt)
    found = plan_text.constants_record(machines)["calibration.time.compute"]
    assert (found["value"], found["origin"], found["source"]) == (1.2, CALIBRATED, learnt.describe())
    assert plan_text.constants_record(machines)["calibration.memory.others"]["value"] == 1.1
    assert plan_text.inputs_line(machines, None).endswith("factors of all these (calibration)")


def test_the_command_says_where_its_numbers_come_from(tmp_path, capsys):
    path, out = tmp_path / "cluster.yaml", tmp_path / "out.json"
    path.write_text(FILE)
    assert main(["plan", MODEL, "--cluster", str(path), "--gpus", "64", "--rows", "1", "--json", str(out)]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("Inputs: "))
    assert "products 794.5 TFLOP/s (measured elsewhere); GPU memory 3,350 GB/s (data sheet)" in line
    assert "links in a node 360 GB/s" in line and "reserved memory (cluster file)" in line
    constants = json.loads(out.read_text())["constants"]
    assert constants["hardware"]["memory.reserved_gib"]["origin"] == OF_FILE
    assert constants["stacks"] and "fit_planner.py" in constants["origin"]


def test_a_constant_is_a_number():
    made = Constant(2.5, "GB/s", ASSUMED, "a test")
    assert made == 2.5 and type(2 * made) is float and json.dumps([made]) == "[2.5]"
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (other, other.unit, other.origin, other.source) == (2.5, "GB/s", ASSUMED, "a test")
    with pytest.raises(AssertionError):
        Constant(1, "", ASSUMED, "")
