"""One rank of a strategy that has no pipeline on fake tensors: the whole model, its loss and its optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from samecurve.accelerator import fsdp, launch_env
from samecurve.accelerator.mesh import Mesh
from samecurve.bench.fake_rank import CPU, StepTracker, meta_model
from samecurve.engines import context_parallel, expert_parallel, start, tensor_parallel
from samecurve.engines.loss_implementation import install_loss
from samecurve.losses.chunked_cross_entropy import TokenSums
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.models import bf16_copies, fp32_weights
from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.optim import factory
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.planner.activations import expert_imbalance
from samecurve.planner.job import Job
from samecurve.specs.precision import compute_dtype
from samecurve.strategy.plan import Plan


class FakeModel:
    """Implementation of FakeRank."""

    optimizer: torch.optim.Optimizer

    def __init__(self, plan: Plan, job: Job, depth: int, mesh: Mesh):
        self._plan, self._job, self._mesh = plan, job, mesh
        dims = plan.strategy.dims
        if plan.strategy.shards_model:
            assert mesh.sharding  # a mesh cannot be made of fake tensors
        if dims.tp > 1:
            mesh.devices["tp"].get_group()
        if dims.ep > 1:
            mesh.experts["ep"].get_group()
            mesh.experts["efsdp"].get_group()
        self._skeleton = meta_model(plan, job, depth)
        if dims.cp > 1:
            self.module: Any = context_parallel.build(self._skeleton, plan.recipe, plan.strategy, mesh)
        else:
            self.module = meta_model(plan, job, depth)

    def allocate(self) -> None:
        """Change and shard the model as TorchEngine does, without compilation and other kernels."""
        recipe, strategy, mesh, model = self._plan.recipe, self._plan.strategy, self._mesh, self.module
        model = fp32_weights.cast_weights(model, recipe.optimizer)
        if strategy.dims.tp > 1:
            tensor_parallel.apply(model, mesh, strategy.tp_sequence_parallel)
        if strategy.dims.ep > 1:
            expert_parallel.apply(model, mesh)
            for experts in expert_parallel.experts_of(model).values():
                experts.forward.announce = partial(_announce, experts.forward, expert_imbalance(self._job))  # pyright: ignore
        if not strategy.shards_model:
            tensor_parallel.allocate(model, CPU)
        copies = start.computes_in_copies(self._plan)
        if copies:
            bf16_copies.install_in_layers(model)
        checkpoint_layers(model, recipe.memory)
        task = cast(Any, SimpleNamespace(by_token=True, by_log_probability=False))
        install_loss(model, self._skeleton, task, recipe, CPU)
        if strategy.shards_model:
            launch_env.export_launch_env(strategy)
            state = SimpleNamespace(fsdp_plugin=start.plugins(self._plan)["fsdp_plugin"])
            whole = fp32_weights.names(model, recipe.precision)
            accelerator = cast(Any, SimpleNamespace(state=state, device=CPU))
            expert_parallel.shard(model, mesh, accelerator)
            model = fsdp.shard(accelerator, model, mesh, whole)
        elif copies:
            bf16_copies.install_around(model)
        groups = parameter_groups(model.named_parameters(), recipe.optimizer, roles_of(self._skeleton))
        groups = tensor_parallel.groups_by_mesh(groups)
        self.module = model
        self.optimizer = factory.build_optimizer(groups, recipe.optimizer, recipe.precision, recipe.seed)
        rows, length = self._job.micro_batch, self._job.seq
        # under context parallelism, angles and masks are made of whole rows' positions
        self._tokens = torch.zeros((rows, length // self._job.dims.cp), dtype=torch.long)
        self._positions = torch.arange(length).expand(rows, length)

    def inputs(self) -> list[Tensor]:
        return [self._tokens, self._positions]

    def step(self, tracker: StepTracker | None) -> float:
        """Train a step of at most two micro-batches."""
        held, recipe = 0.0, self._plan.recipe
        casts = self._plan.strategy.shards_model or start.computes_in_copies(self._plan)
        autocast = not casts and recipe.precision != "fp32"
        context = torch.autocast("cpu", compute_dtype(recipe.precision)) if autocast else nullcontext()
        for _ in range(min(self._job.grad_accum, 2)):
            with context:
                inputs = {"input_ids": self._tokens, "position_ids": self._positions}
                if not self._job.chunked_loss:
                    loss = token_loss_sum(self.module(**inputs).logits, self._tokens)
                else:
                    loss = self.module(**inputs, sums=TokenSums(token_loss_sum, {"labels": self._tokens}, None))
            loss.backward()
            del loss
            held = tracker.bytes_now() if tracker else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return held


def _announce(
    dispatch: expert_parallel.Dispatch, imbalance: float, chosen: Tensor
) -> tuple[Tensor, list[int], list[int]]:
    """Stand in for Dispatch.announce, which needs the router's choices: every rank sends equally many tokens to each.

    What arrives is `imbalance` times as much, as the formulas assume of the rank whose experts get the most.
    """
    ranks = dispatch.group.size()
    sent = [len(chosen) // ranks + (rank < len(chosen) % ranks) for rank in range(ranks)]
    received = [round(imbalance * sent_tokens) for sent_tokens in sent]
    return chosen.new_zeros(sum(received)), sent, received
