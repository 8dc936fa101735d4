"""Public reports of wrong training, planted again, are found where they are, and their right counterparts pass."""

from __future__ import annotations

import pytest

from tests.museum.exhibits import EXHIBITS, NOT_SHOWN
from tests.museum.judged import result_of

DAILY = ("norm of one rank",)
_CASES = [
    pytest.param(exhibit, id=exhibit.name, marks=() if exhibit.name in DAILY else pytest.mark.full)
    for exhibit in EXHIBITS
]


def test_each_report_is_shown_once_or_is_said_not_to_be():
    shown = [exhibit.number for exhibit in EXHIBITS]
    assert sorted([*shown, *NOT_SHOWN]) == [*range(1, 41)]
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS)


@pytest.mark.parametrize("exhibit", _CASES)
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_exhibit(exhibit, is_wrong):
    result = result_of(exhibit, is_wrong)
    assert result["as_expected"], f"{result['kind']}: {result['text']}"
