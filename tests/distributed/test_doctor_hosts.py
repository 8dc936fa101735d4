"""The doctor on two hosts that share the file system and nothing of the network; each fault is made for real."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import two_hosts
from harness import BIN, ROOT

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[two_hosts.TwoHosts]:
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with two_hosts.two_hosts(tmp_path_factory.mktemp("hosts"), {}) as made:
        yield made


def examine(hosts: two_hosts.TwoHosts, output_dir: Path, *more: str, **environment: str) -> tuple[int, list[dict]]:
    """Return the exit code and the findings."""
    target = hosts.folder / "findings.json"
    target.unlink(missing_ok=True)
    command = [str(BIN / "python"), "-m", "samecurve", "doctor", "recipes/quickstart.yaml", f"output_dir={output_dir}"]
    command += ["--hostfile", str(hosts.hostfile), "--json", str(target), "--timeout_seconds", "20", *more]
    settings = ["env", *(f"{name}={value}" for name, value in environment.items())]
    done = hosts.run([*settings, *command], ROOT, timeout_seconds=300)
    assert target.is_file(), done.stdout
    findings = json.loads(target.read_text())["findings"]
    shown = [each["problem"] for each in findings if each["problem"]]
    assert all(problem in done.stdout for problem in shown), done.stdout
    return done.returncode, findings


def failures(findings: list[dict]) -> dict[str, str]:
    """Map each area to its failures, joined."""
    found: dict[str, str] = {}
    for each in findings:
        if each["exit_code"]:
            found[each["area"]] = f"{found.get(each['area'], '')} {each['host']} {each['problem']} {each['fix']}"
    return found


def test_two_healthy_hosts(hosts, tmp_path):
    code, findings = examine(hosts, tmp_path / "run")
    assert (code, failures(findings)) == (0, {}), findings
    seen = {each["area"]: each["seen"] for each in findings}
    assert "the same on 2 hosts" in seen["versions"] and "read on 2" in seen["shared"]
    assert "2 hosts within" in seen["clock"]
    links = [each["seen"] for each in findings if each["area"] == "links"]
    assert "1 pair of hosts" in links[0] and "2 processes on 2 hosts" in links[1]
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_host_without_a_login(hosts, tmp_path):
    keys = hosts.folder / "authorized_keys"
    allowed = keys.read_text()
    keys.write_text("")
    try:
        code, findings = examine(hosts, tmp_path / "run")
    finally:
        keys.write_text(allowed)
    assert code == 6
    assert f"ssh-copy-id {two_hosts.ADDRESSES[1]}" in failures(findings)["ssh"]


def test_a_master_that_is_not_reached(hosts, tmp_path):
    code, findings = examine(hosts, tmp_path / "run", "--master_addr", "127.0.0.1")
    assert code == 6
    assert any("127.0.0.1 port 29500" in each["fix"] for each in findings if each["exit_code"]), findings


def test_an_interface_that_does_not_exist(hosts, tmp_path):
    code, findings = examine(hosts, tmp_path / "run", GLOO_SOCKET_IFNAME="eth7")
    assert code == 2
    assert "no interface eth7 is up" in failures(findings)["network"]


def test_an_output_folder_of_its_own_on_each_host(hosts, tmp_path):
    inside = ["ip", "netns", "pids", hosts.namespaces[1]]
    sshd = subprocess.run(inside, check=True, capture_output=True, text=True).stdout.split()[0]
    in_its_mounts = ["nsenter", "--target", sshd, "--mount"]
    subprocess.run([*in_its_mounts, "mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        code, findings = examine(hosts, tmp_path / "run")
    finally:
        subprocess.run([*in_its_mounts, "umount", str(tmp_path)], check=True)
    assert code == 7
    assert "not seen here" in failures(findings)["shared"] and "that all hosts mount" in failures(findings)["shared"]
