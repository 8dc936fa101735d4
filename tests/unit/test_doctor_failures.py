"""Failures that the doctor meets outside the facts of a host: missing tools, other hosts, a launcher's ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import missing
from test_doctor import GPU, check, facts, problems  # noqa: F401  a fixture

from samecurve.cli.commands import main
from samecurve.config.loader import load_recipe
from samecurve.distributed.network import free_port
from samecurve.doctor import examination, host, host_checks, ranks, shared_folder
from samecurve.doctor.findings import Finding
from samecurve.launch import ssh
from samecurve.launch.hosts import HostSlots
from samecurve.strategy import resolve
from samecurve.strategy.launchers import Launch


def test_a_missing_compiler(facts, tmp_path, monkeypatch):  # noqa: F811
    recipe = load_recipe("recipes/quickstart.yaml", ["compile=full"])
    strategy = resolve.describe_strategy(resolve.read_files("configs/zero2_offload.yaml"), Launch("python", 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = [each for each in host_checks.check_host(facts, {}, recipe, strategy) if each.area == "compilers"]
    assert all(each.level == "FAIL" and each.exit_code == 2 for each in found)
    assert any("compile: full needs a C++ compiler" in each.problem for each in found), found
    assert any("ninja" in each.problem or "g++" in each.problem or "c++" in each.problem for each in found), found


def test_an_interface_that_does_not_lead_to_the_first_host(facts):  # noqa: F811
    there = {"10.0.0.1": "eth0", "192.168.0.1": "eth1"}
    wrong = replace(facts, addresses=there, route="eth0", variables={"GLOO_SOCKET_IFNAME": "eth1"})
    (problem,) = problems(check(wrong))
    assert problem.startswith("warn network: ")
    assert not missing(problem, ("GLOO_SOCKET_IFNAME=eth1", "(eth0)", "unset it", "GLOO_SOCKET_IFNAME=eth0"))
    assert not problems(check(replace(wrong, variables={"GLOO_SOCKET_IFNAME": "eth1,eth0"})))


def test_drivers_that_differ(facts):  # noqa: F811
    drivers = [replace(facts, host=name, versions=facts.versions | {"driver": name}) for name in ("570", "580")]
    (found,) = [each for each in host_checks.compare(drivers) if each.problem]
    assert (found.problem, found.fix) == ("driver differ between hosts", "install one driver on all hosts")


def test_gpus_are_read_from_the_driver(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    line = "0, NVIDIA H100 80GB HBM3, 81559, 4, 580.95, 00000000:FF:00.0"
    smi.write_text(f'#!/bin/sh\ncase "$*" in *query*) echo "{line}";; *) echo "GPU0  X";; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = host.facts({})
    assert found.gpus == [replace(GPU, numa_node=-1)]
    assert (found.versions["driver"], found.links) == ("580.95", "GPU0  X\n")
    line = "0, NVIDIA GB10, [N/A], [N/A], 580.95, 0000000F:01:00.0"  # GPU and host share one memory
    smi.write_text(f'#!/bin/sh\ncase "$*" in *query*) echo "{line}";; *) echo "GPU0  X";; esac\n')
    assert [(gpu.name, gpu.memory_mib, gpu.used_mib) for gpu in host.facts({}).gpus] == [("NVIDIA GB10", 0, 0)]
    smi.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert host.facts({}).gpus == []


@pytest.mark.parametrize(
    ("answer", "problem", "fix"),
    [
        ((255, "", "ssh: connect to host node2: Connection refused"), "no login without a password", "ssh -v node2"),
        ((255, "", "root@node2: Permission denied (publickey)."), "no login without a password", "ssh-copy-id node2"),
        ((0, "python\nclone\n", ""), "not there: ", "on a file system that all hosts mount"),
        (None, "no answer in", "try ssh node2 true"),
    ],
)
def test_a_host_that_ssh_does_not_reach(answer, problem, fix, monkeypatch):
    monkeypatch.setattr(ssh, "run", replies(answer))
    found = examination.examine([HostSlots("node2", 1)], [], None, 29500, 1.0)
    assert [each.area for each in found] == ["ssh"] and found[0].exit_code in (2, 6)
    assert problem in found[0].problem and fix in found[0].fix, found


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((1, "", "ImportError: no torch"), "doctor failed there"),
        ((0, "17", "ImportError: no torch"), "doctor failed there"),
        ((0, "{}", "ImportError: no torch"), "doctor failed there"),
        (None, "doctor did not end within"),
    ],
)
def test_a_host_whose_doctor_fails(answer, problem, monkeypatch):
    monkeypatch.setattr(examination, "_reach", lambda host: Finding("ssh", "logs in", host=host.name))
    monkeypatch.setattr(ssh, "run", replies(answer))
    _, found = examination.examine([HostSlots("node2", 1)], [], None, 29500, 1.0)
    assert found.level == "FAIL" and problem in found.problem
    assert answer is None or found.seen == "ImportError: no torch"


def test_variables_of_a_host_are_in_no_command_line(monkeypatch):
    started = []

    def local(host: str, text: str) -> list[str]:
        started.append(text)
        return ["sh", "-c", text]  # as sshd does with the user's shell

    monkeypatch.setattr(ssh, "command", local)
    token = "it's $secret"
    done = ssh.run("node2", 'echo "$HF_TOKEN" "$RANK"; cat', 10.0, {"HF_TOKEN": token, "RANK": 1})
    assert done.stdout == f"{token} 1\n"
    assert ssh.run("node2", "cat", 10.0).stdout == ""
    assert len(started) == 2 and "secret" not in "".join(started)


def replies(answer: tuple[int, str, str] | None):
    """Stands for ssh: (exit code, output, errors), or no answer."""

    def run(host: str, text: str, seconds: float, variables: dict | None = None) -> subprocess.CompletedProcess:
        if answer is None:
            raise subprocess.TimeoutExpired(text, seconds)
        return subprocess.CompletedProcess([], *answer)

    return run


@pytest.fixture
def rank(monkeypatch):
    """Set the launcher's variables."""

    def launched(rank: int, world_size: int) -> None:
        settings = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return launched


def failures(found: list[Finding]) -> list[tuple[str, str, int]]:
    return [(each.area, each.problem, each.exit_code) for each in found if each.exit_code]


def test_a_rank_that_does_not_report(facts, rank):  # noqa: F811
    rank(0, 2)
    found = ranks.examine(facts, [], None, 0.5)
    assert failures(found) == [("network", "they did not report within 0 s", 6)]
    assert found[0].seen == "ranks 1" and "they have to reach 127.0.0.1 port" in found[0].fix


def test_a_first_rank_that_is_not_reached(facts, rank):  # noqa: F811
    rank(1, 2)
    (found,) = failures(ranks.examine(facts, [], None, 0.5))
    assert found[0::2] == ("network", 6) and "does not reach the first rank at 127.0.0.1" in found[1]


def test_a_first_rank_that_ends_before_the_others(facts, rank):  # noqa: F811
    """It hosts the store."""
    rank(1, 2)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosting = "import sys, time, torch.distributed as dist; store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), None, "
    hosting += "True, wait_for_workers=False); dist.PrefixStore(sys.argv[3], store).set('facts/0', '{}'); "
    hosting += "print(flush=True); time.sleep(1.5)"
    words = [sys.executable, "-c", hosting, address, str(port), ranks._NAME]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline()
        (found,) = failures(ranks.examine(facts, [], None, 20.0))
    assert found[0::2] == ("network", 6) and "does not reach the first rank" in found[1]


def test_a_folder_that_cannot_be_written_and_a_group_that_does_not_connect(facts, rank, tmp_path, monkeypatch):  # noqa: F811
    rank(0, 1)
    (tmp_path / "file").write_text("not a folder")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth7")
    found = failures(ranks.examine(facts, [], str(tmp_path / "file" / "run"), 5.0))
    assert [(area, code) for area, _, code in found] == [("shared", 7), ("network", 6)]
    assert "Not a directory" in found[0][1] and found[1][1] == "the process group does not connect"


def test_a_rename_that_is_not_seen(tmp_path):
    led = shared_folder.SharedFolder(Path(tmp_path), "x")
    with led.led():
        (led.path / "partial").write_text("the old name")
        assert led.follow() == "a renamed file still has its old name here"


def test_a_strategy_file_with_a_mistake(tmp_path, capsys):
    wrong = tmp_path / "zero.yaml"
    wrong.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: absent.json}\n")
    assert main(["doctor", "--strategy", str(wrong)]) == 2
    message = capsys.readouterr().err
    assert "no such file" in message and "absent.json" in message


def test_a_key_of_the_strategy_that_nobody_reads(tmp_path, capsys):
    file = tmp_path / "wrong.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_polcy: X}\n")
    assert main(["doctor", "recipes/quickstart.yaml", "--strategy", str(file)]) == 2
    message = capsys.readouterr().err
    assert "wrong.yaml:2: fsdp_config.fsdp_auto_wrap_polcy: unknown key; did you mean fsdp_auto_wrap_policy?" in message
