"""The run to start, its hosts, and the command line that starts it under each launcher."""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.launch.hosts import PORT, HostSlots
from samecurve.specs.environment import IN_CLONE, ROOT
from samecurve.strategy.launchers import Ancestor
from samecurve.strategy.plan import Plan
from samecurve.strategy.resolve import read_files, resolve_plan
from samecurve.strategy.translation import read_as_written

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "slurm", "kubernetes", "trainjob")
CLUSTERS = LAUNCHERS[3:]  # they find machines of their own
SCRIPT = "train.py" if IN_CLONE else str(ROOT / "train.py")
MODULE = "samecurve.train"  # the same in pods with an installed samecurve, wherever it is there
MOST_LOSSES = "1000"  # of hosts in one run; repeated failures at one step end it earlier, see run/run_directory.py


class Variable(str):
    """A word with a variable for the shell, or for Kubernetes, to fill in. Other words stay as they are written."""


HEAD, RANK = Variable("$HEAD"), Variable("$RANK")  # set by the script, or by hand on each node
CLONE = "/storage/samecurve"  # of this repository, on a volume of the pods


@dataclass(frozen=True)
class Target:
    """The run to start, and its hosts.

    Attributes:
        recipe, strategy, overrides: as train.py takes them.
        hosts: with the number of processes of each; they meet at the first one.
        named: whether the hosts' names are known; else they stand for any nodes.
        folder: of the files; a path that is the same on all nodes, or relative to the repository.
        file: where the script or manifest goes, if not into `folder` under its own name.
        hostfile: the path of the user's own hostfile; "": one is written from `hosts`.
        listed: the hosts in the user's hostfile.
        selection: the deepspeed launcher's filter, such as ("--include", "node1:1,2@node2:0").
        min_nodes: the fewest hosts that go on when others are lost; 0 where all are needed.
    """

    recipe: str
    strategy: str
    overrides: tuple[str, ...]
    hosts: tuple[HostSlots, ...]
    named: bool = False
    folder: str = "runs/launch"
    file: str = ""
    port: int = PORT
    hostfile: str = ""
    listed: tuple[HostSlots, ...] = ()
    selection: tuple[str, ...] = ()
    min_nodes: int = 0

    def __post_init__(self) -> None:
        """Raise as `check_words`."""
        check_words(self.recipe, self.strategy, *self.overrides, self.folder, self.file, self.hostfile, *self.selection)

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    @property
    def world_size(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def devices_per_node(self) -> int:
        """Number of processes on each host. Raises ConfigurationError if the hosts differ."""
        counts = {host.slots for host in self.hosts}
        if len(counts) > 1:
            numbers = ", ".join(f"{host.name} has {host.slots}" for host in self.hosts)
            raise ConfigurationError(f"hosts: {numbers} slots; only the deepspeed launcher allows different numbers")
        return counts.pop()

    @property
    def size(self) -> str:
        """The size in words: `2 x 8 devices`."""
        counts = {host.slots for host in self.hosts}
        return f"{self.nodes} x {counts.pop()} devices" if len(counts) == 1 else f"{self.world_size} devices"

    def path(self, name: str) -> str:
        """Return the path of the script or manifest."""
        return self.file or os.path.join(self.folder, name)

    @property
    def script(self) -> list[str]:
        return [SCRIPT, self.recipe]


def check_words(*words: str) -> None:
    """Raise ConfigurationError for what no script can hold.

    A control character would end a comment or a line of it; of a name that is not UTF-8 (Cs) another one would be left.
    """
    for word in words:
        kinds = {unicodedata.category(character) for character in word}
        if kinds & {"Cc", "Zl", "Zp", "Cs"}:
            what = "is not UTF-8" if "Cs" in kinds else "has a control character"
            raise ConfigurationError(f"{word!r}: {what}, which no script can hold; rename it")


def unnamed(nodes: int, devices_per_node: int) -> tuple[HostSlots, ...]:
    """Return hosts with placeholders for names, which the user replaces by addresses; localhost for a single host."""
    if nodes == 1:
        return (HostSlots("localhost", devices_per_node),)
    return tuple(HostSlots(f"node-{index}", devices_per_node) for index in range(nodes))


def check_launchers(names: Sequence[str], option: str = "--launcher") -> None:
    """Raise ConfigurationError for an unknown name."""
    for name in names:
        if name not in LAUNCHERS:
            raise ConfigurationError(f"{option} {name}: expected one or more of {', '.join(LAUNCHERS)}")


def command(launcher: str, target: Target, node: int | None = None) -> list[str]:
    """Return the words that start the run on a node.

    Args:
        node: the node's number. None: words for any of several nodes, with the shell's variables HEAD and RANK.
    """
    under = [*target.script, "--strategy", target.strategy, *target.overrides]
    if launcher == "deepspeed":
        given = map(_for_pdsh, under[1:]) if target.nodes > 1 else under[1:]
        return [*_deepspeed(target), SCRIPT, *given]
    nodes, devices, port = str(target.nodes), str(target.devices_per_node), str(target.port)
    rank = RANK if node is None else str(node)
    head = HEAD if node is None else target.hosts[0].name
    if launcher == "accelerate":
        if not read_as_written(target.strategy).accelerate.name:
            text = "a DeepSpeed JSON is no config file of accelerate launch"
            raise ConfigurationError(f"--strategy {target.strategy}: {text}; use --launcher torchrun")
        sizes = ["--num_machines", nodes, "--num_processes", str(target.world_size)]
        meeting = ["--machine_rank", rank, "--main_process_ip", head] if target.nodes > 1 else []
        if target.nodes > 1 and read_files(target.strategy).deepspeed.name:  # its default starts all hosts from each
            meeting += ["--deepspeed_multinode_launcher", "standard"]
        start = ["accelerate", "launch", "--config_file", target.strategy, *sizes, *meeting]
        # without --strategy: accelerate's config file is the strategy
        return [*start, "--main_process_port", port, *target.script, *target.overrides]
    if launcher == "slurm":
        return ["python", *under]  # srun starts every rank; strategy/launchers.py reads its variables
    if not IN_CLONE and launcher in ("kubernetes", "trainjob"):
        files = map(_shipped_name, (target.recipe, "--strategy", target.strategy))
        under = ["-m", MODULE, *files, *target.overrides]
    if launcher == "kubernetes":
        meeting = [Variable("--node_rank=$(JOB_COMPLETION_INDEX)"), f"--nproc_per_node={devices}"]
        meeting += ["--master_addr=samecurve-0.samecurve", f"--master_port={port}"]
        return ["torchrun", f"--nnodes={nodes}", *meeting, *under]
    if launcher == "trainjob":  # the operator gives torchrun's options as variables, but no working directory
        return ["bash", "-c", Variable(f'cd {CLONE} && exec torchrun "$@"'), "torchrun", *under]
    if target.min_nodes and node is not None:
        return [*_elastic(target, node), *under]
    # the number of the node decides who waits for the others: --rdzv_backend c10d looks the host's own name up instead,
    # which many hosts resolve to 127.0.1.1
    meeting = ["--node_rank", rank, "--master_addr", head] if target.nodes > 1 else []
    sizes = ["--nnodes", nodes, "--nproc_per_node", devices]
    return ["torchrun", *sizes, *meeting, "--master_port", port, *under]


def _elastic(target: Target, node: int) -> list[str]:
    """Return torchrun's own words for hosts that may be lost and come back, all but the first one.

    torch 2.13 tells each agent once where the ranks meet (elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous); a
    host that comes back would wait for an address that nobody writes again. Without a shared store each round has a new
    one.
    """
    sizes = ["--nnodes", f"{target.min_nodes}:{target.nodes}", "--nproc_per_node", str(target.devices_per_node)]
    head, own = target.hosts[0].name, target.hosts[node].name
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{head}:{target.port}", "--rdzv_id", "samecurve"]
    meeting += ["--rdzv_conf", f"is_host={int(node == 0)}", "--local_addr", own]
    return ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", *sizes, "--max_restarts", MOST_LOSSES, *meeting]


def _deepspeed(target: Target) -> list[str]:
    """Return the launcher's own words. It would log in to a single host by ssh, too, to ask it for its name."""
    hostfile = target.hostfile or os.path.join(target.folder, "hostfile")
    meeting = []
    if target.nodes == 1:
        meeting = ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    elif target.named:
        # asked for its address, a host names its first one, which may be of another network; and the launcher's own try
        # of ssh leaves out PDSH_SSH_ARGS_APPEND
        meeting = ["--no_ssh_check", "--master_addr", target.hosts[0].name]
    return ["deepspeed", "--hostfile", hostfile, *target.selection, *meeting, "--master_port", str(target.port)]


def _shipped_name(path: str) -> str:
    """Return the name of a file of the installed package by which train.py finds it on any machine; else the path."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else path


def _for_pdsh(word: str) -> str:
    """Return what DeepSpeed's launcher is given, so that a process on another host gets the word.

    The shells of the hosts read what it sends. DeepSpeed 0.19 (launcher/multinode_runner.py, PDSHRunner) puts double
    quotes around a word with a space, and leaves others as they are; pdsh fills in %h, %n and %u.
    """
    if " " in word and set(word) & set("$`\\"):
        text = "has a space and one of $, ` and \\, which deepspeed gives to the other hosts' shells to fill in"
        raise ConfigurationError(f"{word}: {text}; rename it, or use another launcher, such as torchrun")
    word = word.replace("%", "%%")
    return word if " " in word else shlex.quote(word)


def _from_pdsh(word: str) -> str:
    """Return the word that the process gets. The inverse of `_for_pdsh`."""
    return (word if " " in word else shlex.split(word)[0]).replace("%%", "%")


def read_back(launcher: str, target: Target, words: Sequence[str], more: Sequence[str] = ()) -> Plan:
    """Resolve what a launcher's processes would: the plan of a run.

    Args:
        words: the starting command, as `command` returns it or as a script made it.
        more: overrides that the user still has to give.

    Raises:
        ConfigurationError, TopologyError: as the run would.
    """
    argv = [*words[words.index(SCRIPT if SCRIPT in words else MODULE) + 1 :], *more]
    # here and below: the variables by which strategy/launchers.py tells the launchers apart
    environ = {"WORLD_SIZE": str(target.world_size), "RANK": "0"}
    if launcher == "accelerate":
        parents = [Ancestor(tuple(words), os.getcwd())]
        return resolve_plan(argv, {**environ, "ACCELERATE_MIXED_PRECISION": "no"}, lambda: parents)
    if launcher == "deepspeed":
        argv = [*map(_from_pdsh, argv)] if target.nodes > 1 else argv
        return resolve_plan(["--local_rank=0", *argv], environ)
    return resolve_plan(
        argv, environ | ({"SLURM_PROCID": "0"} if launcher == "slurm" else {"TORCHELASTIC_RUN_ID": "none"})
    )
