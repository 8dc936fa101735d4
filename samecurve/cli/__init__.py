"""python -m samecurve COMMAND: what there is to do before and after a run. Each command is a module of this package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError, SamecurveError

INTERRUPTED = 130  # the shell's number for SIGINT
COMMANDS = {
    "inspect": "what a recipe trains on, token by token, without a model",
    "compare": "run the same short job under each strategy and compare the curves",
    "summary": "what a run did, and how to look at it and go on",
    "generate": "let a trained model write",
    "chat": "talk with a trained chat model",
    "predict": "ask a classifier, a reward model, an embedding or a masked language model",
    "evaluate": "measure a trained model on held-out data",
    "lm_eval": "measure a trained model on public benchmarks",
    "export": "a run's model, or a checkpoint's, as a folder to share: another dtype, and a card",
    "merge": "an adapter and its model as one model, and the proof that it is the same",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; see errors.py. A command's module is imported only when it is the one that runs."""
    argv = sys.argv[1:] if argv is None else list(argv)
    listed = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "python -m samecurve",
        description=f"commands:\n{listed}",
        epilog="python -m samecurve COMMAND --help says more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    command = parser.parse_args(argv[:1]).command
    module = importlib.import_module(f".{command}", __name__)
    arguments = argparse.ArgumentParser(f"python -m samecurve {command}", description=module.__doc__)
    module.add_arguments(arguments)
    try:
        return module.run(arguments.parse_intermixed_args(argv[1:]))
    except SamecurveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def repository_root() -> Path:
    """Where train.py and configs/ are. Raises ConfigurationError when it is not the working directory.

    The strategy files name their DeepSpeed files relative to the working directory, as Accelerate reads them.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "train.py").is_file():
        raise ConfigurationError(f"{root} holds no train.py: this command needs the repository, not only the package")
    if Path.cwd() != root:
        raise ConfigurationError(f"the strategy files are read relative to the repository: first cd {root}")
    return root
