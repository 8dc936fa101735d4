"""Folders of peft adapters: their base model, and the recipe's keys that an adapter which goes on settles."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, cast

from samecurve.config.documents import Document, KeyPath, Place, describe
from samecurve.config.inheritance import forget_origin
from samecurve.errors import ConfigurationError
from samecurve.storage.filesystem import name_problem
from samecurve.storage.records import read_record

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = {
    "base_model_name_or_path": Path,
    "peft_type?": str,
    "revision?": (str, None),
    "r?": int,
    "lora_alpha?": (int, float),
    "lora_dropout?": float,
    "target_modules?": ([str], str, None),
    "target_parameters?": ([str], None),
    "modules_to_save?": ([str], None),
    "use_rslora?": bool,
    "use_dora?": bool,
}
# recipe key -> peft's key and its default
_SETTLED: dict[str, tuple[str, Any]] = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "target_modules": ("target_modules", None),
    "target_parameters": ("target_parameters", None),
    "modules_to_save": ("modules_to_save", None),
    "rslora": ("use_rslora", False),
    "dora": ("use_dora", False),
}

# Fields of peft's LoraConfig that a stored adapter may have set. Others change what the adapter or its base computes.
_CONTINUED = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out"),
    *("use_rslora", "use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "loftq_config", "ensure_weight_tying", "init_lora_weights"),
}
# Initializations that leave the base model's weights alone
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def settle_adapter(document: Document) -> None:
    """Set the keys of a recipe that go with an adapter's folder in `adapter.path` or `model.path`.

    These are `model.path`, the tokenizer's and the adapter's own. Call this before alternatives are settled. A key of
    the same layer with another value than the folder's is a problem; one of an earlier layer is replaced with a note.
    """
    model, here = document.get("model", "path"), ("adapter", "path")
    is_adapter = isinstance(model, str) and os.path.isfile(Path(model) / ADAPTER_CONFIG)
    if is_adapter and not (Path(model) / "config.json").exists():
        if document.get(*here) not in (None, model):
            text = f"found {model}, which is an adapter, but adapter.path is {document.get(*here)}"
            document.problem(("model", "path"), f"{text}; give the base model, or only one of the two")
            return
        _set(document, here, model, document.place(("model", "path")))
        del document.content["model"]["path"]
        document.notes.append(f"model.path: {model} is an adapter, so it became adapter.path")
    path = document.get(*here)
    if not isinstance(path, str) or name_problem(path):  # of which the schema tells
        return
    _set(document, ("adapter", "name"), "lora", document.place(here))
    folder = Path(path)
    problem, base = _problem(folder), None
    if not problem:
        try:
            base = base_path(folder, fetch=False)
        except ConfigurationError as error:
            problem = str(error)
    if problem or base is None:
        document.unreadable(("model", "path") if path == model else here, problem)
        return
    stored = read_record(folder / ADAPTER_CONFIG, ADAPTER).value
    _settle_base(document, base, stored.get("revision"))
    if (folder / "tokenizer_config.json").is_file() and document.get("tokenizer", "path") is None:
        document.notes.append(f"tokenizer.path: {path}, which has the tokenizer that the adapter was trained with")
        _set(document, ("tokenizer", "path"), path, document.place(here))
    _settle_keys(document, stored)
    document.notes.append(f"adapter.path: training goes on with the adapter in {path}")


def _settle_base(document: Document, base: str, revision: str | None) -> None:
    model, path, here = document.get("model", "path"), document.get("adapter", "path"), ("adapter", "path")
    if model is not None and not document.is_earlier(("model", "path"), here):
        if model != base and not (Path(str(model)).is_dir() and Path(base).is_dir() and Path(model).samefile(base)):
            document.notes.append(f"model.path: {model} counts, and the adapter in {path} was trained on {base}")
        return
    if model == base:
        return
    if model is not None:
        document.notes += forget_origin(document, "model", lambda key: not document.is_earlier(key, here))
    was = f", in place of {model}" if model else ""
    document.notes.append(f"model.path: {base}, the base model of the adapter in {path}{was}")
    _set(document, ("model", "path"), base, document.place(here))
    if revision and not Path(base).is_dir():
        _set(document, ("model", "revision"), revision, document.place(here))


def _settle_keys(document: Document, stored: dict[str, Any]) -> None:
    here = document.place(("adapter", "path"))
    for key, (of_peft, default) in _SETTLED.items():
        value, asked, where = stored.get(of_peft, default), document.get("adapter", key), ("adapter", key)
        value = [] if key == "target_modules" and value is None else value
        lists = isinstance(asked, list | tuple) and isinstance(value, list)
        if asked is not None and (sorted(map(str, asked)) != sorted(value) if lists else asked != value):
            text = f"the adapter in {document.get('adapter', 'path')} has {of_peft} {_shown(value)}"
            if document.is_earlier(where, ("adapter", "path")):
                document.notes.append(f"adapter.{key}: {_shown(asked)} of {document.place(where)} is replaced; {text}")
            else:
                fix = "remove the key, or train a new adapter without adapter.path"
                document.problem(where, f"found {_shown(asked)}, but {text}, and training goes on with it; {fix}")
        _set(document, where, value, document.places.get(where, here))
    if document.get("adapter", "dropout") is None:
        _set(document, ("adapter", "dropout"), stored.get("lora_dropout", 0.0), here)


def _problem(folder: Path) -> str:
    """Return why training cannot go on with an adapter's folder, "" if it can as far as its files tell."""
    record = read_record(folder / ADAPTER_CONFIG, ADAPTER)
    if (folder / "model" / ADAPTER_CONFIG).is_file():
        return f"{folder} has no {ADAPTER_CONFIG}; give {folder / 'model'}"
    if record.value is None:
        fix = "give the folder of a peft adapter; one on the hub has to be downloaded first (hf download OWNER/NAME)"
        return f"{record.path}: {record.problem}; {fix if record.is_absent else 'correct the file'}"
    kind = record.value.get("peft_type", "LORA")
    if kind != "LORA":
        return f"{folder} has an adapter of peft's kind {kind}; only LORA (with rsLoRA and DoRA) can be trained here"
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        fix = "adapter_model.bin is a pickle, which may run code: save it with peft's safe_serialization=True"
        return f"{folder} has no {ADAPTER_WEIGHTS}; {fix if pickled else 'copy the whole folder'}"
    return ""


def _shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else describe(value)


def _set(document: Document, path: KeyPath, value: Any, place: Place) -> None:
    block = document.content.get(path[0])
    if block is None or isinstance(block, dict):
        document.content[path[0]] = {**(block or {}), path[1]: value}
        document.places[path] = place


def base_path(folder: Path, fetch: bool = True) -> str | None:
    """Return the path or hub name of an adapter's base model; None for the folder of a whole model.

    fetch: of a name with a revision return the folder of that revision, downloaded.

    Raises ConfigurationError if the adapter does not name it, or names a folder that does not exist.
    """
    path = folder / ADAPTER_CONFIG
    if not os.path.isfile(path):
        return None
    config = read_record(path, ADAPTER).require(ConfigurationError, "name the base model there")
    base = config["base_model_name_or_path"]
    # written relative to the directory that the training was started in: this one, or one above the run
    places = (parent / base for parent in (Path(), *folder.resolve().parents) if (parent / base).is_dir())
    existing = next(places, None)
    if existing is not None:
        return str(existing)
    is_folder = base.startswith((".", "/", "~")) or base.count("/") > 1  # a name on the hub is OWNER/NAME
    if is_folder:
        raise ConfigurationError(
            f"{path}: base_model_name_or_path: no such folder: {base}; restore the base model there, or change the path"
        )
    if fetch and config.get("revision"):
        from huggingface_hub import snapshot_download

        with contextlib.suppress(Exception):  # loading by its name reports what is wrong
            patterns = ["model*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
            return snapshot_download(base, revision=config["revision"], allow_patterns=patterns)
    return base


def unusual_settings(folder: Path) -> dict[str, Any]:
    """Read the fields of a stored adapter's config that a recipe has no key for.

    Raises:
        ConfigurationError: the adapter is of a kind that is not trained here.
    """
    from peft import LoraConfig

    config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    usual = LoraConfig()
    other = [name for name, value in vars(usual).items() if getattr(config, name) != value and name not in _CONTINUED]
    if not (isinstance(config.init_lora_weights, bool) or config.init_lora_weights in _PLAIN_STARTS):
        other.append("init_lora_weights")  # PiSSA and others take part of the base model's weights away
    if other:
        values = ", ".join(f"{name} {getattr(config, name)!r}" for name in other)
        raise ConfigurationError(
            f"adapter.path: the adapter in {folder} was trained with {values}, which is not supported here; merge it "
            f"first, python -m samecurve merge {folder}, and train a new adapter on the result"
        )
    kept = (
        "exclude_modules",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
    )
    return {name: value for name in kept if (value := getattr(config, name))}
