"""What the doctor concludes from facts: each fault is put into the facts of healthy hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from samecurve.config.loader import load_recipe
from samecurve.doctor import findings, host, host_checks, shared_folder
from samecurve.doctor.findings import Finding
from samecurve.doctor.host import HostFacts, InstalledGpu
from samecurve.errors import ConfigurationError
from samecurve.launch.hosts import HostSlots, read_hostfile
from samecurve.strategy import launchers

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = {"memlock": -1, "nofile": 65536}
GPU = InstalledGpu(0, "NVIDIA H100 80GB HBM3", 81559, 4, 0)


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> HostFacts:
    """This host, as if its limits were those of a good cluster."""
    folder = tmp_path_factory.mktemp("doctor")
    found = host.facts({"output_dir": folder / "run", "cache": folder})
    return replace(found, host="node1", limits=HEALTHY, shm_bytes=8 << 30)


def check(facts: HostFacts, **needed: tuple[int, int]) -> list[Finding]:
    return list(host_checks.check_host(facts, needed, None, None))


def problems(found: list[Finding]) -> list[str]:
    return [f"{each.level} {each.area}: {each.problem}; {each.fix}" for each in found if each.problem]


def test_a_healthy_host_has_no_problem(facts):
    found = check(facts, output_dir=(1000, 1000))
    assert not problems(found) and findings.exit_code(found) == 0
    assert findings.text(found).endswith("no problem found")


def test_facts_travel_as_json(facts):
    facts = replace(facts, gpus=[GPU])
    assert HostFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"versions": {"datasets": ""}}, "FAIL packages: not installed: datasets; pip install -r requirements.txt"),
        ({"limits": {"nofile": 1024, "memlock": -1}}, "warn limits: fewer than 4,096 open files; run ulimit -n 65536"),
        ({"limits": {"nofile": 65536, "memlock": 65536}}, "warn limits: too little memory may be locked; run ulimit"),
        ({"shm_bytes": 64 << 20}, "warn limits: too little shared memory; start the container with --shm-size=16g"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth7"}}, "FAIL network: GLOO_SOCKET_IFNAME=eth7, but no interface eth7"),
        ({"gpus": [replace(GPU, used_mib=40000)]}, "warn gpus: memory is in use before the run: GPU 0 (40,000 MiB)"),
        ({"gpus": [GPU, replace(GPU, name="NVIDIA L4")]}, "warn gpus: the slowest kind sets the pace of every step"),
        ({"gpus": [GPU], "variables": {"CUDA_MODULE_LOADING": "EAGER"}}, "warn gpus: every process loads all kernels"),
    ],
)
def test_a_problem_of_one_host(facts, change, expected):
    if "versions" in change:
        change = {"versions": facts.versions | change["versions"]}
    found = problems(check(replace(facts, **change)))
    assert len(found) == 1 and found[0].startswith(expected), found


def test_gpus_in_use_hide_no_other_kind(facts):
    found = problems(check(replace(facts, gpus=[replace(GPU, used_mib=40000), replace(GPU, name="NVIDIA L4")])))
    assert len(found) == 2 and "memory is in use" in found[0] and "the slowest kind" in found[1], found


def test_storage_that_is_too_small_or_not_ours(facts):
    small = replace(facts.folders[0], free_bytes=999)
    locked = replace(facts.folders[1], writable=False)
    found = check(replace(facts, folders=[small, locked]), output_dir=(1000, 1000))
    assert [each.split(";")[0] for each in problems(found)] == [
        "FAIL storage: too little free space",
        "FAIL storage: this user cannot write there",
    ]
    assert findings.exit_code(found) == 7


@pytest.mark.parametrize(
    ("free", "level"),
    [(31 << 20, "FAIL"), (32 << 20, "warn"), (64 << 20, "ok"), (0, "ok")],
)
def test_storage_fails_where_the_run_would(facts, free, level):
    """As training/room.py: 16 MiB are spare, and a disk with 0 bytes does not say."""
    folder = replace(facts.folders[0], free_bytes=free)
    finding = next(
        each
        for each in check(replace(facts, folders=[folder]), output_dir=(16 << 20, 32 << 20))
        if each.area == "storage"
    )
    assert finding.level == level and ("free space unknown" in finding.seen) is (not free)


def test_versions_that_differ_are_a_table(facts):
    other = replace(facts, host="node2", versions=facts.versions | {"torch": "2.11.0", "driver": "570.86"})
    found = list(host_checks.compare([facts, other]))
    assert findings.exit_code(found) == 2 and found[0].problem == "torch, driver differ between hosts"
    lines = [line.split() for line in found[0].seen.splitlines()]
    assert lines == [["torch", "driver"], ["node1", facts.versions["torch"], "-"], ["node2", "2.11.0", "570.86"]]


def test_gpus_and_variables_that_differ(facts):
    first = replace(facts, gpus=[GPU], variables={"NCCL_ALGO": "Ring"})
    other = replace(facts, host="node2", gpus=[GPU, replace(GPU, index=1)], variables={})
    found = [each for each in host_checks.compare([first, other]) if each.problem]
    assert [each.area for each in found] == ["gpus", "environment"] and not findings.exit_code(found)
    assert found[1].seen == "NCCL_ALGO: node1 Ring, node2 not set"


def test_clocks():
    assert not host_checks.clocks({"node1": 0.0, "node2": 0.9, "node3": -0.9}).problem
    found = host_checks.clocks({"node1": 0.0, "node2": 0.01, "node3": -7.2})
    assert found.exit_code == 6 and found.problem == "clocks differ: node3 is 7.2 s behind"


def test_the_slow_pair_is_named():
    speeds = {pair: 1.1e9 for pair in combinations(("node1", "node2", "node3", "node4"), 2)}
    assert not list(host_checks.links(speeds, 1.25e9))[0].problem
    speeds["node1", "node3"] = 1e8
    (found,) = host_checks.links(speeds, 1.25e9)
    assert "node1 - node3 0.10 GB/s" in found.problem and "node2" not in found.problem
    (found,) = host_checks.links(dict.fromkeys(speeds, 1e8), 1.25e9)
    assert found.problem == "all links are far slower than the interface promises"


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_in_disjoint_rounds(count):
    from samecurve.doctor.ranks import rounds

    played = list(rounds(list(range(count))))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in played)
    assert sorted(pair for pairs in played for pair in pairs) == list(combinations(range(count), 2))
    assert len(played) == count - 1 + count % 2


def test_hostfiles(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nnode1 slots=8\nnode2   slots = 4  # half\n\nnode3\n")
    assert read_hostfile(str(path)) == [HostSlots("node1", 8), HostSlots("node2", 4), HostSlots("node3", 1)]
    with pytest.raises(ConfigurationError, match="reads only NAME slots=N") as caught:
        read_hostfile(str(path), for_deepspeed=True)
    assert f"{path}:3: found 'node2   slots = 4'" in str(caught.value) and f"{path}:5: found 'node3'" in str(
        caught.value
    )
    path.write_text("node1 slots=8\nnode2 slots=many\nnode1\nnode4 slots=0\n")
    with pytest.raises(ConfigurationError) as caught:
        read_hostfile(str(path))
    assert str(caught.value).splitlines() == [
        f"{path}:2: found 'node2 slots=many', expected NAME slots=N with N above 0",
        f"{path}:4: found 'node4 slots=0', expected NAME slots=N with N above 0",
        f"{path}: node1 is listed twice; remove one",
    ]
    path.write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="no host"):
        read_hostfile(str(path))
    path.write_bytes("caf\u00e9 slots=2\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="not UTF-8 text"):
        read_hostfile(str(path))


def test_tasks_of_srun():
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    task |= {"SLURM_JOB_ID": "41234", "SLURM_STEP_NODELIST": "node[3-4]"}
    found = launchers.slurm_variables(task, {"node[3-4]": "node3"}.__getitem__)
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node3",
        "MASTER_PORT": "21234",
    }  # fmt: skip
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_STEP_NUM_NODES": "3"}
    for node, count in enumerate(("3", "3", "2")):
        found = launchers.slurm_variables(
            task | uneven | {"SLURM_NODEID": str(node)}, {"node[3-4]": "node3"}.__getitem__
        )
        assert found["LOCAL_WORLD_SIZE"] == count
    assert (
        launchers.slurm_variables(task | {"RANK": "0"})
        == {}
        == launchers.slurm_variables({"SLURM_STEP_NUM_TASKS": "1"})
    )
    assert launchers.slurm_variables(task | {"SLURM_PTY_PORT": "40001"}) == {}  # a shell of srun --pty
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}  # of the batch script itself
    assert launchers.slurm_variables(batch) == {}


def test_the_first_node_without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1"}
    assert launchers.slurm_variables(task | {"SLURM_STEP_NODELIST": "node3"})["MASTER_ADDR"] == "node3"
    with pytest.raises(ConfigurationError, match="MASTER_ADDR: not set.*scontrol.*export MASTER_ADDR"):
        launchers.slurm_variables(task | {"SLURM_STEP_NODELIST": "node[3-4]"})


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, "1"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "4"),  # torchrun
        ({"WORLD_SIZE": "8", "LOCAL_SIZE": "4", "MASTER_ADDR": "node3"}, "4"),  # deepspeed
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}, "8"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node3"}, "1"),  # not known
        # exported in a batch script from SLURM's variables
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, "4"),
    ],
)
def test_the_processes_of_this_host(environ, count):
    assert launchers.local_world_size(environ) == count


def test_a_folder_is_seen_or_not(tmp_path):
    """The follower is another process: a lock does not exclude the process that has it."""
    led = shared_folder.SharedFolder(tmp_path / "run", "x")
    follow = "import sys; from samecurve.doctor import shared_folder as s; from pathlib import Path; "
    follow += "s.PATIENCE_SECONDS = 0.3; print(s.SharedFolder(Path(sys.argv[1]), 'x').follow())"

    def seen_from(folder: Path) -> str:
        command = [sys.executable, "-c", follow, str(folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    with led.led():
        assert seen_from(tmp_path / "run") == ""
        assert seen_from(tmp_path / "elsewhere") == "what the first host writes is not seen here"
        (led.path / ".lock").unlink()  # another file, another lock: as on a mount without flock
        assert "(flock) is not seen" in seen_from(tmp_path / "run")
    assert not list(tmp_path.iterdir())
    assert shared_folder.judge("run", {"node1": "", "node2": "what is written is not seen here"}).exit_code == 7
    assert shared_folder.judge("run", {"node2": "a lock (flock) is not seen here"}).level == "warn"


def test_the_command(tmp_path):
    """Without torch, with what a recipe writes, and with the exit code of its first problem."""
    target = tmp_path / "findings.json"
    command = [sys.executable, "-X", "importtime", "-m", "samecurve", "doctor", "recipes/quickstart.yaml"]
    command += [f"output_dir={tmp_path}/file/run", "--json", str(target)]
    (tmp_path / "file").write_text("not a folder")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 7, done.stderr
    assert "| torch\n" not in done.stderr
    written = json.loads(target.read_text())
    assert written["exit_code"] == 7
    failure = next(each for each in written["findings"] if each["level"] == "FAIL")
    assert failure["area"] == "storage" and "the run needs about 0.09 GB" in failure["seen"]
    assert "2 problems" in done.stdout


def test_the_bytes_of_a_run():
    from samecurve.cli.doctor import needed_bytes

    recipe = load_recipe("recipes/quickstart.yaml", ["checkpoint.keep=3"])
    parameters = 2_164_416  # 12 bytes in each of four checkpoints, 4 in the export
    least, most = needed_bytes(recipe)["output_dir"]
    assert (least, most) == (pytest.approx(parameters * 16, rel=1e-6), pytest.approx(parameters * 52, rel=1e-6))


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ((), 12, 40),  # two checkpoints of four are there; one is removed before the export
        (("checkpoint.every_steps=0",), 4, 16),
        (("export.enabled=false", "checkpoint.keep=9"), 12, 96),
        (("optimizer.name=adamw_8bit",), 6, 22),
        (('optimizer.groups=[{"pattern": "layers.*", "frozen": true}]',), 4, 4),
    ],
)
def test_the_bytes_of_a_run_that_goes_on(settings, least, most, tmp_path, monkeypatch):
    from samecurve.cli.doctor import needed_bytes

    monkeypatch.setattr("samecurve.config.rules_training.importlib.util.find_spec", lambda _: True)
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    recipe = load_recipe("recipes/quickstart.yaml", [f"output_dir={tmp_path}", "checkpoint.keep=4", *settings])
    parameters = 2_164_416
    assert needed_bytes(recipe)["output_dir"] == pytest.approx((parameters * least, parameters * most), rel=1e-6)


def test_an_adapter_needs_next_to_nothing(monkeypatch):
    from samecurve.cli import doctor

    monkeypatch.setattr(doctor.model_shape, "read", lambda _: load_recipe("recipes/quickstart.yaml").model.config)
    assert doctor.needed_bytes(load_recipe("recipes/lora.yaml")) == {}
