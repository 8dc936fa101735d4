"""The words of a command reach the processes as they were given, whatever shells and launchers are between."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest
import yaml
from test_launch import FSDP, RECIPE, ROOT, SCRIPT, in_the_repository  # noqa: F401

from samecurve.cli.commands import main
from samecurve.launch import scripts, target
from samecurve.launch.target import Target, unnamed

SHOWN = r"""for word; do printf '%s\n' "$word"; done"""


@pytest.fixture
def hosts(tmp_path) -> str:
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts: [10.0.0.1, 10.0.0.2]\ngpus_per_node: 4\n")
    return str(path)


def over_pdsh(words: list[str]) -> list[str]:
    """The words that a process on a second host gets of those for `deepspeed`, by DeepSpeed's own code."""
    from deepspeed.launcher.runner import PDSHRunner, parse_args

    arguments = parse_args(words)
    sent, _, _ = PDSHRunner(arguments, "").get_cmd({}, {"10.0.0.1": [0], "10.0.0.2": [0]})
    # pdsh's src/common/pipecmd.c; ssh puts spaces between the words
    filled = (re.sub("%([hun%])", lambda match: "%" if match[1] == "%" else "FILLED", word) for word in sent)
    text = " ".join(filled)
    return subprocess.check_output(
        ["sh", "-c", f"set -- {text[text.index(SCRIPT[0]) :]}; {SHOWN}"], text=True
    ).splitlines()


ODD = ("x?a=1&b=2", '["1","2"]', "<|endoftext|>", "a;touch PWNED", "it's", "50%", "%h%%n", "$HOME", "a\\b", "*")
CARRIED = [*ODD, "", "two words", 'a "b" c', "50% of %n", "it's a;b"]


@pytest.mark.parametrize("name", CARRIED)
def test_deepspeed_carries_the_words_to_other_hosts(name, hosts, capsys, tmp_path):
    """Those of the command, and those that are given to the script."""
    override, folder = f"output_dir=runs/{name}", tmp_path / "plan"
    command = ["launch", *RECIPE, override, *FSDP, "--launcher", "deepspeed", "--hosts", hosts]
    assert main(command) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    expected = [*SCRIPT, *FSDP, "data.path=docs", "steps=700"]
    assert over_pdsh(words[1:]) == [*expected, override]
    folder.mkdir()
    hosts_of_two = Target(SCRIPT[1], FSDP[1], ("data.path=docs", "steps=700"), unnamed(2, 4), folder=str(folder))
    for file, text in scripts.files("deepspeed", hosts_of_two).items():
        (folder / file).write_text(text)
    stand_in = tmp_path / "deepspeed"
    stand_in.write_text(f"#!/bin/sh\n{SHOWN}\n")
    stand_in.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = subprocess.check_output(["bash", folder / "deepspeed.sh", override], env=environ, text=True).splitlines()
    assert over_pdsh(words) == [*expected, override]
    assert subprocess.run(["bash", folder / "deepspeed.sh", "a $b"], env=environ).returncode == 2


@pytest.mark.parametrize("name", ["a $b", "a `b`", "a \\b"])
def test_words_that_deepspeed_cannot_carry(name, hosts, capsys):
    command = ["launch", *RECIPE, f"output_dir=runs/{name}", *FSDP, "--launcher", "deepspeed"]
    assert main([*command, "--hosts", hosts]) == 2
    assert f"output_dir=runs/{name}: has a space and one of $, ` and \\" in capsys.readouterr().err
    assert main([*command, "--nodes", "1", "--gpus_per_node", "2"]) == 0


@pytest.mark.parametrize("launcher", ["kubernetes", "trainjob"])
def test_an_installed_package_has_no_place_in_pods(launcher, capsys, monkeypatch, tmp_path):
    """train.py and the strategies of this machine's package may be elsewhere there; own files have their own paths."""
    own = tmp_path / "own.yaml"
    own.write_text(f"base: {ROOT / 'recipes' / 'pretrain.yaml'}\n")
    monkeypatch.setattr(target, "IN_CLONE", False)
    command = ["launch", str(own), *RECIPE[1:], "--strategy", str(ROOT / "configs" / "fsdp.yaml")]
    assert main([*command, "--launcher", launcher, "--nodes", "2", "--gpus_per_node", "4"]) == 0
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    spec = job["spec"]["trainer"] if launcher == "trainjob" else job["spec"]["template"]["spec"]["containers"][0]
    words = ["-m", "samecurve.train", str(own), *FSDP, *RECIPE[1:]]
    assert spec["command"][-len(words) :] == words and str(ROOT) not in str(spec)
