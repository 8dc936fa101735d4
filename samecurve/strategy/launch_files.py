"""Scripts that start a run on one or more nodes, for five launchers. scripts/ has the forms for jobs without a plan."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.strategy.launchers import Ancestor
from samecurve.strategy.plan import Plan
from samecurve.strategy.resolve import resolve_plan

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "slurm", "kubernetes")
PORT = 29500
SECONDS_TO_SAVE = 300  # between SIGTERM and the end
# torchrun gives its processes 30 seconds after SIGTERM unless it is told otherwise; saving a large model takes longer
TORCHRUN_SECONDS = 270
HEAD, RANK = "$HEAD", "$RANK"  # set by the script, or by who starts it on each node
# Variables that the deepspeed launcher hands to other nodes only if .deepspeed_env lists them.
PASSED_ON = ("HF_HOME", "HF_HUB_OFFLINE", "SAMECURVE_CACHE", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Target:
    """What is to be started, and where.

    Attributes:
        folder: of the files; a path that is the same on all nodes, or relative to the repository.
        recipe, strategy, overrides: as train.py takes them.
        hosts: addresses of the nodes, the first one's is where they meet; empty: not known yet.
    """

    folder: str
    recipe: str
    strategy: str
    overrides: tuple[str, ...]
    nodes: int
    devices_per_node: int
    hosts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' addresses, or names to be replaced by them."""
        if self.nodes == 1:
            return self.hosts or ("localhost",)
        return self.hosts or tuple(f"node-{index}" for index in range(self.nodes))

    @property
    def script(self) -> list[str]:
        return ["train.py", self.recipe]


def check_launchers(names: Sequence[str]) -> None:
    """Raises ConfigurationError for an unknown name."""
    for name in names:
        if name not in LAUNCHERS:
            raise ConfigurationError(f"--launcher {name}: expected one or more of {', '.join(LAUNCHERS)}")


def command(launcher: str, target: Target) -> list[str]:
    """Return the words that start the run on a node; HEAD and RANK stand for the shell's variables."""
    nodes, devices = str(target.nodes), str(target.devices_per_node)
    under = [*target.script, "--strategy", target.strategy, *target.overrides]
    if launcher == "accelerate":
        sizes = ["--num_machines", nodes, "--num_processes", str(target.world_size), "--machine_rank", RANK]
        meeting = ["--main_process_ip", HEAD, "--main_process_port", str(PORT)]
        start = ["accelerate", "launch", "--config_file", target.strategy, *sizes, *meeting]
        return [*start, *target.script, *target.overrides]
    if launcher == "deepspeed":
        # the launcher would log in to a single node by ssh, too, to ask it for its name
        alone = ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"] if target.nodes == 1 else []
        hostfile = os.path.join(target.folder, "hostfile")
        return ["deepspeed", "--hostfile", hostfile, *alone, "--master_port", str(PORT), *under]
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{HEAD}:{PORT}"]
    if launcher == "slurm":
        meeting[-1] = f"{HEAD}:$PORT"
        meeting += ["--rdzv_id", "$SLURM_JOB_ID"]
    if launcher == "kubernetes":
        rank, address = "--node_rank=$(JOB_COMPLETION_INDEX)", "--master_addr=samecurve-0.samecurve"
        return ["torchrun", f"--nnodes={nodes}", rank, f"--nproc_per_node={devices}", address,
                f"--master_port={PORT}", *under]  # fmt: skip
    return ["torchrun", "--nnodes", nodes, "--nproc_per_node", devices, *meeting, *under]


def files(launcher: str, target: Target, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the text of each file by its name.

    Args:
        environ: some of its variables are written down for nodes that deepspeed starts.
    """
    if launcher == "kubernetes":
        return {"kubernetes.yaml": _kubernetes(target)}
    if launcher == "slurm":
        return {"slurm.sh": _slurm(target)}
    if launcher == "deepspeed":
        hostfile = "".join(f"{name} slots={target.devices_per_node}\n" for name in target.names)
        passed = {name: environ[name] for name in PASSED_ON if name in environ}
        variables = "".join(
            f"{name}={value}\n" for name, value in {"TOKENIZERS_PARALLELISM": "false", **passed}.items()
        )
        return {"deepspeed.sh": _deepspeed(target), "hostfile": hostfile, ".deepspeed_env": variables}
    return {f"{launcher}.sh": _on_each_node(launcher, target)}


def _words(words: Sequence[str]) -> str:
    """Quote the words for a shell, but let it fill in HEAD, RANK and PORT; lines break before train.py."""
    quoted = [f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in words]
    cut = quoted.index("train.py")
    return f'{" ".join(quoted[:cut])} \\\n    {" ".join(quoted[cut:])} "$@"'


def _script(target: Target, start: str, told: str, lines: Sequence[str]) -> str:
    """Put a header before the lines: what is started, how, and where."""
    about = f"# {Path(target.recipe).stem} on {target.nodes} x {target.devices_per_node} devices."
    where = f"# Start it in the repository's root{told}. More recipe values may follow:"
    return "\n".join(["#!/usr/bin/env bash", about, where, f"#   {start}", *lines, ""])


def _on_each_node(launcher: str, target: Target) -> str:
    """Return the script of a launcher that is started on every node."""
    path = shlex.quote(os.path.join(target.folder, f"{launcher}.sh"))
    numbered, alone = launcher == "accelerate", target.nodes == 1
    head = target.names[0] if target.hosts else "127.0.0.1" if alone else ""
    lines = ["set -euo pipefail"]
    lines.append(f"HEAD=${{HEAD:-{head}}}" if head else ': "${HEAD:?set it to the address of the first node}"')
    if numbered:
        last = target.nodes - 1
        lines.append("RANK=${RANK:-0}" if alone else f': "${{RANK:?set it to the number of this node, 0 to {last}}}"')
    started = "" if alone else f"HEAD={target.names[0]} {'RANK=0 ' if numbered else ''}"
    told = "" if alone else ", on each node"
    return _script(target, f"{started}bash {path}", told, [*lines, f"exec {_words(command(launcher, target))}"])


def _deepspeed(target: Target) -> str:
    path = shlex.quote(os.path.join(target.folder, "deepspeed.sh"))
    lines = ["set -euo pipefail", f"export DS_ENV_FILE={shlex.quote(os.path.join(target.folder, '.deepspeed_env'))}"]
    if target.nodes > 1:
        lines.insert(0, "# It logs in to the nodes of the hostfile by ssh without a password.")
    if target.nodes > 1 and not target.hosts:
        lines.insert(1, "# Write their addresses there first.")
    told = "" if target.nodes == 1 else ", on the first node"
    return _script(target, f"bash {path}", told, [*lines, f"exec {_words(command('deepspeed', target))}"])


def _slurm(target: Target) -> str:
    path = shlex.quote(os.path.join(target.folder, "slurm.sh"))
    options = (
        "--job-name=samecurve", f"--nodes={target.nodes}", "--ntasks-per-node=1",
        f"--gpus-per-node={target.devices_per_node}", "--exclusive", f"--signal=TERM@{SECONDS_TO_SAVE}", "--requeue",
        "--open-mode=append",
    )  # fmt: skip
    lines = [
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        'export PATH="$PWD/.venv/bin:$PATH"',
        "",
        "# every node meets at the first one; the port depends on the job, so that two jobs on one node do not collide",
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "PORT=$((20000 + SLURM_JOB_ID % 20000))",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={TORCHRUN_SECONDS}",
        "",
        f"exec srun {_words(command('slurm', target))}",
    ]
    return _script(target, f"sbatch {path}", "", lines)


def _kubernetes(target: Target) -> str:
    words = "\n".join(f"            - {json.dumps(word)}" for word in command("kubernetes", target))
    return f"""\
# {Path(target.recipe).stem} on {target.nodes} x {target.devices_per_node} devices: a pod for each node.
# Edit the lines with <-, then:   kubectl apply -f {os.path.join(target.folder, "kubernetes.yaml")}
apiVersion: v1
kind: Service
metadata:
  name: samecurve
spec:
  clusterIP: None                  # headless: it only gives the pods names, such as samecurve-0.samecurve
  publishNotReadyAddresses: true   # they look for each other while they start
  selector:
    job-name: samecurve
---
apiVersion: batch/v1
kind: Job
metadata:
  name: samecurve
spec:
  completionMode: Indexed          # each pod has a number, which is its node rank
  completions: {target.nodes}
  parallelism: {target.nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: samecurve
      restartPolicy: Never
      terminationGracePeriodSeconds: {SECONDS_TO_SAVE}
      containers:
        - name: train
          image: example/samecurve:latest   # <- with requirements.txt installed
          workingDir: /storage/samecurve    # <- this repository, on a volume that all nodes see
          command:
{words}
          env:
            - {{name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{TORCHRUN_SECONDS}"}}
          resources:
            limits:
              nvidia.com/gpu: {target.devices_per_node}
          volumeMounts:
            - {{name: storage, mountPath: /storage}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: storage
          persistentVolumeClaim: {{claimName: storage}}   # <- a claim that many nodes may write to
        - name: shm
          emptyDir: {{medium: Memory}}
"""


def read_back(launcher: str, target: Target, words: Sequence[str], more: Sequence[str] = ()) -> Plan:
    """Resolve what a launcher's processes would: the plan of a run.

    Args:
        words: the starting command, as `command` returns it or as a script made it.
        more: overrides that the user still has to give.

    Raises:
        ConfigurationError, TopologyError: as the run would.
    """
    argv = [*words[words.index("train.py") + 1 :], *more]
    environ = {"WORLD_SIZE": str(target.world_size), "RANK": "0"}
    if launcher == "accelerate":
        parents = [Ancestor(tuple(words), os.getcwd())]
        return resolve_plan(argv, {**environ, "ACCELERATE_MIXED_PRECISION": "no"}, lambda: parents)
    if launcher == "deepspeed":
        return resolve_plan(["--local_rank=0", *argv], environ)
    return resolve_plan(argv, {**environ, "TORCHELASTIC_RUN_ID": "none"})
