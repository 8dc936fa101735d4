"""What all tests have in common."""

from samecurve.engines import start
from tests.results import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]  # hooks of pytest

start.quote_path()  # tests compile without an engine, too
