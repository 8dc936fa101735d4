"""Export a run's model as a folder to share, in a chosen dtype and with a model card (README.md).

The source is RUN/model, or the newest checkpoint if the run has not finished. No distributed launch is needed. An
adapter stays an adapter; `merge` combines it with its base model.

With --format gguf, the folder has a file for llama.cpp, Ollama and LM Studio, which is read back and compared with the
model, and a Modelfile. With --push, the folder is uploaded to the Hugging Face hub.

With --format accelerate or dcp, another library goes on training from the newest checkpoint:
`accelerator.load_state(FOLDER)`, or `torch.distributed.checkpoint.load(..., checkpoint_id=FOLDER)`. The folder has
weights and AdamW's moments.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

from samecurve.checkpoint.manifest import check_files, list_checkpoints
from samecurve.checkpoint.resume import read_state
from samecurve.cli.commands import Subcommand, add_code_arguments, allow_own_code
from samecurve.config.adapter_folder import ADAPTER_CONFIG
from samecurve.errors import CheckpointError, ConfigurationError, StorageError
from samecurve.export.model_card import ExportInfo
from samecurve.export.push import Push
from samecurve.inference import folders
from samecurve.specs.precision import DTYPES, GGUF_TYPES
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.strategy.resolve import checkpoint_names, named_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "a run directory, for example runs/sft, or a model inside one, for example runs/sft/merged"
    parser.add_argument("run", metavar="RUN", type=Path, help=where)
    parser.add_argument(
        "--dtype",
        choices=GGUF_TYPES,
        default="fp32",
        help="precision of the stored weights (default: %(default)s); q8_0: 8 bits, for --format gguf",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="a checkpoint of the run instead of RUN/model: latest, best, its name (step_00000040) or its folder",
    )
    parser.add_argument(
        "--format",
        choices=("huggingface", "gguf", "accelerate", "dcp"),
        default="huggingface",
        help="a model for transformers or llama.cpp, or a checkpoint for Accelerate or torch (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder to write (default: RUN/model-DTYPE)")
    parser.add_argument("--license", metavar="TEXT", help="license for the model card, for example apache-2.0")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the hub, private if new")
    parser.add_argument("--public", action="store_true", help="with --push: a new repository is public")
    parser.add_argument("--dry_run", action="store_true", help="with --push: list what would be uploaded")
    add_code_arguments(parser)


def run(arguments: argparse.Namespace) -> Subcommand | int:
    allow_own_code(arguments)
    directory = folders.run_directory(arguments.run)
    if directory is None:
        raise ConfigurationError(f"{arguments.run}: no run here (no run.json); give the output_dir of a run")
    push = _push(arguments)
    if arguments.format in ("accelerate", "dcp"):
        return _resumable(arguments, directory)
    gguf = "-gguf" if arguments.format == "gguf" else ""
    if arguments.dtype not in DTYPES and not gguf:
        raise ConfigurationError(f"--dtype {arguments.dtype}: only for --format gguf; choose {', '.join(DTYPES)}")
    if gguf and importlib.util.find_spec("gguf") is None:
        raise ConfigurationError("--format gguf: needs the gguf package; pip install gguf")
    chosen = _chosen(arguments.run, directory, arguments.checkpoint)
    checkpoint = None if chosen else _checkpoint(directory, arguments.checkpoint)
    origin = f"model-{checkpoint.name}" if checkpoint else (chosen or directory / "model").name
    output = arguments.output or directory / f"{origin}{gguf}-{arguments.dtype}"
    if output.exists() and push:
        print(f"{output}: exists already, and is uploaded as it is; delete it to export again")
        push.upload(output)
        return 0
    if output.exists():
        raise StorageError(f"{output}: exists already; choose another folder with --output")
    made = ExportInfo({**GGUF_TYPES, **DTYPES}[arguments.dtype], arguments.license)
    made = replace(made, gguf=f"{directory.resolve().name}-{arguments.dtype}.gguf" if gguf else "")
    if checkpoint:
        saved = read_state(checkpoint)
        recipe = folders.with_code(folders.parse_recipe(saved, checkpoint / "state.json"), arguments.trust_remote_code)
        _check_whole(gguf, recipe.adapter.name is not None, directory)
        work = directory, checkpoint, output, replace(made, step=saved["step"]), recipe, push
    else:
        source = chosen or folders.model_folder(directory)
        _check_whole(gguf, _is_adapter(source), directory)
        made = replace(made, merged=_is_adapter(directory / "model") and not _is_adapter(source))
        work = directory, source, output, made, None, push
    if gguf:
        return Subcommand("samecurve.export.gguf_file", work)
    return Subcommand("samecurve.export.convert", work)


def _push(arguments: argparse.Namespace) -> Push | None:
    """Read the options of an upload, and try the token. Raises ConfigurationError."""
    if arguments.push is None:
        if given := [f"--{name}" for name in ("public", "dry_run") if getattr(arguments, name)]:
            raise ConfigurationError(f"{', '.join(given)}: only with --push OWNER/NAME")
        return None
    if arguments.format in ("accelerate", "dcp"):
        raise ConfigurationError(f"--push: not for --format {arguments.format}, which holds the optimizer's state, too")
    push = Push(arguments.push, arguments.public, arguments.dry_run)
    push.check()
    return push


def _check_whole(gguf: str, is_adapter: bool, directory: Path) -> None:
    if gguf and is_adapter:
        raise ConfigurationError(
            f"--format gguf: {directory} has an adapter, which is no whole model; run python -m samecurve merge "
            f"{directory}, then python -m samecurve export {directory / 'merged'} --format gguf"
        )


def _resumable(arguments: argparse.Namespace, directory: Path) -> Subcommand:
    """Check the arguments for a checkpoint of another library. Raises ConfigurationError, StorageError."""
    checkpoint = _checkpoint(directory, arguments.checkpoint or "latest")
    assert checkpoint is not None  # None is a run's own export, which was not asked for
    output = arguments.output or directory / f"{checkpoint.name}-{arguments.format}"
    recipe = folders.with_code(
        folders.parse_recipe(read_state(checkpoint), checkpoint / "state.json"), arguments.trust_remote_code
    )
    if arguments.dtype != "fp32" or arguments.license:
        raise ConfigurationError(
            f"--dtype, --license: not for --format {arguments.format}, which keeps the fp32 values"
        )
    if recipe.adapter.name is not None:
        raise ConfigurationError(f"--format {arguments.format}: not for adapters; export without it, for peft to load")
    if output.exists():
        raise StorageError(f"{output}: exists already; choose another folder with --output")
    return Subcommand("samecurve.export.resumable", (checkpoint, output, recipe, arguments.format))


def _chosen(given: Path, directory: Path, checkpoint: str | None) -> Path | None:
    """Return the given folder if it is a model inside the run directory; None if it is the run directory itself."""
    if given.resolve() == directory.resolve():
        return None
    if checkpoint is not None:
        raise ConfigurationError(f"--checkpoint: RUN must be the run directory; give {directory}, not {given}")
    return folders.model_folder(given)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def _checkpoint(directory: Path, given: str | None) -> Path | None:
    """Select the checkpoint to export and verify every byte of it; None for the run's own export.

    Raises CheckpointError if it is damaged, ConfigurationError if there is none.
    """
    if given is None and (directory / "model").is_dir():
        return None
    files = LocalFileSystem()
    newest = given in (None, "latest")
    folders = list_checkpoints(files, directory / "checkpoints") if newest else [named_checkpoint(directory, given)]
    if not folders or not folders[0].is_dir():
        what = f"{directory}: no checkpoint found" if newest else f"--checkpoint: no such folder: {given}"
        what = "--checkpoint: the run has no best one (checkpoint.best)" if given == "best" else what
        what += "" if given else ", and no model/"
        names = checkpoint_names(directory) or "; give the output_dir of a run that has saved a checkpoint"
        raise ConfigurationError(what + names)
    rejected = []
    for folder in folders:
        problems = check_files(files, folder)
        if not problems:
            return folder
        rejected += [f"  {folder.name}/{problem}" for problem in problems]
        print("\n".join([f"{folder}: damaged, skipped:", *(f"  {problem}" for problem in problems)]))
    where = f"{folders[0].parent}: every checkpoint" if newest else f"{folders[0]}: the checkpoint"
    raise CheckpointError("\n".join([f"{where} is damaged", *rejected]))
