"""Twenty steps of another library on given rows, with a checkpoint after ten: what `adopt` has to continue.

    python foreign_loop.py FORMAT FOLDER

FOLDER has rows.pt, a list of steps with `input_ids`, `attention_mask` and `shift_labels`, each (rows, tokens), and
config.json of a transformers model. Writes the checkpoint and continued.pt: losses of steps 11 to 20 and last weights.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler, set_seed

SAVED, STEPS, WARMUP = 10, 20, 5
RATE, DECAY, NORM = 3e-3, 0.1, 1.0


def model_of(folder: Path) -> torch.nn.Module:
    set_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")


def loss_of(model: torch.nn.Module, rows: dict[str, Tensor], divisor: int) -> Tensor:
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["shift_labels"].flatten(), reduction="sum")
    return summed / divisor


def finish(folder: Path, losses: list[float], weights: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        torch.save({"losses": losses[SAVED:], "weights": weights}, folder / "continued.pt")


class RowsInOrder(Trainer):
    losses: list[float]

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        # each rank's part times their number
        self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return loss


def trainer(folder: Path, steps: list[dict[str, Tensor]], **strategy: Any) -> None:
    rows = [{key: values[index] for key, values in rows.items()} for rows in steps for index in range(8)]
    for row in rows:
        row["labels"] = row["shift_labels"]
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=NORM,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        save_steps=SAVED // 2,
        report_to="none",
        remove_unused_columns=False,  # among them shift_labels
        use_cpu=not strategy,
        disable_tqdm=True,
        logging_strategy="no",
        **strategy,
    )
    made = RowsInOrder(model_of(folder), arguments, train_dataset=rows)
    made.losses = []
    made.train()
    losses = [sum(pair) for pair in zip(made.losses[::2], made.losses[1::2], strict=True)]
    if isinstance(made.model_wrapped, FullyShardedDataParallel):  # whose state_dict fails on a CPU
        with FullyShardedDataParallel.summon_full_params(made.model_wrapped):
            weights = {name: value.detach().clone() for name, value in made.model.named_parameters()}
        weights = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in weights.items()}
    else:
        weights = made.accelerator.get_state_dict(made.model_wrapped)
    if made.is_world_process_zero():
        for later in range(SAVED + SAVED // 2, STEPS + 1, SAVED // 2):
            (folder / "out" / f"checkpoint-{later}").rename(folder / f"later-{later}")
    finish(folder, losses, weights)


def trainer_fsdp(folder: Path, steps: list[dict[str, Tensor]], kind: str, version: int = 2) -> None:
    fsdp_on_cpu()
    given = {"version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    given["sync_module_states"] = False  # which asks for a GPU
    trainer(folder, steps, fsdp=True, fsdp_config=given, accelerator_config={"use_configured_state": True})


def trainer_zero(folder: Path, steps: list[dict[str, Tensor]], stage: int) -> None:
    zero_on_cpu()
    config = ZERO | {"zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}}
    trainer(folder, steps, deepspeed=config, accelerator_config={"use_configured_state": True})


def two_groups(model: torch.nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) > 1]  # under ZeRO-3 flat
    vectors = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def own_part(rows: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Cut this rank's rows of a step into `count` micro-batches."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    parts = {key: values.chunk(world)[rank].chunk(count) for key, values in rows.items()}
    return [{key: values[index] for key, values in parts.items()} for index in range(count)]


def accelerate(folder: Path, steps: list[dict[str, Tensor]], **plugins: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    # saves checkpoint_5 to checkpoint_14, of which the newest is not the last by the alphabet
    config = ProjectConfiguration(str(folder / "out"), automatic_checkpoint_naming=True, iteration=SAVED // 2)
    # which would step the schedule once per process
    options = {"step_scheduler_with_optimizer": False, "gradient_accumulation_steps": 2, "project_config": config}
    accelerator = Accelerator(cpu=not plugins, **options, **plugins)
    plain = model_of(folder)
    optimizer = torch.optim.AdamW(two_groups(plain), RATE, weight_decay=DECAY)
    schedule = get_scheduler("linear", optimizer, WARMUP, STEPS)
    model, optimizer, schedule = accelerator.prepare(plain, optimizer, schedule)
    accelerator.register_for_checkpointing(torch.nn.Linear(2, 2))
    losses = []
    for number, rows in enumerate(steps, 1):
        divisor, loss = int((rows["shift_labels"] != -100).sum()), torch.zeros(())
        for part in own_part(rows, 2):
            with accelerator.accumulate(model):
                piece = loss_of(model, part, divisor)
                accelerator.backward(2 * accelerator.num_processes * piece)  # by which accumulation and ranks divide
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), NORM)
                optimizer.step()
                optimizer.zero_grad()
            loss += piece.detach()
        schedule.step()
        losses.append(accelerator.reduce(loss).item())
        if number <= SAVED:
            accelerator.save_state()
    finish(folder, losses, accelerator.get_state_dict(model))
    accelerator.end_training()


def fsdp_on_cpu() -> None:
    """Let Accelerate shard on a CPU, where it would train the ranks apart (samecurve.accelerator.cpu_bridge)."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState(backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def fsdp(folder: Path, steps: list[dict[str, Tensor]], kind: str) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=kind,
    )
    accelerate(folder, steps, fsdp_plugin=plugin)


ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": NORM,
    "zero_allow_untested_optimizer": True,
}


def zero_on_cpu() -> None:
    """Let Accelerate and DeepSpeed reduce over gloo, where each rank would train alone."""
    os.environ["DS_ACCELERATOR"] = os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    import deepspeed.ops
    from accelerate.state import PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
    PartialState(backend="gloo")


def accelerate_zero(folder: Path, steps: list[dict[str, Tensor]], stage: int) -> None:
    from accelerate.utils import DeepSpeedPlugin

    zero_on_cpu()
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    batch = {"train_micro_batch_size_per_gpu": 4 // int(os.environ["WORLD_SIZE"]), "gradient_accumulation_steps": 2}
    accelerate(folder, steps, deepspeed_plugin=DeepSpeedPlugin(ZERO | batch | {"zero_optimization": zero}))


def zero(folder: Path, steps: list[dict[str, Tensor]], stage: int) -> None:
    zero_on_cpu()
    import deepspeed

    plain = model_of(folder)
    optimizer = torch.optim.AdamW(two_groups(plain), RATE, weight_decay=DECAY)
    schedule = get_scheduler("linear", optimizer, WARMUP, STEPS)
    batch = {"train_micro_batch_size_per_gpu": 8 // int(os.environ["WORLD_SIZE"]), "gradient_accumulation_steps": 1}
    config = ZERO | batch | {"zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer, config=config)
    world, losses = torch.distributed.get_world_size(), []
    for number, rows in enumerate(steps, 1):
        (part,) = own_part(rows, 1)
        loss = loss_of(engine, part, int((rows["shift_labels"] != -100).sum()))
        engine.backward(world * loss)
        engine.step()
        schedule.step()
        torch.distributed.all_reduce(loss := loss.detach())
        losses.append(loss.item())
        if number == SAVED:
            engine.save_checkpoint(str(folder / "out"))
    with deepspeed.zero.GatheredParameters([*plain.parameters()], enabled=stage == 3):
        finish(folder, losses, {name: value.detach().clone() for name, value in plain.named_parameters()})
    torch.distributed.destroy_process_group()


def dcp(folder: Path, steps: list[dict[str, Tensor]]) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model = model_of(folder)
    optimizer = torch.optim.AdamW(two_groups(model), RATE, weight_decay=DECAY)
    schedule, losses = get_scheduler("linear", optimizer, WARMUP, STEPS), []
    for number, rows in enumerate(steps, 1):
        loss = loss_of(model, rows, int((rows["shift_labels"] != -100).sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == SAVED:
            states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            save(states, checkpoint_id=str(folder / "out" / f"step-{number}"), no_dist=True)
    finish(folder, losses, model.state_dict())


FORMATS = {"trainer": trainer, "accelerate": accelerate, "dcp": dcp}
for made, by in (("zero", zero), ("accelerate_zero", accelerate_zero), ("trainer_zero", trainer_zero)):
    FORMATS |= {f"{made}{stage}": partial(by, stage=stage) for stage in (1, 2, 3)}
for kind in ("full", "sharded"):
    stored = f"{kind.upper()}_STATE_DICT"
    FORMATS |= {f"fsdp_{kind}": partial(fsdp, kind=stored), f"trainer_fsdp_{kind}": partial(trainer_fsdp, kind=stored)}
FORMATS["trainer_fsdp1_sharded"] = partial(trainer_fsdp, version=1, kind="SHARDED_STATE_DICT")


def read_back(name: str, folder: Path, checkpoint: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Load a checkpoint by the library itself into a new model, and return the losses of the next steps and weights."""
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = model_of(folder)
    optimizer = torch.optim.AdamW(two_groups(model), 1.0)
    schedule = get_scheduler("linear", optimizer, WARMUP, STEPS)
    if name == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.load_state(str(checkpoint))
    else:
        # the schedule's function wants the peak, and its own count of the steps
        states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0}
        load(states, checkpoint_id=str(checkpoint), no_dist=True)
        model.load_state_dict(states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
        schedule.base_lrs = [RATE, RATE]
        schedule.last_epoch = states["step"]
    losses = []
    for rows in torch.load(folder / "rows.pt")[SAVED:]:
        loss = loss_of(model, rows, int((rows["shift_labels"] != -100).sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def main(name: str, folder: Path) -> None:
    FORMATS[name](folder, torch.load(folder / "rows.pt"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
