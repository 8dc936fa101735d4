from __future__ import annotations

import pytest
from battery import Battery
from harness import Workspace


@pytest.fixture(scope="session")
def battery(tmp_path_factory) -> Battery:
    return Battery(Workspace(tmp_path_factory.mktemp("faults")))
