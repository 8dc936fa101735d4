"""`python -m samecurve launch`: the words of every launcher from one description of the machines, and its errors."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from samecurve.cli.commands import main
from samecurve.launch import ssh
from samecurve.launch.hosts import HostSlots, select
from samecurve.launch.target import LAUNCHERS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ["recipes/pretrain.yaml", "data.path=docs", "steps=700"]
FSDP = ["--strategy", "configs/fsdp.yaml"]
SCRIPT = ["train.py", "recipes/pretrain.yaml"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "SAMECURVE_CACHE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hosts(tmp_path) -> str:
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts: [10.0.0.1, 10.0.0.2]\ngpus_per_node: 4\nport: 2950\n")
    return str(path)


def emitted(launcher: str, capsys, *machines: str, strategy: str = FSDP[1]) -> str:
    assert main(["launch", *RECIPE, "--strategy", strategy, "--launcher", launcher, *machines]) == 0
    return capsys.readouterr().out


def test_a_command_for_each_host(hosts, capsys):
    """torchrun's and accelerate's words, worked out by hand."""
    lines = emitted("torchrun", capsys, "--hosts", hosts).splitlines()
    meeting = "--master_addr 10.0.0.1 --master_port 2950"
    assert [lines[0], lines[2]] == [f"# on 10.0.0.{host}, in the repository's root" for host in (1, 2)]
    for rank, line in enumerate(lines[1::2]):
        start = f"torchrun --nnodes 2 --nproc_per_node 4 --node_rank {rank} {meeting}".split()
        assert shlex.split(line) == [*start, *SCRIPT, *FSDP, "data.path=docs", "steps=700"]
    lines = emitted("accelerate", capsys, "--hosts", hosts).splitlines()
    for rank, line in enumerate(lines[1::2]):
        start = f"accelerate launch --config_file {FSDP[1]} --num_machines 2 --num_processes 8 --machine_rank {rank}"
        meeting = "--main_process_ip 10.0.0.1 --main_process_port 2950"
        assert shlex.split(line) == [*start.split(), *meeting.split(), *SCRIPT, "data.path=docs", "steps=700"]
        # the hosts are started one by one, and under DeepSpeed accelerate would start both from each
        assert ("--deepspeed_multinode_launcher standard" in line) is False
    line = emitted("accelerate", capsys, "--hosts", hosts, strategy="configs/zero3.yaml").splitlines()[1]
    assert "--deepspeed_multinode_launcher standard" in line


def test_hosts_that_may_be_lost(hosts, capsys):
    """torchrun's words, worked out by hand; the first host holds the rendezvous."""
    lines = emitted("torchrun", capsys, "--hosts", hosts, "--min_nodes", "1").splitlines()[1::2]
    start = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc_per_node 4 --max_restarts 1000"
    meeting = "--rdzv_backend c10d --rdzv_endpoint 10.0.0.1:2950 --rdzv_id samecurve --rdzv_conf"
    for line, own in zip(lines, ("is_host=1 --local_addr 10.0.0.1", "is_host=0 --local_addr 10.0.0.2"), strict=True):
        words = f"{start} {meeting} {own}".split()
        assert shlex.split(line) == [*words, *SCRIPT, *FSDP, "data.path=docs", "steps=700"]


@pytest.mark.parametrize("own", [False, True])
def test_deepspeed_finds_its_files(own, hosts, capsys, tmp_path, monkeypatch):
    """What is printed runs, with a stand-in for the launcher that shows what it is given."""
    monkeypatch.setenv("HF_HOME", "/models and more")
    hostfile, stand_in = tmp_path / "my hosts", tmp_path / "bin" / "deepspeed"
    hostfile.write_text("10.0.0.1 slots=4\n10.0.0.2 slots=4\n")
    text = emitted("deepspeed", capsys, *(["--hostfile", str(hostfile)] if own else ["--hosts", hosts]))
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\ncat "$2" "$DS_ENV_FILE"\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    environ = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    command = ["bash", "-euc", text]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    port = "29500" if own else "2950"
    read = [*hostfile.read_text().splitlines(), "TOKENIZERS_PARALLELISM=false", "HF_HOME=/models and more"]
    words = ["--hostfile", str(hostfile) if own else "runs/launch/hostfile"]
    words += ["--no_ssh_check", "--master_addr", "10.0.0.1", "--master_port", port, *SCRIPT, *FSDP]
    assert done.stdout.splitlines() == [*read, *words, "data.path=docs", "steps=700"]
    assert (tmp_path / "runs" / "launch" / "hostfile").exists() != own


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_machine_needs_no_name(launcher, capsys):
    text = emitted(launcher, capsys, "--nodes", "1", "--gpus_per_node", "2")
    assert "train.py" in text and "HEAD:?" not in text and "$RANK" not in text


def test_machines_without_names_get_a_script_or_an_error(capsys):
    unnamed = ["--nodes", "4", "--gpus_per_node", "8"]
    for launcher in ("accelerate", "torchrun"):
        text = emitted(launcher, capsys, *unnamed)
        assert ': "${HEAD:?' in text and "number of this node, 0 to 3" in text
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert main(["launch", *RECIPE, *FSDP, "--launcher", "deepspeed", *unnamed]) == 2
    assert "name them by --hosts or --hostfile" in capsys.readouterr().err
    assert main(["launch", *RECIPE, *FSDP, "--launcher", "torchrun", "--start", *unnamed]) == 2
    assert "the 4 machines have no names" in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "file"), [("slurm", "slurm.sh"), ("kubernetes", "kubernetes.yaml")])
def test_the_examples_are_what_is_printed(launcher, file):
    """scripts/slurm.sh and scripts/kubernetes.yaml are outputs of the command."""
    given = "recipes/pretrain.yaml data.path=/storage/texts output_dir=/storage/runs/pretrain --nodes 2"
    path = ROOT / "scripts" / file
    old = path.read_text()
    command = (
        f"launch {given} --gpus_per_node 8 --strategy configs/fsdp.yaml --launcher {launcher} --output scripts/{file}"
    )
    try:
        assert main(command.split()) == 0
        new = path.read_text()
    finally:
        path.write_text(old)
    assert new == old, f"python -m samecurve {command}"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "--launcher pdsh --nodes 1 --gpus_per_node 1",
            2,
            "--launcher pdsh: expected one or more of accelerate, torchrun",
        ),
        ("--launcher torchrun", 2, "machines: found none of them; expected one of --hosts FILE, --hostfile FILE"),
        ("--launcher torchrun --nodes 2", 2, "--nodes N with --gpus_per_node N"),
        ("--launcher torchrun --nodes 0 --gpus_per_node 1", 2, "--nodes: found 0, but it must be at least 1"),
        ("--launcher torchrun --hosts {yaml} --hostfile x", 2, "found --hosts, --hostfile; expected one of"),
        ("--launcher torchrun --hosts {bad}", 2, "bad.yaml:1: host: unknown key; did you mean hosts?"),
        ("--launcher torchrun --hosts {bad}", 2, "bad.yaml: hosts: missing, expected a list of names or addresses"),
        ("--launcher torchrun --hosts {bad}", 2, 'gpus_per_node: found "four" (text), expected a whole number from 1'),
        (
            "--launcher torchrun --hostfile {uneven}",
            2,
            "hosts: a has 2, b has 1 slots; only the deepspeed launcher allows",
        ),
        (
            "--launcher torchrun --hostfile {uneven} --include a",
            2,
            "--include: only the deepspeed launcher picks slots",
        ),
        ("--launcher deepspeed --hostfile {uneven} --include c", 2, "--include c: no host 'c'; the hosts are a, b"),
        ("--launcher deepspeed --hostfile {uneven} --include b:1", 2, "no slot 1 on b; b has 1 slots, numbered from 0"),
        ("--launcher deepspeed --hostfile {uneven} --exclude a@b", 2, "--exclude a@b: no slot is left"),
        ("--launcher slurm --hosts {yaml} --min_nodes 1", 2, "--min_nodes 1: only torchrun continues with fewer hosts"),
        ("--launcher torchrun --nodes 2 --gpus_per_node 1 --min_nodes 1", 2, "each host needs an address of its own"),
        ("--launcher torchrun --hosts {yaml} --min_nodes 2", 2, "--min_nodes 2: found 2 hosts, but it must be less"),
        ("--launcher torchrun --hosts {yaml} --min_nodes 1 --start", 2, "--start ends all hosts when one fails"),
        (
            "--launcher torchrun --hosts {yaml} --min_nodes 1 rehearse=true",
            2,
            "a host that returns would rehearse alone",
        ),
        ("--launcher torchrun --hosts {yaml} steps=seven", 2, "steps: found"),
    ],
)
def test_mistakes_are_named(arguments, code, message, hosts, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("host: [a]\ngpus_per_node: four\n")
    (tmp_path / "uneven").write_text("a slots=2\nb slots=1\n")
    paths = {"yaml": hosts, "bad": tmp_path / "bad.yaml", "uneven": tmp_path / "uneven"}
    words = arguments.format(**paths).split()
    overrides = ["data.path=docs", *([] if "steps=seven" in words else ["steps=700"])]
    assert main(["launch", RECIPE[0], *overrides, *FSDP, *words]) == code
    assert message in capsys.readouterr().err


def test_fewer_hosts_that_the_strategy_cannot_use(tmp_path, capsys):
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    machines = ["--hostfile", str(tmp_path / "hostfile"), "--min_nodes", "1", "--launcher", "torchrun"]
    assert main(["launch", *RECIPE, "--strategy", "configs/pipeline.yaml", *machines]) == 6
    assert "1 x 1 devices: 1 problem" in capsys.readouterr().err


def test_slots_that_the_strategy_cannot_use(capsys):
    machines = ["--nodes", "1", "--gpus_per_node", "3", "--launcher", "torchrun"]
    assert main(["launch", *RECIPE, "--strategy", "configs/pipeline.yaml", *machines]) == 6
    assert "1 x 3 devices: 1 problem" in (said := capsys.readouterr().err)
    assert "3 processes cannot be divided into 2 stages" in said


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("pipeline_1f1b", "cannot form pipelines of 2; start a multiple of 2"),
        ("fsdp_ep", "cannot form groups of 2 that share the experts; start a multiple of 2 processes"),
        ("fsdp_cp", "cannot form groups of 2; start a multiple of 2 processes"),
        ("fsdp_tp", "cannot form groups of 2; start a multiple of 2 processes"),
    ],
)
@pytest.mark.parametrize(("slots", "processes", "others"), [("1", "1 process", ""), ("9", "9 processes", "3 or 9")])
def test_a_number_of_processes_that_makes_no_groups(strategy, text, slots, processes, others, capsys):
    """Another size is named only where there is one: one process has no divisor above 1."""
    machines = ["--nodes", "1", "--gpus_per_node", slots, "--launcher", "torchrun"]
    assert main(["launch", *RECIPE, "--strategy", f"configs/{strategy}.yaml", *machines]) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"found 2, but {processes} {text}" + (f", or set it to {others}" if others else ""))


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("node1:1,2@node2:0", ""), ("node2@node1:3", ""), ("node2:1,1", ""), ("", "node1:0"), ("", "node1@node2:1,3"),
        ("", ""),
    ],
)  # fmt: skip
def test_slots_are_counted_as_deepspeed_does(include, exclude):
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    expected = parse_inclusion_exclusion({"node1": 4, "node2": 4}, include, exclude)
    found = select([HostSlots("node1", 4), HostSlots("node2", 4)], include, exclude)
    assert [(host.name, host.slots) for host in found] == [(name, len(slots)) for name, slots in expected.items()]


# --start


def test_what_is_in_the_way_of_a_start_is_told(tmp_path, capsys, monkeypatch):
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [localhost, no-such-host.invalid]\ngpus_per_node: 1\n")
    command = ["launch", *RECIPE, *FSDP, "--start"]
    assert main([*command, "--hosts", str(hosts), "--launcher", "torchrun"]) == 6
    assert "no-such-host.invalid: unknown host" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = ["--nodes", "1", "--gpus_per_node", "2", "--launcher", "torchrun", "--master_port", str(port)]
        assert main([*command, *one]) == 6
    assert f"localhost: port {port} is in use; choose another with --master_port" in capsys.readouterr().err
    (tmp_path / "hostfile").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    monkeypatch.setattr("samecurve.launch.ssh.ROOT", Path("/my files/samecurve"))
    assert main([*command, "--hostfile", str(tmp_path / "hostfile"), "--launcher", "deepspeed"]) == 2
    assert "/my files/samecurve: deepspeed gives this path to the other hosts' shells" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    for launcher, program in (("slurm", "sbatch"), ("kubernetes", "kubectl"), ("trainjob", "kubectl")):
        assert main([*command, "--nodes", "2", "--gpus_per_node", "2", "--launcher", launcher]) == 2
        assert f"--start: {program} is not on PATH" in capsys.readouterr().err


def test_ssh_takes_the_host_for_no_option():
    assert ssh.command("node1", "true")[-3:] == ["--", "node1", "true"]


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_a_scheduler_is_given_the_file(launcher, tmp_path, capsys, monkeypatch):
    program = {"slurm": "sbatch", "kubernetes": "kubectl"}[launcher]
    (tmp_path / program).write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words; cat >{tmp_path}/text; exit 3\n')
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machines = ["--nodes", "2", "--gpus_per_node", "2"]
    text = emitted(launcher, capsys, *machines)
    assert main(["launch", *RECIPE, *FSDP, "--launcher", launcher, *machines, "--start"]) == 3
    assert (tmp_path / "text").read_text() == text
    assert (tmp_path / "words").read_text().split() == {"slurm": [], "kubernetes": ["apply", "-f", "-"]}[launcher]


def test_a_train_job_gives_torchrun_what_the_operator_does_not(capsys):
    """The operator sets PET_NNODES and its like; torchrun must not be told twice, nor may these be set in the job."""
    job = yaml.safe_load(emitted("trainjob", capsys, "--nodes", "2", "--gpus_per_node", "8"))
    trainer = job["spec"]["trainer"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["command"][:2] == ["bash", "-c"] and "--nnodes" not in trainer["command"]
    assert not [each for each in trainer["env"] if each["name"].startswith("PET_")]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}


def own_recipe(folder: Path, name: str) -> list[str]:
    (folder / name).write_text(f"base: {ROOT / 'recipes' / 'pretrain.yaml'}\n")
    return ["launch", str(folder / name), "data.path=docs", "steps=700", *FSDP]


HOST_LISTS = {"a\ntouch PWNED #": "hosts", "a\nEND\ntouch PWNED #": "hosts", "a b": "hosts", "": "hosts"}
WORDS = ("-oProxyCommand=x", "$(x)", "a;b")


@pytest.mark.parametrize(
    ("name", "file"), [*HOST_LISTS.items(), *((w, f) for w in WORDS for f in ("hosts", "hostfile"))]
)
def test_a_host_is_the_name_of_a_host(name, file, tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    named = yaml.safe_dump({"hosts": [name, "b"], "gpus_per_node": 1})
    path.write_text(named if file == "hosts" else f"{name} slots=1\nb slots=1\n")
    assert main(["launch", *RECIPE, *FSDP, "--launcher", "torchrun", f"--{file}", str(path)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "machines.yaml:" in captured.err and "letters, digits" in captured.err


@pytest.mark.parametrize(
    "name, what", [("a\ntouch PWNED #.yaml", "has a control character"), ("a\udcff.yaml", "is not UTF-8")]
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_recipes_name_is_no_command(launcher, name, what, tmp_path, capsys, hosts):
    machines = ["--hosts", hosts] if launcher == "deepspeed" else ["--nodes", "2", "--gpus_per_node", "4"]
    asked = own_recipe(tmp_path, name)
    assert main([*asked, "--launcher", launcher, *machines]) == 2
    assert what in capsys.readouterr().err


def test_a_variable_is_no_command(tmp_path, capsys, monkeypatch, hosts):
    monkeypatch.setenv("HF_HOME", "a\nEND\ntouch PWNED #")
    assert main(["launch", *RECIPE, *FSDP, "--launcher", "deepspeed", "--hosts", hosts]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "HF_HOME=" in captured.err


def test_words_with_a_dollar_stay_words(tmp_path, capsys, monkeypatch):
    recipe = "$(touch PWNED).yaml"
    asked = own_recipe(tmp_path, recipe)
    monkeypatch.chdir(ROOT)
    for name in ("torchrun", "slurm"):
        assert main([*asked, "--launcher", name, "--nodes", "2", "--gpus_per_node", "4"]) == 0
        assert f"'{tmp_path / recipe}'" in capsys.readouterr().out
    assert main([*asked, "--launcher", "torchrun", "--nodes", "2", "--gpus_per_node", "4"]) == 0
    text = capsys.readouterr().out
    stand_in = tmp_path / "bin" / "torchrun"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    environ = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "HEAD": "h", "RANK": "1"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert {"h", "1", str(tmp_path / recipe)} <= set(words) and not (tmp_path / "PWNED").exists()


def test_kubernetes_gets_the_words_as_they_are(tmp_path, capsys):
    recipe = "\U0001f600 $(HOME) $$ $HOME.yaml"
    asked = own_recipe(tmp_path, recipe)
    for launcher in ("kubernetes", "trainjob"):
        assert main([*asked, "--launcher", launcher, "--nodes", "2", "--gpus_per_node", "4"]) == 0
        *_, job = yaml.safe_load_all(capsys.readouterr().out)
        spec = job["spec"]["trainer"] if launcher == "trainjob" else job["spec"]["template"]["spec"]["containers"][0]
        # Kubernetes' third_party/forked/golang/expansion: $$ is $, $(NAME) is filled in, and another $ stays
        words = [re.sub(r"\$(\$|\(\w+\))", lambda match: "$" * (match[1] == "$"), word) for word in spec["command"]]
        assert str(tmp_path / recipe) in words
        if launcher == "kubernetes":
            assert "--node_rank=$(JOB_COMPLETION_INDEX)" in spec["command"]
        else:
            assert words[2].endswith('torchrun "$@"')
