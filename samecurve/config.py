"""The recipe's schema: what is trained. How it is spread over devices is the strategy's business (engines/)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, NonNegativeInt


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """`path`: a pretrained Hugging Face folder or hub name. `config`: the fields of a from-scratch config."""

    path: str | None = None
    config: dict[str, Any] | None = None
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"


class Tokenizer(Section):
    """`path`: a tokenizer's folder (default: `model.path`). `vocabulary_size`: train a byte-level BPE on the data instead."""

    path: str | None = None
    vocabulary_size: PositiveInt | None = None


class Data(Section):
    path: str | None = None
    pattern: str | None = None
    text_column: str = "text"
    packing: bool = True
    held_out_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    cache_dir: str | None = None


class Batch(Section):
    """In global terms, so that the curve does not depend on the number of devices."""

    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt = 1
    sequence_length: PositiveInt


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Schedule(Section):
    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt | None = None
    final_ratio: float = Field(0.1, ge=0, le=1)


class Memory(Section):
    activation_checkpointing: Literal["none", "full"] = "none"


class Evaluate(Section):
    every_steps: NonNegativeInt = 0


class Checkpoint(Section):
    every_steps: NonNegativeInt = 0
    keep: PositiveInt = 2


class Logging(Section):
    every_steps: PositiveInt = 10


class Recipe(Section):
    task: Literal["pretrain"] = "pretrain"
    output_dir: str
    seed: NonNegativeInt = 0
    steps: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    model: Model
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    memory: Memory = Memory()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
