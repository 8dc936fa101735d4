"""Names of GPUs as runs.csv, people and torch write them: which row of rates, and how much memory."""

from __future__ import annotations

import pytest

from samecurve.planner.hardware import canonical, gpu, is_unknown, known_gpu

# kind: name of the row, memory in GiB, GB/s of a node's links
KINDS = {
    "H100-80GB": ("H100", 79.1, 361),
    "NVIDIA H100 80GB HBM3": ("H100", 79.1, 361),
    "A100-80GB": ("A100", 79.2, 227),
    "A100-40GB": ("A100-40", 39.4, 227),
    "NVIDIA A100-SXM4-40GB": ("A100-40", 39.4, 227),
    "A100-PCIe-40GB": ("A100-PCIe-40", 39.4, 24),
    "A100-40GB-PCIe": ("A100-PCIe-40", 39.4, 24),
    "A800-80GB": ("A800", 79.2, 151),
    "A800-40GB": ("A800", 39.4, 151),
    "RTX-4090-24GB": ("RTX-4090", 23.5, 24),
    "NVIDIA GeForce RTX 4090": ("RTX-4090", 23.5, 24),
    "RTX-3090-24GB": ("RTX-3090", 23.5, 24),
    "3090": ("RTX-3090", 23.5, 24),
    "RTX-2080Ti-11GB": ("RTX-2080Ti", 10.8, 12),
    "RTX-6000-Ada": ("RTX-6000-Ada", 47.3, 24),
    "NVIDIA RTX 6000 Ada Generation": ("RTX-6000-Ada", 47.3, 24),
    "NVIDIA RTX A6000": ("A6000", 47.4, 24),
    "A10-24GB": ("A10G", 22.0, 24),
    "A10G": ("A10G", 22.0, 24),
    "A10G-24GB": ("A10G", 22.0, 24),
    "A30-24GB": ("A30", 23.6, 24),
    "V100-16GB": ("V100", 15.8, 119),
    "V100-32GB": ("V100", 31.7, 119),
    "NVIDIA GH200 480GB": ("GH200", 94.5, 361),
    # one of two dies
    "MI250": ("MI250", 63.0, 100),
    "MI250X-128GB": ("MI250X", 63.0, 100),
    "AMD Instinct MI250X 64GB": ("MI250X", 63.0, 100),
    "MI210": ("MI210", 63.0, 24),
    "MI325X": ("MI325X", 255, 313),
    "MI355X-288GB": ("MI355X", 283.7, 313),
}
UNKNOWN = (
    *("RTX 4090 D", "RTX-4090-D-24GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
    *("NVIDIA GeForce RTX 3080", "RTX 9999", "TPU-v5", "MI100", "Tesla T4", "Gaudi3"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_finds_its_rates_memory_and_links(kind):
    name, memory, links = KINDS[kind]
    card = known_gpu(kind)
    assert card and (canonical(kind), round(card.memory_gib, 1), round(card.bus_gb_per_s)) == (name, memory, links)
    assert not is_unknown(kind)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_variants_and_unknown_gpus_have_no_rates(kind):
    assert known_gpu(kind) is None and canonical(kind) == kind and is_unknown(kind)
    assert gpu(kind).matmul_tflops == gpu("A100-80GB").matmul_tflops


def test_an_unknown_gpu_has_the_memory_of_its_label():
    memory = gpu("RTX-4090-D-24GB").memory_gib
    assert memory == pytest.approx(0.985 * 24)


def test_a_die_of_two_has_half_of_the_data_sheets_rates():
    """383.0 TFLOP/s of bf16 and 3.2 TB/s of an MI250X (AMD Instinct MI200 data sheet), of which 0.8 are assumed."""
    die = gpu("MI250X-128GB")
    assert die.matmul_tflops == pytest.approx(0.8 * 383.0 / 2) and die.hbm_gb_per_s == pytest.approx(3200 / 2, rel=0.03)
    assert not die.is_measured and not gpu("H20").is_measured and gpu("H100-80GB").is_measured


@pytest.mark.parametrize("kind", ["", "device", "cpu"])
def test_given_rates_are_no_guess(kind):
    assert not is_unknown(kind)
