from __future__ import annotations

import signal

import pytest
from battery import Battery
from harness import Workspace


@pytest.fixture(scope="session", autouse=True)
def sigint_is_not_ignored() -> None:
    """A script that starts `pytest &`, as scripts/test.sh does, makes it ignore SIGINT, and all that it starts too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def battery(tmp_path_factory) -> Battery:
    return Battery(Workspace(tmp_path_factory.mktemp("faults")))
