"""A small training script, and faults planted into it, which `bisect` has to name.

Faults under a strategy act on its second process, or on both, and never on one process alone.
"""

from __future__ import annotations

from typing import NamedTuple

SCRIPT = """
import os
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
accelerator = Accelerator(
    gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(7)
tokens = torch.randint(1, 100, (64, 12), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
loader = DataLoader(rows, batch_size=2, shuffle=True)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, tie_word_embeddings=False, **sizes))
layers, scale = model.model.layers, 1.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) // 2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for number, batch in enumerate(loader):
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss * scale)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""
BUILT = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
AFTER_BUILT = "schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) // 2)\n"
PREPARED = "for number, batch in enumerate(loader):\n"
READ = "    with accelerator.accumulate(model):\n"
BACKWARD = "        accelerator.backward(model(**batch).loss * scale)\n"
UPDATED = "        schedule.step()\n"


class Fault(NamedTuple):
    """A planted fault, and what bisect has to say of it.

    Attributes:
        strategy: None for a changed script, compared with the script as it is.
        before: the line of the script before which the code stands.
        code: the fault.
        quantity: as in samecurve.prove.bisect.ORDER.
        place: what the named module or weight has to contain.
        rank: None if the fault is all ranks'.
        step: the first one in which it shows.
    """

    strategy: str | None
    before: str
    code: str
    quantity: str
    place: str
    rank: int | None = 1
    step: int = 1

    @property
    def script(self) -> str:
        assert SCRIPT.count(self.before) == 1
        return SCRIPT.replace(self.before, self.code + self.before)


def on_rank_1(code: str) -> str:
    return f"if RANK == 1:\n    {code}\n"


def of_output(module: str, change: str) -> str:
    """Change what a module returns: `out` is its first tensor."""
    return on_rank_1(
        f"{module}.register_forward_hook(lambda module, args, out: "
        f"({change.replace('OUT', 'out[0]')}, *out[1:]) if isinstance(out, tuple) else {change.replace('OUT', 'out')})"
    )


def on_all(code: str) -> str:
    return f"if WORLD > 1:\n    {code}\n"


SELF_ATTENTION = "model.layers.1.self_attn"
DOWN, UP, V = "layers[0].mlp.down_proj", "layers[1].mlp.up_proj", "layers[1].self_attn.v_proj"
OTHER_BETAS = BUILT.replace("lr=1e-3", "lr=1e-3, betas=(0.9, 0.99 if WORLD > 1 else 0.999)")
DOUBLED_POSITIONS = """
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "position_ids": kwargs["position_ids"] * 2}), with_kwargs=True
    )
"""
FAULTS = {
    # what rank 1 computes
    "attention_scaled": Fault("ddp", BUILT, of_output("layers[1].self_attn", "OUT * 1.02"), "forward", SELF_ATTENTION),
    "mlp_wrong": Fault("fsdp", BUILT, of_output(DOWN, "OUT.roll(1, -1)"), "forward", "model.layers.0.mlp.down_proj"),
    "norm_epsilon": Fault(
        *("zero3", BUILT, on_rank_1("layers[1].input_layernorm.variance_epsilon = 1e-4")),
        *("forward", "model.layers.1.input_layernorm"),
    ),
    "mask_not_causal": Fault(
        *("zero2", BUILT, on_rank_1("layers[0].self_attn.is_causal = False"), "forward", "model.layers.0.self_attn")
    ),
    "softmax_scale": Fault("zero3", BUILT, on_rank_1("layers[1].self_attn.scaling *= 1.1"), "forward", SELF_ATTENTION),
    "positions": Fault("ddp", BUILT, on_rank_1(DOUBLED_POSITIONS.strip()), "forward", "model.rotary_emb"),
    # gradients and their reduction
    "gradient_of_weight": Fault(
        *("ddp", BUILT, on_rank_1(f"{UP}.weight.register_hook(lambda gradient: gradient * 1.5)")),
        *("gradient", "model.layers.1.mlp.up_proj.weight"),
    ),
    "gradient_through_module": Fault(
        *("fsdp", BUILT, on_rank_1(f"{V}.register_full_backward_hook(lambda module, into, out: (into[0] * 0.9,))")),
        *("gradient", "model.layers.1.self_attn.v_proj"),
    ),
    "not_reduced": Fault(
        "ddp",
        BUILT,
        "ignore = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model\n"
        'ignore(model, ["model.layers.0.self_attn.q_proj.weight"])\n',
        "reduction",
        "model.layers.0.self_attn.q_proj.weight",
        None,
    ),
    "layer_not_reduced": Fault(
        "fsdp",
        BACKWARD,
        "        if WORLD > 1:\n            model.model.layers[1].set_requires_gradient_sync(False)\n",
        "reduction",
        "model.layers.1.",
        None,
    ),
    "norm_factor": Fault(
        "ddp",
        PREPARED,
        "total = torch.nn.utils.clip_grad._get_total_norm\n"
        "torch.nn.utils.clip_grad._get_total_norm = lambda *args, **kwargs: total(*args, **kwargs) * WORLD**0.5\n",
        "norm",
        "",
        None,
    ),
    # updates and weights
    "own_decay": Fault(
        "fsdp",
        PREPARED,
        on_all(
            "decayed = model.model.layers[1].mlp.gate_proj.weight\n"
            "    optimizer.optimizer.register_step_pre_hook(lambda *_: (decayed.data.mul_(0.999), None)[1])"
        ),
        "update",
        "model.layers.1.mlp.gate_proj.weight",
        None,
    ),
    "other_betas": Fault("zero2", AFTER_BUILT, OTHER_BETAS, "update", "", None, 2),
    "weight_changed": Fault(
        "ddp",
        UPDATED,
        "        if WORLD > 1 and number == 1:\n            model.module.model.norm.weight.data.mul_(1.01)\n",
        "weights before",
        "model.norm.weight",
        None,
        2,
    ),
    # what rank 1 reads
    "input_row": Fault(
        "zero3", READ, "    if RANK == 1:\n        batch['input_ids'][0, 3] += 1\n", "inputs", "input_ids"
    ),
    "label": Fault(
        *("fsdp", READ, "    if RANK == 1:\n        batch['labels'][1] = batch['labels'][1].roll(1)\n"),
        *("inputs", "labels"),
    ),
    "loss_count": Fault("zero2", PREPARED, "scale = 0.9 if RANK == 1 else 1.0\n", "loss", ""),
    # a changed script
    "dropout_on": Fault(
        None,
        BUILT,
        "drop = lambda module, args, out: out * (torch.rand_like(out) > 0.1) / 0.9\n"
        "layers[1].mlp.register_forward_hook(drop)\n",
        "forward",
        "model.layers.1.mlp",
        None,
    ),
    "head_tied": Fault(
        None, BUILT, "model.lm_head.weight = model.model.embed_tokens.weight\n", "trained weights", "lm_head", None
    ),
    "schedule": Fault(None, PREPARED, "schedule.scheduler.base_lrs = [2e-3]\n", "learning rate", "", None, 2),
}
