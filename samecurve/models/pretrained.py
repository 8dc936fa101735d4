"""Pretrained weights of `model.path`, checked as a whole before they are read one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from samecurve.errors import ConfigurationError
from samecurve.models import dequantize, weight_conversion
from samecurve.models import lora as adapters
from samecurve.models.hf_config import kind_of, kind_of_stored
from samecurve.models.packaged import package_of
from samecurve.models.weight_files import Stored, weight_files
from samecurve.specs.heads import CAUSAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 5  # names in a message


class Unused(NamedTuple):
    """Stored names of tensors that the model's class does not have.

    Attributes:
        unknown: nobody expects them.
        skipped: transformers leaves them out without a warning, such as layers for further tokens.
        of_heads: of a head for another task.
    """

    unknown: list[str]
    skipped: list[str]
    of_heads: list[str]


class Pretrained:
    """Reader of a model's pretrained weights.

    Args:
        model: the skeleton, with or without an adapter.
        alone: the skeleton without the adapter.
        path: folder or hub name of the weights.
        revision: of a hub name.

    Raises:
        ConfigurationError: as weight_files.
    """

    def __init__(self, model: PreTrainedModel, alone: PreTrainedModel, path: str, revision: str | None = None):
        self.origin, self.stored = (path, revision), weight_files(path, revision)
        self.contents = dequantize.contents(self.stored, path, revision)
        self._path, self._files = path, self.contents.weights
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        shapes = {name: stored.shape for name, stored in self._files.items()}
        package = package_of(model)
        groups, self._unused = weight_conversion.groups(package.model if package else alone, shapes)
        self._group = {name: group for group in groups for name in group.made}
        aliases: dict[int, list[str]] = {}  # of each parameter, the name in `named_parameters()` first
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._names = {  # possible names in the files of each parameter; a tied one may have several
            names[0]: [adapters.pretrained_name(name) for name in names]
            for names in aliases.values()
            if not adapters.is_adapter_weight(names[0])
        }
        self._constants = constants(model)
        for name, buffer in model.named_buffers():
            if name in self._constants:
                self._names[name], self._shapes[name] = [adapters.pretrained_name(name)], buffer.shape
        # PreTrainedModel.from_pretrained makes these anew without a warning
        self._may_miss = [re.compile(pattern) for pattern in alone._keys_to_ignore_on_load_missing or ()]
        self._kept: list[str] = []
        if package:
            self._names = {name: [package.name(alias) for alias in names] for name, names in self._names.items()}
            own = {name for names in self._names.values() for name in names}
            self._kept = [name for group in groups if own.isdisjoint(group.made) for name in group.sources]
            self._kept += [name for name, (_, is_skipped) in self._unused.items() if is_skipped]
        self._class, self._buffers = (
            type(package.model if package else alone).__name__,
            {name for name, _ in alone.named_buffers()},
        )
        kinds = {kind_of(alone), kind_of_stored(alone.config)}
        self._head = None if kinds == {CAUSAL.kind} else alone.base_model_prefix  # else the file's head is another one

    def unused(self) -> Unused:
        """List the weights in the files that the model does not have, without the buffers of old versions."""
        unused = Unused([], [], [])
        for name, (target, is_skipped) in self._unused.items():
            if name in self._kept:
                continue
            shape = self._files[name].shape
            is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]  # GPT-2's and GPT-J's causal one
            if is_mask or target in self._buffers or re.search(r"(inv_freq|position_ids|masked_bias)$", target):
                continue
            of_head = self._head is not None and (not target.startswith(f"{self._head}.") or ".pooler." in target)
            (unused.skipped if is_skipped else unused.of_heads if of_head else unused.unknown).append(name)
        return unused

    def kept(self, unknown_tensors: str = "stop") -> dict[str, Stored]:
        """Find the tensors that the model does not have and that its export copies, by their stored names.

        Those of a packaged model beside its text part are always among them.

        Args:
            unknown_tensors: `model.unknown_tensors`.

        Raises:
            ConfigurationError: some are quantized and cannot be read.
        """
        unused = self.unused()
        names = {"stop": unused.skipped, "keep": [*unused.skipped, *unused.unknown], "drop": []}[unknown_tensors]
        kept = {name: self._files[name] for name in (*self._kept, *names)}
        packed = [(name, stored, stored.packed.problem) for name, stored in kept.items() if stored.packed]
        if problems := [f"{_where({name: stored})}: {problem}" for name, stored, problem in packed if problem]:
            raise ConfigurationError("\n".join(problems))
        return kept

    def grouped(self, names: list[str]) -> str:
        """Count tensors by the shortest beginning of their names that no tensor of the model has."""
        known = {
            part for name in self._files.keys() - self._unused.keys() - set(self._kept) for part in _beginnings(name)
        }
        counts = Counter(next((part for part in _beginnings(name) if part not in known), name) for name in names)
        return ", ".join(f"{part} ({number} tensor{'s' * (number > 1)})" for part, number in counts.items())

    def missing(self) -> set[str]:
        """Find the model's parameters and constants that are not in the files."""
        return {name for name in self._names if not self._found(name)}

    def new_constants(self) -> set[str]:
        """Find the constants that the files lack and that transformers makes by the family's rule for a new model."""
        missing = self.missing() & self._constants
        return {name for name in missing if any(pattern.search(name) for pattern in self._may_miss)}

    def check(self, wanted: set[str], growing: set[str], hint: str = "", unknown_tensors: str = "stop") -> None:
        """Check that all wanted parameters can be read from the files, and that the files hold no others.

        Args:
            wanted: names of the parameters.
            growing: names of parameters that may have more rows than in the file, see hf_config.model_config.
            hint: advice about missing parameters for the message.
            unknown_tensors: what becomes of weights that the model does not have: `model.unknown_tensors`.

        Raises:
            ConfigurationError: lists every problem.
        """
        missing = [name for name in self._names if name in wanted and not self._found(name)]
        problems = [f"model.path: {self._path} holds no tensor for {_listed(missing)}{hint}"] if missing else []
        for name in self._names:
            if name not in wanted or name in missing:
                continue
            target = self._found(name)[0]
            group, expected = self._group[target], self._shapes[name]
            shape, stored = group.made[target], {source: self._files[source] for source in group.sources}
            where = _where(stored)
            unread = [entry.packed.problem for entry in stored.values() if entry.packed and entry.packed.problem]
            other = {entry.dtype for entry in stored.values() if not entry.packed}
            other = sorted(other.difference(dequantize.FLOATS))
            if group.problem:
                why = f"({group.problem}); are tensors missing, or is the config another model's?"
                problems.append(f"{where} cannot make {name} {why}")
            elif unread:
                problems.append(f"{where}: {unread[0]}")
            elif other and name not in self._constants:
                problems.append(
                    f"{where}: {', '.join(other)}, which is quantized, and the quantization_config of config.json does "
                    "not say how; give the model's unquantized weights"
                )
            elif shape != expected:
                made = "has" if list(stored) == [target] else f"would make {name} with"
                if not (name in growing and shape[1:] == expected[1:] and shape[0] < expected[0]):
                    text = f"the shape {tuple(shape)}, the config needs {tuple(expected)}"
                    problems.append(f"{where} {made} {text}")
        unknown = self.unused().unknown
        if unknown and unknown_tensors == "stop":
            problems.append(
                f"model.path: {self._path} holds weights that transformers' {self._class} does not have: "
                f"{self.grouped(unknown)}; they would not be trained. If the model works without them, set "
                "model.unknown_tensors to keep, which copies them into the export, or to drop"
            )
        if problems:
            raise ConfigurationError("\n".join(problems))

    def tensors(self, wanted: set[str], growing: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each wanted parameter, in fp32, and constant, as stored. Call `check` first."""
        rest = dict.fromkeys(name for name in self._names if name in wanted)
        while rest:
            name = next(iter(rest))
            group = self._group[self._found(name)[0]]
            made = group.load(self._read)
            # one conversion may make several parameters, so that none of its tensors is read twice
            for name in [name for name in rest if self._found(name)[0] in made]:
                tensor = made[self._found(name)[0]]
                if name not in self._constants:
                    tensor = tensor.float()
                # the files may have different tensors for weights that the config ties
                for other in self._found(name)[1:]:
                    tied = self._group[other]
                    if not torch.equal(tied.load(self._read)[other].float(), tensor):
                        stored = {source: self._files[source] for source in tied.sources}
                        raise ConfigurationError(
                            f"{_where(stored)} is not {self._found(name)[0]}, but the model's config ties the two; set "
                            "tie_word_embeddings to false in its config.json"
                        )
                if name in growing and tensor.shape[0] < self._shapes[name][0]:
                    tensor = grow_embedding(tensor, self._shapes[name][0])
                yield name, tensor
                del rest[name]

    def _found(self, name: str) -> list[str]:
        """List those of a parameter's names that are in the files."""
        return [alias for alias in self._names[name] if alias in self._group]

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = dequantize.read(self._files, names)
        for name, tensor in tensors.items():
            dequantize.check_finite(self._files[name], name, tensor)
        return tensors


def constants(model: nn.Module) -> set[str]:
    """Find what the family itself does not train: read with the weights, and exported unchanged.

    These are the buffers that a checkpoint of the model contains and its frozen parameters, unless an adapter, a
    teacher's place or the recipe froze them. An example is the bias by which DeepSeek-V3's router chooses experts. Its
    authors move it by the experts' load, transformers' code leaves it as it is.
    """
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    flags = {name: weight.requires_grad for name, weight in model.named_parameters()}
    untrained = {name for name, is_trained in flags.items() if not is_trained} - frozen(model)
    return buffers if adapters.is_adapted(model) or not any(flags.values()) else buffers | untrained


def frozen(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the recipe's groups freeze; see skeleton.freeze."""
    return vars(model).get("frozen", set())


def _beginnings(name: str) -> list[str]:
    """Return the first part of a name, the first two, and so on: a, a.b and a.b.c."""
    parts = name.split(".")
    return [".".join(parts[: index + 1]) for index in range(len(parts))]


def _where(stored: dict[str, Stored]) -> str:
    files = sorted({str(entry.file) for entry in stored.values()})
    return f"{', '.join(files)}: {_listed(list(stored))}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def embeddings(model: PreTrainedModel) -> set[str]:
    """Find the names of the parameters of the input embedding, the one of each layer (Gemma 4) and the output head."""
    of_layers = getattr(model.base_model, "embed_tokens_per_layer", None)
    modules = [model.get_input_embeddings(), of_layers, model.get_output_embeddings()]
    owned = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def grow_embedding(tensor: Tensor, num_rows: int) -> Tensor:
    """Extend an embedding to (num_rows, ...) with rows equal to the mean of the existing ones.

    New tokens then start neither likely nor unlikely. A random row can be far from all existing rows and spoil the loss
    of the first steps (Hewitt, 2021, "Initializing new word embeddings for pretrained language models").
    """
    more = num_rows - tensor.shape[0]
    return torch.cat([tensor, tensor.mean(dim=0, keepdim=True).expand(more, *tensor.shape[1:])])
