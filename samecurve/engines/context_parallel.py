"""Context parallelism: which tokens of a micro-batch a rank computes, and the model that computes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from samecurve.data.micro_batch import position_ids
from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models import dropout
from samecurve.models.attention import context, head_tail, varlen
from samecurve.models.hf_config import is_classifier
from samecurve.models.skeleton import construct
from samecurve.specs.model_families import allow, families, looks_ahead, may_be_tried, unproven_uses

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from samecurve.accelerator.mesh import Mesh
    from samecurve.config.schema import Adapter, Recipe
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.strategy.plan import Strategy

_OF_WHOLE_ROWS = ("position_ids", "attention_mask")  # masks and rotary angles are made of them


@dataclass(frozen=True)
class SequencePart:
    """The tokens of each row that this rank computes: part `index` of `count` equal ones.

    Attributes:
        is_balanced: whether it is the two chunks of head_tail.chunks, else consecutive tokens.
        by_model: whether the model cuts and joins the rows itself, see `cut_within`.
    """

    index: int = 0
    count: int = 1
    is_balanced: bool = False
    by_model: bool = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """Indices of the rank's chunks among the equal ones of a row."""
        return head_tail.chunks(self.index, self.count) if self.is_balanced else (self.index,)

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """Cut a micro-batch to this rank's tokens, before its copy to the device. Labels per row stay whole.

        Rows whose length is not a multiple of the number of chunks are padded after their last token, and no earlier
        token sees the padding. `position_ids` and `attention_mask` still cover whole rows, and `facts.counts` still
        counts the tokens of whole rows.
        """
        rows, length = batch.inputs["input_ids"].shape
        if length % (self.count * len(self.chunks)) and batch.facts:  # the documents end before the padding
            batch = replace(batch, facts=batch.facts._replace(documents=None))
        if self.by_model:
            return batch
        inputs = self.cut_inputs(batch.inputs)
        if not batch.is_by_token:
            return replace(batch, inputs=inputs)
        by_token = {name: tensor for name, tensor in batch.targets.items() if tensor.shape[:2] == (rows, length)}
        targets = batch.targets | {name: self.own(tensor, IGNORE_INDEX) for name, tensor in by_token.items()}
        positions, pins = trained_positions(targets["labels"]), torch.cuda.is_available()  # as the loader has done
        positions = positions.pin_memory() if pins and positions is not None else positions
        facts = batch.facts and batch.facts._replace(positions=positions)
        part = replace(batch, inputs=inputs, targets=targets, facts=facts)
        return part.pin_memory() if pins else part

    def cut_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut a model's inputs, (rows, tokens) each, to this rank's tokens; see `cut`."""
        given = {**inputs, "position_ids": position_ids(inputs)}
        return {
            name: self._padded(tensor, 0) if name in _OF_WHOLE_ROWS else self.own(tensor)
            for name, tensor in given.items()
        }

    def own(self, tensor: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's part of (rows, tokens), with `padding` behind the last token."""
        whole = self._padded(tensor, padding)
        if self.is_balanced:
            return head_tail.cut(whole, self.index, self.count, dim=1)
        return whole.chunk(self.count, dim=1)[self.index].contiguous()

    def join(self, parts: Tensor) -> Tensor:
        """Put (rows, tokens, ...) of all ranks, concatenated along the tokens, into the order of the row."""
        return head_tail.join(parts, self.count, dim=1) if self.is_balanced else parts

    def _padded(self, tensor: Tensor, padding: int) -> Tensor:
        missing = -tensor.shape[1] % (self.count * len(self.chunks))
        return functional.pad(tensor, (0, missing), value=padding) if missing else tensor


def part_of(strategy: Strategy, mesh: Mesh, model: PreTrainedModel) -> SequencePart:
    """Return the tokens of each row that this rank computes."""
    kind = context.KINDS.get(strategy.context_parallel)
    is_balanced, by_model = kind is not None and kind.is_balanced, is_classifier(model)
    return SequencePart(mesh.dims.index(mesh.rank, "cp"), mesh.dims.cp, is_balanced, by_model)


def build(
    skeleton: PreTrainedModel, recipe: Recipe, strategy: Strategy, mesh: Mesh, adapter: Adapter | None = None
) -> PreTrainedModel:
    """Build the skeleton's model on the meta device, so that each rank computes its part of the tokens.

    Args:
        skeleton: the architecture, on the meta device.
        mesh: this rank's place in the parallel dimensions.
        adapter: inserted if given, for the trained model; a teacher has none.

    Raises:
        ConfigurationError: as `check`.
    """
    check(skeleton, recipe, strategy)
    model = construct(type(skeleton), config_of(skeleton, strategy, mesh), torch.device("meta"), adapter)
    part = part_of(strategy, mesh, skeleton)
    cut_rotary_angles(model, part)
    if part.by_model:
        cut_within(model, part, mesh)
    return model


def check(model: PreTrainedModel, recipe: Recipe, strategy: Strategy) -> None:
    """Check that the strategy can cut the sequences of this architecture, before any weight is loaded.

    Raises:
        ConfigurationError: the family is untested, heads do not divide, or a rank cannot draw its dropout.
    """
    config, size, problems = model.config, strategy.dims.cp, []
    family, known = config.model_type, families("context_parallel")
    if family not in known:
        text = f"{strategy.path}: {strategy.context_key}: found {size}, but {family} has not been tested under context "
        allow(
            unproven_uses(model),
            f"context parallelism of a {family}; run `python -m samecurve compare RECIPE`",
            f"{text}parallelism; use {', '.join(sorted(known))}, or configs/fsdp.yaml",
            fails=not may_be_tried("cp", family),
        )
    if strategy.context_parallel == context.Ulysses.name and config.num_attention_heads // strategy.dims.tp % size:
        heads = config.num_attention_heads // strategy.dims.tp
        sizes = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
        share = f", {heads} on a rank of tensor parallelism" if strategy.dims.tp > 1 else ""
        text = f"the model's num_attention_heads is {config.num_attention_heads}{share}, which {size} does not divide"
        text += ", and each rank needs as many"
        problems.append(f"{text} heads; use a size that divides it: {sizes}; configs/fsdp_cp.yaml takes any")
    if ahead := looks_ahead(config.to_dict()):
        problems.append(f"the model's {ahead}, and context parallelism computes causal attention; use another model")
    if config._attn_implementation == "eager":
        text = "the model uses transformers' eager attention, which context parallelism cannot replace"
        problems.append(f"{text}; set model.attention to sdpa, or use a family that has it")
    # A rank can draw consecutive values of a mask only. Among the probabilities (heads, queries, keys) of a sequence,
    # these are whole heads of rows without padding.
    by_heads = strategy.context_parallel == context.Ulysses.name and not recipe.data.group_by_length
    whole_heads = by_heads and recipe.batch.sequence_length % size == 0
    rates = {key: rate for key, rate in dropout.rates(config).items() if "att" in key and not whole_heads}
    if rates:
        named = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        text = f"attention has dropout ({named}), which a rank can draw for whole heads only"
        fix = f"set it to 0 in model.config, or use configs/fsdp_ulysses.yaml on rows of one multiple of {size} tokens"
        problems.append(f"{text}; {fix}")
    if problems:
        lines = (f"{strategy.path}: {strategy.context_key}: found {size}, but {text}" for text in problems)
        raise ConfigurationError("\n".join(f"{line}, or use configs/fsdp.yaml" for line in lines))


def config_of(skeleton: PreTrainedModel, strategy: Strategy, mesh: Mesh) -> PreTrainedConfig:
    """Copy the model's config, with an attention that exchanges what the ranks of a context-parallel group lack."""
    config = copy.deepcopy(skeleton.config)
    inner = config._attn_implementation
    assert inner is not None  # `check` has seen attention
    if strategy.context_parallel == context.GatheredKeys.name and inner == varlen.NAME:
        inner = "sdpa"  # the choice of `auto`; varlen needs the queries of whole rows
    attention = context.KINDS[strategy.context_parallel](mesh.devices["cp"].get_group(), inner)
    config._attn_implementation = attention.register()
    return config


def attention_of(model: nn.Module) -> context.ContextAttention | None:
    """Return the context-parallel attention that a transformers model calls; None if it calls another."""
    config = model.config
    attention = AttentionInterface().get(getattr(config, "_attn_implementation", None) or "")
    return attention if isinstance(attention, context.ContextAttention) else None


def cut_rotary_angles(model: PreTrainedModel, part: SequencePart) -> None:
    """Make the model compute the rotary angles of its own tokens alone from the position_ids of whole rows."""
    modules = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    assert modules, f"no rotary embedding in {type(model).__name__}"
    for module in modules:
        module.register_forward_hook(lambda _module, _inputs, angles: tuple(part.own(angle) for angle in angles))


def cut_within(model: PreTrainedModel, part: SequencePart, mesh: Mesh) -> None:
    """Cut whole rows at the entry of a classifier's body, and join its scores of the tokens (rows, tokens, classes).

    The forward of transformers' classifiers finds each row's last token by its ids, and takes the scores of that token.
    """

    def cut(_body: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        given = {name: kwargs[name] for name in _OF_WHOLE_ROWS if kwargs.get(name) is not None}
        own = part.cut_inputs({"input_ids": args[0], **given})
        return (own.pop("input_ids"),), kwargs | own

    def join(_score: nn.Module, _args: Any, scores: Tensor) -> Tensor:
        return _joined(scores, part, mesh)

    model.base_model.register_forward_pre_hook(cut, with_kwargs=True)
    model.get_submodule("score").register_forward_hook(join)


def gather_outputs(outputs: Tensor, part: SequencePart, mesh: Mesh, length: int) -> Tensor:
    """Gather the outputs of all ranks of the group into whole rows. Collective.

    In the backward pass each rank gets the gradient of its own tokens, summed over the ranks (reduce-scatter).

    Args:
        outputs: (rows, own tokens, ...) of this rank.
        part: which tokens these are.
        mesh: gives the group.
        length: tokens of a whole row, without the padding of `SequencePart.cut`.

    Returns:
        (rows, length, ...); `outputs` itself if the rows were not cut or the model has joined them.
    """
    return outputs if part.count == 1 or part.by_model else _joined(outputs, part, mesh)[:, :length]


def _joined(outputs: Tensor, part: SequencePart, mesh: Mesh) -> Tensor:
    return part.join(context.all_gather(outputs, 1, mesh.devices["cp"].get_group()))


def sum_parts(sums: Tensor, mesh: Mesh) -> Tensor:
    """Sum a tensor, of the same shape on each rank, over the ranks that have parts of the same rows. Collective.

    In the backward pass the gradients of the result are summed over these ranks, too.
    """
    return context.all_gather(sums[None], 0, mesh.devices["cp"].get_group()).sum(dim=0)
