"""`deepspeed --hostfile` over two hosts that share nothing of the network trains as over two processes of one host."""

from __future__ import annotations

import pytest
import two_hosts
from harness import BIN, ROOT, Run, Workspace

SETTINGS = ("steps=6",)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero3", "pipeline"])
def test_two_hosts_train_like_one(strategy: str, workspace: Workspace, tmp_path):
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    two_hosts.skip_without_quotes("deepspeed")
    local = workspace.run(strategy, 2, *SETTINGS, launcher="deepspeed")
    assert local.returncode == 0, local.output
    exports = {
        "SAMECURVE_CACHE": str(workspace.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with two_hosts.two_hosts(tmp_path, exports) as hosts:
        run = _run(hosts, strategy, workspace)
        assert run.returncode == 0, run.output
        # less would be the launcher's own talk; ZeRO-3 sent 2.4 MB and the pipeline 0.56 MB
        assert hosts.received_bytes() > 200_000
    assert f"{two_hosts.ADDRESSES[1]}: " in run.output and "nnodes=2, num_local_procs=1, node_rank=1" in run.output
    assert run.facts["strategy"] == local.facts["strategy"]
    assert run.column("loss") == pytest.approx(local.column("loss"), rel=1e-6, abs=0)
    assert run.column("grad_norm") == pytest.approx(local.column("grad_norm"), rel=1e-6, abs=0)


def _run(hosts: two_hosts.TwoHosts, strategy: str, workspace: Workspace) -> Run:
    directory = workspace.folder / f"two_hosts_{strategy}"
    launcher = ["--hostfile", str(hosts.hostfile), "--no_ssh_check", "--master_addr", two_hosts.ADDRESSES[0]]
    arguments = [str(workspace.recipe), f"output_dir={directory}", *SETTINGS, "--strategy", f"configs/{strategy}.yaml"]
    done = hosts.run([str(BIN / "deepspeed"), *launcher, "train.py", *arguments], ROOT, timeout_seconds=600)
    return Run(directory, done.returncode, done.stdout)
