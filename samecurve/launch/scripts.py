"""Scripts and manifests that start a run on nodes, and the text that `python -m samecurve launch` prints."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.launch.target import CLONE, CLUSTERS, SCRIPT, Target, Variable, check_words, command
from samecurve.specs.environment import IN_CLONE

# Variables that the deepspeed launcher hands to other nodes only if .deepspeed_env lists them.
PASSED_ON = ("HF_HOME", "HF_HUB_OFFLINE", "SAMECURVE_CACHE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
SECONDS_TO_SAVE = 300  # between SIGTERM and the end
# torchrun gives its processes 30 seconds after SIGTERM unless set otherwise; saving a large model takes longer
TORCHRUN_LIMIT, TORCHRUN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 270


def files(launcher: str, target: Target, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the text of each file by its name.

    Args:
        environ: some of its variables are written down for nodes that deepspeed starts.
    """
    if launcher == "kubernetes":
        return {"kubernetes.yaml": job(target)}
    if launcher == "trainjob":
        return {"trainjob.yaml": train_job(target)}
    if launcher == "slurm":
        return {"slurm.sh": _slurm(target)}
    if launcher == "deepspeed":
        return {"deepspeed.sh": _deepspeed(target), **needed(target, environ)}
    return {f"{launcher}.sh": _on_each_node(launcher, target)}


def needed(target: Target, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the files that the deepspeed launcher reads. Raises as `check_words` for a variable of `environ`."""
    listed = target.listed or target.hosts
    hostfile = "".join(f"{host.name} slots={host.slots}\n" for host in listed)
    passed = {name: environ[name] for name in PASSED_ON if name in environ}
    check_words(*(f"{name}={value}" for name, value in passed.items()))
    variables = "".join(f"{name}={value}\n" for name, value in {"TOKENIZERS_PARALLELISM": "false", **passed}.items())
    return ({} if target.hostfile else {"hostfile": hostfile}) | {".deepspeed_env": variables}


def environment_file(target: Target) -> str:
    """Return the path for DS_ENV_FILE, by which the deepspeed launcher finds the variables to hand to other nodes."""
    return os.path.join(target.folder, ".deepspeed_env")


def starts(launcher: str, target: Target) -> list[tuple[str, list[str]]]:
    """Return (host, words to run there) for each host; "" is the machine from which the run is started."""
    if launcher == "deepspeed":
        return [("" if target.nodes > 1 else target.hosts[0].name, command(launcher, target))]
    return [(host.name, command(launcher, target, node)) for node, host in enumerate(target.hosts)]


def text(launcher: str, target: Target, environ: Mapping[str, str] = os.environ) -> str:
    """Return what starts the run: the file for a cluster, else the command of each host, or a script for any host.

    Raises:
        ConfigurationError: the deepspeed launcher has no addresses to log in to.
    """
    if launcher in CLUSTERS:
        return "".join(files(launcher, target).values())
    known = target.named or target.nodes == 1
    if launcher != "deepspeed":
        if not known:
            return _on_each_node(launcher, target)
        return "".join(_about(host, target) + f"{shlex.join(words)}\n" for host, words in starts(launcher, target))
    if not known:
        raise ConfigurationError(
            "--launcher deepspeed: it logs in to the nodes by ssh; name them by --hosts or --hostfile"
        )
    lines = [f"mkdir -p {shlex.quote(target.folder)}"]
    for name, content in needed(target, environ).items():
        lines += [f"cat >{shlex.quote(os.path.join(target.folder, name))} <<'END'", f"{content}END"]
    lines.append(f"export DS_ENV_FILE={shlex.quote(environment_file(target))}")
    [(host, words)] = starts(launcher, target)
    return _about(host, target) + "\n".join([*lines, shlex.join(words), ""])


def _about(host: str, target: Target) -> str:
    return f"# on {host}, in the repository's root\n" if host and target.named else ""


def _words(words: Sequence[str]) -> str:
    """Quote the words for a shell, but let it fill in HEAD, RANK and PORT; lines break before train.py."""
    quoted = [f'"{word}"' if isinstance(word, Variable) else shlex.quote(word) for word in words]
    cut = quoted.index(shlex.quote(SCRIPT))
    return f'{" ".join(quoted[:cut])} \\\n    {" ".join(quoted[cut:])} "$@"'


def _script(target: Target, start: str, where: str, lines: Sequence[str]) -> str:
    """Put a header before the lines: what is started, how, and where."""
    about = f"# {Path(target.recipe).stem} on {target.size}."
    note = f"# Start it in the repository's root{where}. More recipe values may follow:"
    return "\n".join(["#!/usr/bin/env bash", about, note, f"#   {start}", *lines, ""])


def _on_each_node(launcher: str, target: Target) -> str:
    """Return the script of a launcher that is started on every node."""
    path = shlex.quote(target.path(f"{launcher}.sh"))
    # accelerate launch runs torchrun
    limit = f"export {TORCHRUN_LIMIT}=${{{TORCHRUN_LIMIT}:-{TORCHRUN_SECONDS}}}   # to save in, after SIGTERM"
    lines = ["set -euo pipefail", limit]
    if target.nodes == 1:
        return _script(target, f"bash {path}", "", [*lines, f"exec {_words(command(launcher, target))}"])
    head = target.hosts[0].name
    lines.append(f"HEAD=${{HEAD:-{head}}}" if target.named else ': "${HEAD:?set it to the address of the first node}"')
    lines.append(f': "${{RANK:?set it to the number of this node, 0 to {target.nodes - 1}}}"')
    lines.append(f"exec {_words(command(launcher, target))}")
    return _script(target, f"HEAD={head} RANK=0 bash {path}", ", on each node", lines)


def _deepspeed(target: Target) -> str:
    path = shlex.quote(target.path("deepspeed.sh"))
    lines = ["set -euo pipefail", f"export DS_ENV_FILE={shlex.quote(environment_file(target))}"]
    if target.nodes > 1:
        lines.insert(0, "# It logs in to the nodes of the hostfile by ssh without a password.")
    if target.nodes > 1 and not target.named:
        lines.insert(1, "# Write their addresses there first.")
    if target.nodes > 1:
        lines += _QUOTED_FOR_PDSH
    where = "" if target.nodes == 1 else ", on the first node"
    return _script(target, f"bash {path}", where, [*lines, f"exec {_words(command('deepspeed', target))}"])


# target.py does the same with the words that it knows
_QUOTED_FOR_PDSH = r"""
# the nodes' shells read these words, and pdsh fills in %h, %n and %u; DeepSpeed itself quotes words with a space alone
for word; do
    if [[ $word == *" "* && $word == *[\$\`\\]* ]]; then
        echo "$word: has a space and one of \$, \` and \\; use another launcher, such as torchrun" >&2
        exit 2
    fi
    word=${word//%/%%}
    [[ $word == *" "* ]] || word=${word@Q}
    set -- "${@:2}" "$word"
done""".splitlines()


def _slurm(target: Target) -> str:
    path = shlex.quote(target.path("slurm.sh"))
    devices = target.devices_per_node
    # Without B: the signal goes to srun's ranks and not to this script, which waits for their exit code. Without append
    # a job that returns to the queue would overwrite its log.
    options = (
        "--job-name=samecurve", f"--nodes={target.nodes}", f"--ntasks-per-node={devices}",
        f"--gpus-per-node={devices}", "--exclusive", f"--signal=TERM@{SECONDS_TO_SAVE}", "--requeue",
        "--open-mode=append",
    )  # fmt: skip
    lines = [
        "#",
        "# Submit it on a file system that all nodes see, after .venv is there (scripts/quickstart.sh makes it). Five",
        "# minutes before its time is up, the job is asked to stop: it saves, returns to the queue and resumes from",
        "# there. So does a job that is preempted, within the partition's GraceTime. A job whose node fails returns to",
        "# the queue, too, and resumes from its last checkpoint.",
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        'export PATH="$PWD/.venv/bin:$PATH"',
        "",
        "# one task is one rank; SLURM would bind each to as many cores as it asked for, which is one",
        "code=0",
        f"srun --cpu-bind=none {_words(command('slurm', target))} || code=$?",
        "",
        "# 75: stopped on request, with a checkpoint",
        'if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    return _script(target, f"sbatch {path}", "", lines)


_VOLUME = os.path.dirname(CLONE)
_INSTALLED, _FOLDER = ("requirements.txt", "this repository") if IN_CLONE else ("samecurve", "the folder of your files")


def _header(target: Target, name: str, pods: str) -> str:
    return f"""\
# {Path(target.recipe).stem} on {target.size}: {pods}, one process per GPU.
# Edit the lines with <-, then:   kubectl apply -f {target.path(name)}
# After an interruption, delete the job and apply the file again: the run resumes from its last checkpoint.
"""


def _command(launcher: str, target: Target, indent: int) -> str:
    # Kubernetes fills in $(NAME) and makes $ of $$; YAML reads json's two escapes for an emoji as two broken characters
    words = (word if isinstance(word, Variable) else word.replace("$", "$$") for word in command(launcher, target))
    return "\n".join(f"{' ' * indent}- {json.dumps(word, ensure_ascii=False)}" for word in words)


def job(target: Target) -> str:
    """Return the manifests of a headless Service and an Indexed Job."""
    return f"""\
{_header(target, "kubernetes.yaml", "a pod for each node")}\
apiVersion: v1
kind: Service
metadata:
  name: samecurve
spec:
  clusterIP: None                  # headless: it only gives the pods names, such as samecurve-0.samecurve
  publishNotReadyAddresses: true   # they look for each other while they start
  selector:
    job-name: samecurve            # a label that Kubernetes puts on the job's pods
---
apiVersion: batch/v1
kind: Job
metadata:
  name: samecurve
spec:
  completionMode: Indexed          # each pod has a number, which is its node rank, and a host name that ends with it
  completions: {target.nodes}
  parallelism: {target.nodes}
  backoffLimit: 0                  # one pod alone cannot be replaced: the others wait for the one that they began with
  template:
    spec:
      subdomain: samecurve         # the Service
      restartPolicy: Never
      terminationGracePeriodSeconds: {SECONDS_TO_SAVE}   # time to save after a pod is asked to end
      containers:
        - name: train
          image: example/samecurve:latest   # <- with {_INSTALLED} installed, and g++ for offload
          workingDir: {CLONE}    # <- {_FOLDER}, on a volume that all nodes see
          command:
{_command("kubernetes", target, 12)}
          env:
            - {{name: {TORCHRUN_LIMIT}, value: "{TORCHRUN_SECONDS}"}}   # torchrun's own limit for it
          resources:
            limits:
              nvidia.com/gpu: {target.devices_per_node}
          volumeMounts:
            - {{name: storage, mountPath: {_VOLUME}}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: storage
          persistentVolumeClaim: {{claimName: storage}}   # <- a claim that many nodes may write to (ReadWriteMany)
        - name: shm
          emptyDir: {{medium: Memory}}        # NCCL's, between the GPUs of a node; a container's default is 64 MiB
"""


def train_job(target: Target) -> str:
    """Return the manifest of a TrainJob (trainer.kubeflow.org/v1alpha1 with runtimePatches, Kubeflow Trainer 2.2).

    It is patched into the runtime `torch-distributed`, which Kubeflow Trainer installs: the operator makes the pods and
    gives torchrun its options as variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the like).
    """
    return f"""\
{_header(target, "trainjob.yaml", "Kubeflow Trainer makes a pod for each node")}\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: samecurve
spec:
  runtimeRef:
    name: torch-distributed        # it comes with Kubeflow Trainer
  trainer:
    image: example/samecurve:latest   # <- with {_INSTALLED} installed, and g++ for offload
    numNodes: {target.nodes}
    numProcPerNode: {target.devices_per_node}
    command:                       # {CLONE} is {_FOLDER}, on a volume that all nodes see   <-
{_command("trainjob", target, 6)}
    env:
      - {{name: {TORCHRUN_LIMIT}, value: "{TORCHRUN_SECONDS}"}}   # torchrun gives 30 seconds to save
    resourcesPerNode:
      limits:
        nvidia.com/gpu: {target.devices_per_node}
  runtimePatches:
    - manager: samecurve           # who owns this patch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: {SECONDS_TO_SAVE}   # time to save after a pod is asked to end
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: storage, mountPath: {_VOLUME}}}
                              - {{name: shm, mountPath: /dev/shm}}
                        volumes:
                          - name: storage
                            persistentVolumeClaim: {{claimName: storage}}   # <- one that many nodes may write to
                          - name: shm
                            emptyDir: {{medium: Memory}}   # NCCL's, between the GPUs of a node
"""
