from __future__ import annotations

import pytest
from harness import Run, Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="session")
def reference(workspace) -> Run:
    """A single process in fp32 without accumulation: the trajectory that every other run has to follow."""
    run = workspace.run(None, 1, "batch.micro_batch_size=8", launcher="python")
    assert run.returncode == 0, run.output
    losses = run.column("loss")
    assert losses[-1] < 0.9 * losses[0], losses  # not only the rows differ: the weights move
    return run
