"""What all tests have in common."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from samecurve.engines import start
from tests.results import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]  # hooks of pytest

start.quote_path()  # tests compile without an engine, too

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_LAUNCHERS += ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(scope="session", autouse=True)
def sigint_is_not_ignored() -> None:
    """A script that starts `pytest &`, as scripts/test.sh does, makes it ignore SIGINT, and all that it starts too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def launch_is_forgotten() -> Iterator[None]:
    """Fail a test that leaves variables of a launch to the tests after it, whose processes would follow them."""
    before = {name: os.environ.get(name) for name in OF_LAUNCHERS}
    yield
    assert {name: os.environ.get(name) for name in OF_LAUNCHERS} == before


@pytest.fixture
def planner_cache(tmp_path, monkeypatch) -> Path:
    """The folder of what the planner learns from benchmarks, empty at first."""
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "planner"
