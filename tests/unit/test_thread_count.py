"""How many threads a process of a CPU run has."""

import pytest

from samecurve.engines import start

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": ""}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
        (TORCHRUN, 4),
        (TORCHRUN | {"OMP_NUM_THREADS": "1"}, 4),  # torchrun's own, where nobody said anything
        (TORCHRUN | {"OMP_NUM_THREADS": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ],
)
def test_what_the_user_says_or_a_share_of_the_cores(environ, threads, monkeypatch):
    monkeypatch.setattr("samecurve.distributed.affinity.num_cores", lambda: 8)
    assert start.num_threads(environ) == threads
