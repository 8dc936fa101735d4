"""What ranks tell each other beside training: one answer for all of them, whoever knows what."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from control_probe import LAST_STEP, SLOW_SECONDS, SLOW_STEP

from samecurve.distributed.control_group import ARRIVE_SECONDS, ControlGroup, StopVote
from samecurve.errors import DataError

PROBE = Path(__file__).with_name("control_probe.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    command = [sys.executable, str(PROBE), str(tmp_path_factory.mktemp("control"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_rank_gets_what_is_its_own_and_what_is_everyones(ranks):
    assert [found["scattered"] for found in ranks] == ["a", "b", "c"]
    assert [found["concluded"] for found in ranks] == [[10, 11, 12]] * 3
    assert [found["broadcast"] for found in ranks] == [0] * 3
    assert [found["exchanged"] for found in ranks] == [0, 5, 10]
    assert [found["failed"] for found in ranks] == ["of rank 0"] * 3


def test_all_ranks_stop_after_the_step_that_follows_the_first_request(ranks):
    """Rank 2 asks from step 4 on, rank 1 from step 5 on."""
    assert [(found["stops"]["step"], found["stops"]["reason"]) for found in ranks] == [(5, "rank 1")] * 3
    assert [found["goes on"]["step"] for found in ranks] == [None] * 3


def test_a_request_in_the_last_step_is_not_lost(ranks):
    assert [found["stops at the end"]["step"] for found in ranks] == [LAST_STEP] * 3


def test_ranks_that_fail_save_only_if_all_do(ranks):
    """Rank 2 does not fail after step 2; nobody waits for it."""
    assert [[answer for answer, _ in found["arrives"]] for found in ranks] == [[True, False], [True, False], [True]]
    assert all(seconds < 1.5 * ARRIVE_SECONDS for found in ranks for _, seconds in found["arrives"])  # rank 0 says no


def test_rank_0_does_not_believe_in_ranks_that_waited_too_long(ranks):
    assert [found["late"] for found in ranks] == [[False, True]] * 3


def test_a_vote_does_not_wait_for_a_slow_rank(ranks):
    """The others read the answer one step later, and then they have to wait."""
    seconds = ranks[0]["stops"]["seconds"]
    assert seconds[SLOW_STEP - 1] < SLOW_SECONDS / 2 < seconds[SLOW_STEP], seconds


def test_all_ranks_find_the_same_problems_of_a_checkpoint(ranks):
    for found in ranks:
        assert found["good"] == []
        assert [text.split(": ")[0] for text in found["damaged"]] == ["rank_00001.safetensors"]
        assert found["without a manifest"] == ["manifest.json: expected a file, found no such file"]
        assert found["two folders"][-1].startswith("manifest.json differs between machines; output_dir has to be")


def test_a_run_directory_that_one_rank_does_not_share(ranks):
    for found in ranks:
        assert found["shared"][0] == ""
        assert found["shared"][1].startswith("output_dir: what rank 0 writes into ")
        assert f" is not seen on {socket.gethostname()}; set " in found["shared"][1]


def test_a_single_process_stops_after_this_very_step():
    vote = StopVote(ControlGroup())
    assert vote.reason(None, at_once=False) is None and vote.reason("SIGTERM", at_once=False) == "SIGTERM"


def test_a_single_process_talks_to_itself():
    world = ControlGroup()
    assert (world.scatter([1]), world.broadcast(2), world.conclude(3, list), world.on_main(lambda: 4)) == (1, 2, [3], 4)
    with pytest.raises(DataError, match="mine"):
        world.on_main(lambda: (_ for _ in ()).throw(DataError("mine")))
