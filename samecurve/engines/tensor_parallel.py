"""Tensor parallelism by transformers' own plan for an architecture, applied to a model on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel, TensorParallelLayer

from samecurve.engines import expert_parallel
from samecurve.errors import ConfigurationError, DataError
from samecurve.models import lora
from samecurve.models.activation_checkpointing import layers
from samecurve.models.dropout import SequenceShard
from samecurve.optim.dtensor import all_reduce_sums, local_gradient
from samecurve.specs.environment import dated
from samecurve.specs.model_families import allow, families, unproven_uses

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from samecurve.accelerator.mesh import Mesh
    from samecurve.strategy.parallel_dims import ParallelDims
    from samecurve.strategy.plan import Strategy

KEY = "parallelism_config.parallelism_config_tp_size"
SEQUENCE_KEY = "parallelism_config.parallelism_config_tp_sequence_parallel"
# Replicated weights with a partial gradient. transformers sums the gradient in a hook after each backward pass, which
# with accumulation sums earlier micro-batches' parts again; `sum_gradients` does it once per step.
_SUMMED_HERE = "replicated_with_grad_allreduce"
_WHOLE = "samecurve_whole"
_SCATTERS = "samecurve_rowwise_scatter"  # "rowwise", but each rank gets the sum of its own tokens alone


def check(model: PreTrainedModel, strategy: Strategy) -> None:
    """Check that the strategy can cut this architecture, before any weight is loaded.

    Raises:
        ConfigurationError: the family is untested, sizes do not divide, or its plan excludes sequence parallelism.
    """
    config, size, problems = model.config.get_text_config(), strategy.dims.tp, []
    family, spreads = model.config.model_type, strategy.dims.ep > 1
    known = families("expert_and_tensor_parallel") if spreads else families("tensor_parallel")
    if family not in known:
        library, cannot = dated("transformers"), ""
        if not getattr(config, "base_model_tp_plan", None):
            cannot = f"{library} has no tensor-parallel plan for the layers of a {family}"
        else:
            embedding = next(name for name, part in model.named_modules() if part is model.get_input_embeddings())
            if embedding not in _resolve(model, strategy.dims):
                cannot = f"the tensor-parallel plan of a {family} in {library} leaves its embedding whole"
        why = cannot or f"{family} has not been tested under {'expert and ' * spreads}tensor parallelism"
        fix = f"use {', '.join(sorted(known))}, or configs/{'fsdp_ep' if spreads else 'fsdp'}.yaml"
        use = f"tensor parallelism of a {family}; run `python -m samecurve compare RECIPE`"
        refusal = f"{strategy.path}: {KEY}: found {size}, but {why}; {fix}"
        allow(unproven_uses(model), use, refusal, bool(cannot))
    plan = _resolve(model, strategy.dims)
    by_head = any(_is_by_head(name, style) for name, style in plan.items())
    heads = {"num_attention_heads": config.num_attention_heads}
    heads["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # a plan that gathers queries and keys cuts their features
    counts = heads if by_head else {"hidden_size": config.hidden_size}
    counts |= {"vocab_size": config.vocab_size}
    if any(name.endswith("down_proj") for name in plan):
        counts |= {"intermediate_size": config.intermediate_size}
    for name, count in counts.items():
        if count % size:
            sizes = [ranks for ranks in range(1, count + 1) if all(other % ranks == 0 for other in counts.values())]
            text = f"the model's {name} is {count}, which {size} does not divide"
            fix = f"use a size that divides all of its sizes: {', '.join(map(str, sizes[:12]))}"
            problems.append(f"found {size}, but {text}; {fix}")
    if strategy.tp_sequence_parallel and not any(style == "rowwise" for style in plan.values()):
        text = f"found true, but the plan of {family} in {dated('transformers')} gathers whole activations in layers"
        raise ConfigurationError(f"{strategy.path}: {SEQUENCE_KEY}: {text}; set it to false")
    if problems:
        raise ConfigurationError("\n".join(f"{strategy.path}: {KEY}: {text}" for text in problems))


def apply(model: PreTrainedModel, mesh: Mesh, cuts_sequence: bool) -> list[str]:
    """Cut the weights of the model, on the meta device, over the mesh's dimension `tp`, and change its layers in place.

    Args:
        model: the model, with its adapters.
        cuts_sequence: whether norms and residuals are computed for a part of the tokens, see share_inputs.

    Returns:
        The names of the parameters whose gradient is a sum over the ranks, see `sum_gradients`.
    """
    tp, plan, modules = mesh.devices["tp"], _resolve(model, mesh.dims), dict(model.named_modules())
    summed = [name for name, style in plan.items() if style == _SUMMED_HERE]
    # attention and MLPs: the parents of layers whose columns are cut
    blocks = {name.rpartition(".")[0]: None for name, style in plan.items() if style == "colwise" and name in modules}
    if cuts_sequence:
        ALL_PARALLEL_STYLES.register(_SCATTERS, RowwiseParallel(output_layouts=Shard(1)))  # pyright: ignore[reportArgumentType]
        plan = {name: _SCATTERS if style == "rowwise" else style for name, style in plan.items()}
    plan = _with_adapters(plan, modules)
    for name, style_name in plan.items():
        style, (parent, _, weight) = ALL_PARALLEL_STYLES[style_name], name.rpartition(".")
        if style_name == _SUMMED_HERE:
            continue
        if name in modules:
            style.install_forward(modules[name], tp)
        else:
            style.validate_param(modules[parent], weight, tp, parameter_name=name)
            style.shard_param(modules[parent], weight, tp)
    model.tie_weights()  # the embedding's weight has been replaced
    share_inputs([modules[name] for name in blocks], tp, cuts_sequence)
    if cuts_sequence:
        return cut_sequence(model, tp)
    return [name for name, _ in model.named_parameters() if name in summed]


def parts(model: PreTrainedModel, mesh: Mesh) -> dict[str, SequenceShard]:
    """Return, by name, the modules with dropout on tensors of which this rank has a part only.

    These are attention modules, whose probabilities are divided by heads, and the dropout of adapters in row-parallel
    layers, whose input features are divided.
    """
    if mesh.dims.tp == 1:
        return {}
    index, count, sharded = mesh.dims.place(mesh.rank)["tp"], mesh.dims.tp, {}
    # Ulysses divides a rank's heads once more, over ranks that then have whole rows; no other exchange of rows allows
    # attention to drop (see context_parallel.check)
    own = mesh.dims.place(mesh.rank)["cp"]
    heads = SequenceShard(1, index * mesh.dims.cp + own, count * mesh.dims.cp, of_chunks=mesh.dims.cp == 1)
    for name, style in _resolve(model, mesh.dims).items():
        if _is_by_head(name, style):
            sharded[name.rpartition(".")[0]] = heads
        elif style == "rowwise":
            sharded[f"{name}.lora_dropout.{lora.NAME}"] = SequenceShard(axis=-1, index=index, count=count)
    return sharded


def _is_by_head(name: str, style: str) -> bool:
    return style == "colwise" and name.endswith("k_proj")


def _resolve(model: PreTrainedModel, dims: ParallelDims) -> dict[str, str]:
    """Return the style of each module and parameter of the model that is cut, by name.

    Experts that are spread over ranks are not cut as well: all tensor-parallel ranks compute the same ones, for the
    same tokens, and so have their whole gradient.
    """
    rules, spread = dict(model.tp_plan), tuple(expert_parallel.experts_of(model)) if dims.ep > 1 else ()
    if rules and isinstance(getattr(model.base_model, "embed_tokens", None), nn.Embedding):
        # implied up to transformers 5.17
        rules.setdefault(f"{model.base_model_prefix}.embed_tokens", "embedding_rowwise")
    weights = {name for name, _ in model.named_parameters()}  # without a tied head's
    plan = {}
    for module_name, module in model.named_modules():
        if module_name.startswith(spread):
            continue
        rule = rules.get(_without_numbers(module_name))
        # weights before their module, as a style shards first
        for weight, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{weight}" if module_name else weight
            if name in weights and (style := rules.get(_without_numbers(name), rule)):
                plan[name] = style
        if rule:
            plan[module_name] = rule
    return plan


def _without_numbers(name: str) -> str:
    """Write a name as the rules of a plan do: layers.*.mlp for layers.0.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _with_adapters(plan: dict[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Replace an adapted layer's style by styles of its frozen layer and of the adapter's two matrices.

    In a column-parallel layer B is column-parallel, too; A is replicated, and its gradient is a sum over the ranks. In
    a row-parallel layer A is row-parallel, too, and its products are summed over the ranks; B is replicated.
    """
    ALL_PARALLEL_STYLES.register(_WHOLE, _Whole())  # pyright: ignore[reportArgumentType]  # typed as a function
    styles = {}
    for name, style in plan.items():
        if not hasattr(modules.get(name), "base_layer"):
            styles[name] = style
            continue
        adapted = {"base_layer": style, f"lora_A.{lora.NAME}": style}
        if style.startswith("colwise"):
            adapted |= {f"lora_A.{lora.NAME}": _WHOLE, f"lora_B.{lora.NAME}": style}
        for inner, its_style in adapted.items():
            weights = modules[f"{name}.{inner}"].named_parameters(recurse=False)
            styles |= {f"{name}.{inner}.{weight}": its_style for weight, _ in weights}
            styles[f"{name}.{inner}"] = its_style
    return styles


class _Whole(TensorParallelLayer):
    """The style of a layer that each rank has whole, and whose gradient DTensor sums over the ranks."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        weight = module.get_parameter(param)
        whole = distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(param, nn.Parameter(whole, requires_grad=weight.requires_grad))

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple:
        states, *others = args
        if not isinstance(states, DTensor):
            states = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
        return (states, *others), kwargs


def allocate(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Allocate this rank's part of the weights, uninitialized, where nothing else shards the model."""
    model.to_empty(device=device)
    model.tie_weights()  # allocation may have given each of two tied modules its own parameter
    return model


def sum_gradients(weights: Sequence[Tensor], mesh: Mesh) -> None:
    """Sum, once per step, the gradients of replicated weights that each rank applies to its own heads or tokens.

    Collective over `tp`, in place.
    """
    gradients = [local_gradient(weight) for weight in weights if weight.grad is not None]
    if gradients:
        sums = all_reduce_sums(gradients, mesh.devices["tp"].get_group())
        torch._foreach_copy_(gradients, sums)


def groups_by_mesh(groups: list[dict]) -> list[dict]:
    """Divide an optimizer's parameter groups, because one fused update takes the weights of one mesh only."""
    divided = []
    for group in groups:
        lists = {key: group[key] for key in ("params", "names") if key in group}  # one entry for each weight
        by_mesh: dict[object, list[int]] = {}
        for place, weight in enumerate(group["params"]):
            by_mesh.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(place)
        for places in by_mesh.values():
            divided.append({**group, **{key: [values[place] for place in places] for key, values in lists.items()}})
    return divided


_SEQUENCE = 1  # axis of (rows, tokens, features)
_MARK = "samecurve_cuts_sequence"


def share_inputs(blocks: Iterable[nn.Module], mesh: DeviceMesh, is_cut: bool) -> None:
    """Give each block its input whole, as a tensor whose gradient is summed over the mesh's ranks once.

    Attention and MLP begin with column-parallel layers that share one input. Each layer contributes to the input's
    gradient; the contributions are summed on the rank first, and then over the ranks, once per block.

    With sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2) each rank computes norms and
    residuals for a part of the tokens. An all-gather before a block and a reduce-scatter after it replace the
    all-reduce, which sends as much as both. Masks and rotary angles stay whole, because transformers derives them from
    the embeddings. So the sequence is cut before the first layer and joined after the last norm.

    Args:
        blocks: modules whose first argument is `hidden_states`, (rows, tokens, features).
        mesh: the tensor-parallel ranks.
        is_cut: whether each rank has its part of the tokens, else all ranks have all.
    """
    placement = Shard(_SEQUENCE) if is_cut else Replicate()

    def share(_block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not is_cut and not torch.is_grad_enabled():  # nothing to gather, and no gradient to sum
            return args, kwargs
        states = args[0] if args else kwargs["hidden_states"]
        whole = _moved(states, mesh, placement, Replicate())
        return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

    for block in blocks:
        block.register_forward_pre_hook(share, with_kwargs=True)


def cut_sequence(model: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Install hooks by which all layers compute norms and residuals on this rank's part of each row.

    A forward pass then raises DataError if the number of ranks does not divide the length of the rows.

    Returns:
        The names of the parameters whose gradients have to be summed over the ranks, because each has its own tokens.
    """
    blocks, cut_tokens, all_tokens = layers(model), Shard(_SEQUENCE), Replicate()
    norm = model.base_model.get_submodule("norm")

    def cut(_layer: nn.Module, args: tuple) -> tuple:
        length, size = args[0].shape[_SEQUENCE], mesh.size()
        if length % size:
            raise DataError(
                f"parallelism_config_tp_sequence_parallel: rows of {length} tokens cannot be divided over {size} "
                f"ranks; pad them to a multiple of {size}, or set the key to false"
            )
        return _moved(args[0], mesh, all_tokens, cut_tokens).to_local(), *args[1:]

    def join(_norm: nn.Module, _args: tuple, states: Tensor) -> Tensor:
        return _moved(states, mesh, cut_tokens, all_tokens).to_local()

    blocks[0].register_forward_pre_hook(cut)
    norm.register_forward_hook(join)
    setattr(norm, _MARK, True)
    inside = {id(parameter) for module in (*blocks, norm) for parameter in module.parameters()}
    return [n for n, p in model.named_parameters() if id(p) in inside and not isinstance(p, DTensor)]


def cuts_sequence(model: nn.Module) -> bool:
    """Whether `cut_sequence` has changed the model."""
    return any(hasattr(module, _MARK) for module in model.modules())


def _moved(states: Tensor, mesh: DeviceMesh, current: Placement, wanted: Placement) -> DTensor:
    """Change where the tokens of (rows, tokens, features) are; the gradient goes the other way."""
    return DTensor.from_local(states, mesh, [current], run_check=False).redistribute(placements=[wanted])
