"""Pretrained weights of `model.path`, checked as a whole before they are read one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.errors import ConfigurationError
from samecurve.models import lora as adapters
from samecurve.models import weight_conversion
from samecurve.models.embeddings import grow_embedding
from samecurve.models.weight_files import Stored, read, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 5  # names in a message


class Pretrained:
    """Reader of a model's pretrained weights.

    Args:
        model: the skeleton, with or without an adapter.
        alone: the skeleton without the adapter.
        path: folder or hub name of the weights.

    Raises:
        ConfigurationError: as weight_files.
    """

    def __init__(self, model: PreTrainedModel, alone: PreTrainedModel, path: str):
        self._path, self._files = path, weight_files(path)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        groups = weight_conversion.groups(alone, {name: stored.shape for name, stored in self._files.items()})
        self._group = {name: group for group in groups for name in group.made}
        aliases: dict[int, list[str]] = {}  # of each parameter, the name in `named_parameters()` first
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._names = {  # possible names in the files of each parameter; a tied one may have several
            names[0]: [adapters.pretrained_name(name) for name in names]
            for names in aliases.values()
            if not adapters.is_adapter_weight(names[0])
        }

    def missing(self) -> set[str]:
        """Find the model's parameters that are not in the files."""
        return {name for name in self._names if not self._found(name)}

    def check(self, wanted: set[str], growing: set[str], hint: str = "") -> None:
        """Check that all wanted parameters can be read from the files.

        Args:
            wanted: names of the parameters.
            growing: names of parameters that may have more rows than in the file, see hf_config.model_config.
            hint: advice about missing parameters for the message.

        Raises:
            ConfigurationError: lists every problem.
        """
        missing = [name for name in self._names if name in wanted and not self._found(name)]
        problems = [f"model.path: {self._path} holds no tensor for {_listed(missing)}{hint}"] if missing else []
        for name in self._names:
            if name in wanted and name not in missing:
                problems += filter(None, [self._problem(name, growing)])
        if problems:
            raise ConfigurationError("\n".join(problems))

    def tensors(self, wanted: set[str], growing: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full fp32 tensor) of each wanted parameter in the model's order. Call `check` first."""
        rest = dict.fromkeys(name for name in self._names if name in wanted)
        while rest:
            name = next(iter(rest))
            group = self._group[self._found(name)[0]]
            made = group.convert(read(self._files, group.sources))
            # one conversion may make several parameters, so that none of its tensors is read twice
            for name in [each for each in rest if self._found(each)[0] in made]:
                tensor = made[self._found(name)[0]].float()
                self._check_tied(name, tensor)
                if name in growing and tensor.shape[0] < self._shapes[name][0]:
                    tensor = grow_embedding(tensor, self._shapes[name][0])
                yield name, tensor
                del rest[name]

    def _found(self, name: str) -> list[str]:
        """List those of a parameter's names that are in the files."""
        return [alias for alias in self._names[name] if alias in self._group]

    def _problem(self, name: str, growing: set[str]) -> str:
        found = self._found(name)[0]
        group, expected = self._group[found], self._shapes[name]
        stored = {source: self._files[source] for source in group.sources}
        where = _where(stored)
        if group.problem:
            return (
                f"{where} cannot make {name} ({group.problem}); are tensors missing, or is the config another model's?"
            )
        other = {entry.dtype for entry in stored.values()} - set(_FLOATS)
        if other:
            return f"{where}: {', '.join(sorted(other))}, which is quantized; give the model's unquantized weights"
        shape = group.made[found]
        room = name in growing and shape[1:] == expected[1:] and shape[0] < expected[0]
        if shape != expected and not room:
            made = "has" if list(stored) == [found] else f"would make {name} with"
            return f"{where} {made} the shape {tuple(shape)}, the config needs {tuple(expected)}"
        return ""

    def _check_tied(self, name: str, tensor: Tensor) -> None:
        """Raise ConfigurationError if the files have different tensors for weights that the config ties."""
        for other in self._found(name)[1:]:
            group = self._group[other]
            if not torch.equal(group.convert(read(self._files, group.sources))[other].float(), tensor):
                stored = {source: self._files[source] for source in group.sources}
                raise ConfigurationError(
                    f"{_where(stored)} is not {self._found(name)[0]}, but the model's config ties the two; set "
                    "tie_word_embeddings to false in its config.json"
                )


def _where(stored: dict[str, Stored]) -> str:
    files = sorted({str(entry.file) for entry in stored.values()})
    return f"{', '.join(files)}: {_listed(list(stored))}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
