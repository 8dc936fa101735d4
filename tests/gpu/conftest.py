from __future__ import annotations

import os

import pytest
import torch
from harness import Workspace

REHEARSE = "SAMECURVE_REHEARSE_GPU_TESTS"


def pytest_collection_modifyitems(items) -> None:
    if torch.cuda.is_available() or REHEARSE in os.environ:
        return
    for item in items:
        # one of them runs everywhere, so that the tests themselves are not broken unseen
        if item.path.parent.name == "gpu" and item.name != "test_a_gpu_follows_a_cpu":
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("gpu"))
