"""What run.json says of the machine."""

from __future__ import annotations

import platform

import torch

from samecurve.run import metadata
from samecurve.specs.environment import processor


def test_a_processor_has_a_name(tmp_path):
    about = tmp_path / "cpuinfo"
    assert processor(about) == (platform.processor() or platform.machine())
    about.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n")
    assert processor(about) == "AMD EPYC (family 25, model 17)"
    about.write_text("processor\t: 0\nmodel name\t: ARMv7 Processor rev 4 (v7l)\n")
    assert processor(about) == "ARMv7 Processor rev 4 (v7l)"


def test_hardware():
    found = metadata.hardware_facts()
    assert found["threads"] == torch.get_num_threads() and found["cores"] >= 1
    assert (found["processor"], found["cuda"], found["cudnn"]) == (processor(), torch.version.cuda, None)


def test_the_version_of_cudnn_is_that_which_was_loaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
    assert metadata.hardware_facts()["cudnn"] == 90100
