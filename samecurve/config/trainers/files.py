"""Files of other trainers: their YAML, and shell scripts with the command that starts one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

from samecurve.config.trainers import axolotl, llama_factory, swift, trl
from samecurve.config.trainers.translation import Trainer
from samecurve.errors import ConfigurationError

TRAINERS = {"trl": trl.TRAINER, "llama-factory": llama_factory.TRAINER, "axolotl": axolotl.TRAINER}
TRAINERS |= {"ms-swift": swift.TRAINER}
# a key of each that the others do not have; TRL's names are transformers' own and come last
MARKS = {
    "axolotl": {"base_model"},
    "llama-factory": {"stage", "finetuning_type", "cutoff_len", "template", "export_dir"},
}
MARKS |= {"ms-swift": {"tuner_type", "train_type", "rlhf_type"}, "trl": {"model_name_or_path"}}
_COMMANDS = {"llamafactory-cli": "llama-factory", "axolotl": "axolotl", "swift": "ms-swift", "trl": "trl"}
# torchrun's options: where a run is started
_MACHINES = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "standalone",
)
_METHODS = ("sft", "dpo", "orpo", "cpo", "kto", "grpo", "rloo", "gkd", "ppo", "prm", "reward")
_STRATEGIES = {
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "multi_gpu": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
}
_STRATEGIES |= {"zero2_offload": "zero2_offload", "zero3_offload": "zero3_offload"}


class Source(NamedTuple):
    """A file's trainer, and its keys, with `method` and `num_processes` where a command says them."""

    trainer: Trainer
    settings: dict[str, Any]


def read(path: Path, trainer: str | None = None, method: str | None = None) -> Source:
    """Read a trainer's file.

    Args:
        trainer, method: what the file does not say: a key of TRAINERS, and `sft`, `dpo` and so on.

    Raises:
        ConfigurationError: the file cannot be read, or is of none of these trainers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        settings, known = _yaml(path, text), trainer
    else:
        known, settings = _command(path, text)
        known = trainer or known
    known = known or next((name for name, keys in MARKS.items() if keys & settings.keys()), None)
    if known is None:
        raise ConfigurationError(
            f"{path}: no key of TRL, LLaMA-Factory, axolotl or ms-swift is in it; name the trainer with --trainer"
        )
    if known in ("trl", "ms-swift"):
        in_name = next((name for name in _METHODS if re.search(rf"(?<![a-z]){name}(?![a-z])", path.stem)), None)
        settings.setdefault("method", method or in_name or ("rlhf" if "rlhf_type" in settings else "sft"))
    return Source(TRAINERS[known], settings)


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: found no keys; give a trainer's YAML, or a shell script with its command")
    return {str(key): value for key, value in content.items()}


def _command(path: Path, text: str) -> tuple[str | None, dict[str, Any]]:
    """Find the command of a shell script: its trainer and its options, those of the YAML that it names among them."""
    text = re.sub(r"\\\s*\n", " ", text)  # continued lines
    variables = dict(re.findall(r"^(?:export )?(\w+)=([\w./:-]+)\s*$", text, re.MULTILINE))
    text = Template(text).safe_substitute(variables)
    quotient = r"\$\(\s*expr (\d+) / ([1-9]\d*)\s*\)"
    text = re.sub(quotient, lambda match: str(int(match[1]) // int(match[2])), text)
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            continue
        scripts = {word: re.search(rf"({'|'.join(_METHODS)})\w*\.py$", word) for word in words}
        starts = (n for n, word in enumerate(words) if Path(word).name in _COMMANDS or scripts[word])
        at = next((n for n in starts if not n or not words[n - 1].startswith("--")), None)
        if at is None or len(words) < at + 2:
            continue
        match = scripts[words[at]]
        trainer = "trl" if match else _COMMANDS[Path(words[at]).name]
        started = _options(words[:at])
        given = started | _options(words[at + 1 :])
        settings = {name: value for name, value in given.items() if name not in _MACHINES or name not in started}
        if strategy := settings.pop("config_file", None):
            settings["accelerate_config"] = strategy
        environment = dict(word.split("=", 1) for word in words[:at] if re.match(r"[A-Z_]+=", word))
        # torchrun counts the processes of each machine, accelerate those of all
        count = settings.pop("nproc_per_node", None) or environment.get("NPROC_PER_NODE")
        if str(count).isdecimal():
            machines = str(started.get("nnodes") or environment.get("NNODES") or 1)
            settings["num_processes"] = int(str(count)) * (int(machines) if machines.isdecimal() else 1)
        if trainer in ("trl", "ms-swift"):
            settings["method"] = match[1] if match else words[at + 1]
        files = [given.get("config"), *(word for word in words[at + 1 :] if word.endswith((".yaml", ".yml")))]
        named = next((name for name in files if isinstance(name, str)), None)
        if named:
            file = next((file for file in (path.parent / named, Path(named)) if file.is_file()), None)
            if file is None:
                raise ConfigurationError(f"{path}: its command reads {named}, which is not here")
            settings = _yaml(file, file.read_text(encoding="utf-8")) | settings
        settings.pop("config", None)
        return trainer, settings
    raise ConfigurationError(f"{path}: has no command of trl, llamafactory-cli, axolotl or swift; give their YAML")


def _options(words: list[str]) -> dict[str, Any]:
    """Read `--key value ...` and `--key=value`; an option without a value is True."""
    values: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        is_value, text = bool(name), word
        if word.startswith("--"):
            name, mark, text = word[2:].partition("=")
            values[name], is_value = [], bool(mark)
        if is_value:
            # numbers, true and null are read as YAML has them; all else is text
            value = yaml.safe_load(text) if re.fullmatch(r"[\w.+-]+", text) else text
            values[name].append(value if isinstance(value, (int, float, bool, type(None))) else text)
    return {key: row[0] if len(row) == 1 else row or True for key, row in values.items()}


def strategy_of(settings: dict[str, Any]) -> str | None:
    """The strategy's name in configs/, or its file; None for one device, and ddp where it is not said."""
    for key in ("deepspeed", "accelerate_config"):
        if isinstance(value := settings.get(key), str):
            return _STRATEGIES.get(Path(value).stem.replace("ds_z", "zero"), value) if "/" not in value else value
    if settings.get("fsdp") or settings.get("fsdp_config") or settings.get("dp_shard_size"):
        return "fsdp"
    return "ddp" if int(settings.get("num_processes") or 1) > 1 else None
