"""Print the command or file that starts a run on one or more machines, or start it.

The machines are a hosts.yaml (hosts, gpus_per_node), a hostfile (lines NAME slots=N), or numbers alone. accelerate and
torchrun are started on every host, deepspeed on one that reaches the others by ssh; slurm is a job script, kubernetes a
Job and trainjob a TrainJob of Kubeflow Trainer.

The command or file is checked as the run itself would check it, so what the run would refuse is refused here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from samecurve.cli.commands import require_positive
from samecurve.config import loader
from samecurve.config.inheritance import latest_overrides
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.launch import scripts, start
from samecurve.launch.hosts import PORT, read_hostfile, read_hosts, select
from samecurve.launch.target import CLUSTERS, LAUNCHERS, Target, check_launchers, command, read_back, unnamed
from samecurve.specs.environment import IN_CLONE, ROOT
from samecurve.storage.atomic import storage_errors
from samecurve.strategy.plan import Plan
from samecurve.strategy.resolve import STRATEGY_HELP, strategy_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values, as for train.py")
    parser.add_argument("--strategy", metavar="STRATEGY", required=True, type=strategy_path, help=STRATEGY_HELP)
    parser.add_argument("--launcher", metavar="NAME", required=True, help=f"one of {', '.join(LAUNCHERS)}")
    parser.add_argument("--hosts", metavar="FILE", help="a YAML file: hosts: [NAME, ...], gpus_per_node: N, port: N")
    parser.add_argument("--hostfile", metavar="FILE", help="lines NAME slots=N, as for the deepspeed launcher")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of machines whose names are not known yet")
    parser.add_argument("--gpus_per_node", metavar="N", type=int, help="processes on each of --nodes")
    parser.add_argument("--min_nodes", metavar="N", type=int, help="torchrun: continue with N hosts if others fail")
    parser.add_argument("--include", metavar="SLOTS", help="deepspeed: use only these, such as node1:1,2@node2:0")
    parser.add_argument("--exclude", metavar="SLOTS", help="deepspeed: use all but these, such as node1:0")
    parser.add_argument(
        "--master_port", metavar="N", type=int, help="port of the first host for all ranks (default: 29500)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the script or manifest to this file")
    parser.add_argument("--start", action="store_true", help="start the run, on other hosts by ssh without a password")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0, or with --start the exit code of the launcher that failed first."""
    if IN_CLONE and Path.cwd() != ROOT:
        raise ConfigurationError(f"working directory: the command names train.py, as in the repository; run cd {ROOT}")
    check_launchers([arguments.launcher], "--launcher")
    require_positive(arguments, "nodes", "gpus_per_node", "min_nodes", "master_port")
    target = _target(arguments)
    _check_min_nodes(arguments, target)
    _check(arguments.launcher, target)
    text = scripts.text(arguments.launcher, target)
    if arguments.start:
        if not target.named and target.nodes > 1 and arguments.launcher not in CLUSTERS:
            text = f"the {target.nodes} machines have no names; replace --nodes by --hosts or --hostfile"
            raise ConfigurationError(f"--start: {text}")
        return start.run(arguments.launcher, target)
    if arguments.output:
        path = Path(arguments.output)
        with storage_errors(path):
            path.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _target(arguments: argparse.Namespace) -> Target:
    given = [name for name in ("hosts", "hostfile", "nodes") if getattr(arguments, name)]
    if len(given) != 1 or bool(arguments.nodes) != bool(arguments.gpus_per_node):
        options = ", ".join(f"--{name}" for name in given) or "none of them"
        rule = "expected one of --hosts FILE, --hostfile FILE, or --nodes N with --gpus_per_node N"
        raise ConfigurationError(f"machines: found {options}; {rule}")
    if arguments.hosts:
        hosts, port = read_hosts(arguments.hosts)
    elif arguments.hostfile:
        hosts, port = read_hostfile(arguments.hostfile, for_deepspeed=arguments.launcher == "deepspeed"), PORT
    else:
        hosts, port = list(unnamed(arguments.nodes, arguments.gpus_per_node)), PORT
    selection = [(f"--{name}", value) for name in ("include", "exclude") if (value := getattr(arguments, name))]
    if selection and arguments.launcher != "deepspeed":
        option = selection[0][0]
        raise ConfigurationError(f"{option}: only the deepspeed launcher picks slots; remove it, or list fewer hosts")
    return Target(
        arguments.recipe,
        arguments.strategy,
        tuple(latest_overrides(arguments.overrides)),
        tuple(select(hosts, arguments.include, arguments.exclude)),
        named=not arguments.nodes,
        file=arguments.output or "",
        port=arguments.master_port or port,
        hostfile=arguments.hostfile or "",
        listed=tuple(hosts),
        selection=tuple(word for pair in selection for word in pair),
        min_nodes=arguments.min_nodes or 0,
    )


def _check_min_nodes(arguments: argparse.Namespace, target: Target) -> None:
    if not target.min_nodes:
        return
    given = f"--min_nodes {target.min_nodes}"
    if arguments.launcher != "torchrun":
        raise ConfigurationError(f"{given}: only torchrun continues with fewer hosts; use --launcher torchrun")
    if not target.named:
        raise ConfigurationError(f"{given}: each host needs an address of its own; give --hosts or --hostfile")
    if target.min_nodes >= target.nodes:
        raise ConfigurationError(f"{given}: found {target.nodes} hosts, but it must be less than their number")
    if arguments.start:
        text = "--start ends all hosts when one fails; leave out --start and start the printed commands"
        raise ConfigurationError(f"{given}: {text}")
    plan = _check(arguments.launcher, replace(target, hosts=target.hosts[: target.min_nodes], min_nodes=0))
    if plan.recipe.rehearse:  # torchrun tells only the others that they start again
        fix = "run `python -m samecurve rehearse` before, and add rehearse=false here"
        raise ConfigurationError(
            f"rehearse: found true with {given}, but a host that returns would rehearse alone; {fix}"
        )


def _check(launcher: str, target: Target) -> Plan:
    """Resolve the command as its processes would. Data may lie on the other machines alone."""
    if launcher != "deepspeed":
        _ = target.devices_per_node  # raises if hosts differ
    elsewhere = loader.data_elsewhere(loader.read_recipe(target.recipe, target.overrides))
    here = [f"{key}={loader.STAND_INS[key]}" for key in sorted(elsewhere)]
    tried = replace(target, overrides=tuple(latest_overrides([*target.overrides, *here])))
    try:
        return read_back(launcher, tried, command(launcher, tried))
    except SamecurveError as error:
        raise type(error)(f"{target.size}: {error}") from error  # the class has the exit code
