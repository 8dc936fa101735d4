"""The shell scripts: those that cannot run in a test run against stand-ins for what they call."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed import run as torchrun

from samecurve.strategy.resolve import resolve_plan

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir())


def test_the_folder_holds_what_the_tests_cover():
    expected = {
        "_environment.sh",
        "bench_gpu.sh",
        "hostfile.example",
        "kubernetes.yaml",
        "quickstart.sh",
        "slurm.sh",
        "test.sh",
    }
    assert expected <= set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".sh")])
def test_a_script_parses_says_what_it_is_for_and_stops_at_the_first_error(name):
    path = ROOT / "scripts" / name
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    lines = path.read_text().splitlines()
    sourced = name.startswith("_")
    assert lines[0 if sourced else 1].startswith("# ")
    assert sourced or "set -euo pipefail" in lines


def text_of_pages(text: str) -> list[str]:
    """Return what a program writes of a page itself: headings, rows of tables and pictures, docstrings left out."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        elif isinstance(node, ast.ImportFrom) and node.module == "benchmarks.markdown":
            found.append(node.module)
        elif isinstance(node, ast.Constant) and re.search(r"<svg|^#+ |^\| ", str(node.value), re.MULTILINE):
            found.append(node.value)
    return found


def test_scripts_leave_pages_to_benchmarks():
    programs = sorted((ROOT / "scripts").glob("*.py"))
    assert len(programs) >= 10
    found = {path.name: text_of_pages(path.read_text()) for path in programs}
    assert {name: texts for name, texts in found.items() if texts} == {}
    for bad in ('"""# Speed"""\nhead = f"# {title}\\n"', "from benchmarks.markdown import table", 'print("<svg>")'):
        assert len(text_of_pages(bad)) == 1


def stand_in(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (1, ""), (75, "requeue 20123\n")])
def test_slurm_starts_every_rank_and_returns_to_the_queue_when_told_to_stop(code, requeued, tmp_path):
    stand_in(tmp_path / "bin", "srun", f'for argument in "$@"; do echo "$argument"; done; exit {code}')
    stand_in(tmp_path / "bin", "scontrol", f'echo "$@" >{tmp_path}/asked')
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "20123", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    script = ["bash", ROOT / "scripts" / "slurm.sh", "run=/a folder"]
    done = subprocess.run(script, env=job, capture_output=True, text=True)
    arguments = ["--strategy", "configs/fsdp.yaml", "data.path=/storage/texts", "output_dir=/storage/runs/pretrain"]
    command = ["--cpu-bind=none", "python", "train.py", "recipes/pretrain.yaml", *arguments, "run=/a folder"]
    assert (done.stdout.splitlines(), done.returncode) == (command, code)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == requeued


def test_deepspeed_reads_the_example_hostfile():
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "scripts" / "hostfile.example"))) == {"10.0.0.1": 8, "10.0.0.2": 8}


def test_kubernetes_pods_find_each_other_and_train(tmp_path, monkeypatch):
    service, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (service["kind"], job["kind"], service["spec"]["clusterIP"]) == ("Service", "Job", "None")
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    command = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    asked = torchrun.get_args_parser().parse_args(command[1:])
    assert (command[0], asked.node_rank, asked.master_addr) == ("torchrun", 1, f"{name}-0.{pod['subdomain']}")
    assert int(asked.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(asked.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    monkeypatch.chdir(ROOT)
    world = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "16"}
    arguments = [word for word in asked.training_script_args if not word.startswith("data.path=")]
    plan = resolve_plan([*arguments, f"data.path={tmp_path}"], world)
    assert (asked.training_script, plan.strategy.name) == ("train.py", "fsdp")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the requirement files, whose python3 makes a .venv that only notes what it is asked to do."""
    pip = 'echo "$@" >> pip.log; [ "$1" != -V ] || echo Python 3.11.7'
    venv = f"mkdir -p .venv/bin; printf '#!/bin/sh\\n%s\\n' '{pip}' > .venv/bin/python; chmod +x .venv/bin/python"
    stand_in(tmp_path / "bin", "python3", f'[ "$1" = -c ] && exit 0; {venv}')
    for tool in ("bash", "cat", "cksum", "mkdir", "chmod"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make_environment(folder: Path, files: str = "requirements.txt") -> subprocess.CompletedProcess:
    code = f"set -euo pipefail; source '{ROOT}/scripts/_environment.sh'; make_environment {files}"
    return subprocess.run(
        ["bash", "-c", code], cwd=folder, env={"PATH": f"{folder}/bin"}, capture_output=True, text=True
    )


def installs(folder: Path) -> list[str]:
    return [line for line in (folder / "pip.log").read_text().splitlines() if "install" in line]


def test_environment_is_installed_under_constraints_and_only_once(checkout):
    for _ in range(2):
        made = make_environment(checkout)
        assert made.returncode == 0, made.stderr
        assert installs(checkout) == ["-m pip install --quiet -c constraints.txt -r requirements.txt"]
    with open(checkout / "constraints.txt", "a") as constraints:
        constraints.write("wheel<1\n")
    make_environment(checkout)
    assert len(installs(checkout)) == 2


def test_another_script_installs_only_what_is_its_own(checkout):
    for files in ("requirements.txt", "requirements.txt requirements-dev.txt", "requirements.txt"):
        assert make_environment(checkout, files).returncode == 0
    assert [line.partition("constraints.txt ")[2] for line in installs(checkout)] == [
        "-r requirements.txt",
        "-r requirements-dev.txt",
    ]


def test_a_machine_without_python_is_told_what_to_install(checkout):
    (checkout / "bin" / "python3").unlink()
    made = make_environment(checkout)
    assert made.returncode != 0
    [line] = made.stderr.splitlines()
    assert line.startswith("error: python3 >= 3.10 with the venv module is needed")


@pytest.mark.parametrize(
    ("gpus", "strategy", "processes", "batch"),
    [
        (0, "ddp", 2, None),
        (1, "single", 1, 8),
        (2, "ddp", 2, 8),
        (3, "ddp", 3, 8),
        (8, "ddp", 8, 8),
        (16, "ddp", 8, 8),
    ],
)
def test_quickstart_takes_the_gpus_that_are_there(gpus, strategy, processes, batch, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    stand_in(tmp_path / ".venv" / "bin", "python", f'[ "$1" = -c ] && echo {gpus} || echo "$@"')
    command = ["bash", tmp_path / "scripts" / "quickstart.sh", "steps=3"]
    [started] = [
        line
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        if line.startswith("train.py ")
    ]
    options = f"--strategy configs/{strategy}.yaml --num_processes {processes}"
    changed = f" batch.micro_batch_size={batch}" if batch else ""
    assert started == f"train.py recipes/quickstart.yaml {options}{changed} steps=3"
    monkeypatch.chdir(ROOT)
    resolve_plan(started.split()[1:], {})


@pytest.mark.parametrize(
    ("units", "distributed", "expected"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 1, 1), (5, 0, 0), (0, 5, 0), (1, 5, 1), (5, 5, 5)],
)
def test_both_parts_of_the_tests_decide_the_exit_code(units, distributed, expected, tmp_path):
    """5 is pytest's code where no test was chosen."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts" / "_environment.sh").write_text('say() { echo "$@"; }\nmake_environment() { :; }\n')
    with open(tmp_path / "scripts" / "_environment.sh", "a") as file:
        file.write("install_packages() { :; }\n")
    pytest_body = f'case "$*" in *tests/unit*) echo of the units; exit {units};; *) exit {distributed};; esac'
    for name, body in {"ruff": "exit 0", "pyright": "exit 0", "python": "exit 1", "pytest": pytest_body}.items():
        stand_in(tmp_path / "bin", name, body)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        ["bash", "scripts/test.sh", "-k", "loss"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.count("of the units")) == (expected, 1), done.stdout + done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_scripts_start_in_a_folder_with_a_space(tmp_path):
    folder = tmp_path / "a folder"
    python, script, program = (folder / ".venv" / "bin" / name for name in ("python", "deepspeed", "program"))
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    program.write_bytes(b"\x7fELF\0")
    script.write_text(f"#!{python}\nimport sys\nprint(sys.argv[1:], __name__)\n")
    script.chmod(0o755)
    code = f"set -euo pipefail; source '{ROOT}/scripts/_environment.sh'; quote_python; quote_python"
    subprocess.run(["bash", "-c", code], cwd=folder, check=True)
    assert subprocess.check_output([script, "a b", "c"], text=True) == "['a b', 'c'] __main__\n"
    assert program.read_bytes() == b"\x7fELF\0"


@pytest.mark.parametrize("is_clone", [True, False])
def test_ci_tests_a_clone_in_an_unusual_folder(is_clone, tmp_path):
    """Its name is the package's, and the path above needs quotes and more than ASCII. Nothing is left of it."""
    checkout, temporary = tmp_path / "checkout", tmp_path / "temporary"
    for folder in (temporary, checkout / ".venv" / "bin", checkout / "scripts"):
        folder.mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").touch()
    (checkout / "scripts" / "test.sh").write_text('pwd; printf "<%s>" "$@"; echo $(ls -A); exit 3')
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    if is_clone:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", checkout]
        for words in (["init", "--quiet"], ["add", ".ci", "scripts"], ["commit", "--quiet", "-m", "all"]):
            subprocess.run([*git, *words], check=True)
    command, environment = [checkout / ".ci" / "run", "-k", "a b"], os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    told = ["== not committed, so not tested:", "?? .venv/"] if is_clone else []
    *before, folder, content = done.stdout.splitlines()
    assert (done.returncode, before) == (3, told), done.stderr
    assert re.fullmatch(rf"{temporary}/[^/]+/täglich neu/samecurve", folder)
    assert content == "<-k><a b>" + (".ci .git scripts" if is_clone else ".ci scripts")
    assert list(temporary.iterdir()) == []
