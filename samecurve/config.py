"""The recipe's schema: what is trained. How it is spread over devices is the strategy's business (engines/)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from .config_data import Data, Tokenizer
from .errors import ConfigurationError
from .section import Name, Section

# numpy takes seeds below 2**32, and the rank is added to this one
LARGEST_SEED = 2**31 - 1
Pooling = Literal["mean", "cls", "last"]


class Model(Section):
    """`path`: a pretrained Hugging Face folder or hub name. `config`: the fields of a from-scratch config.

    `trust_remote_code`: run the Python files that come with `path`, the tokenizer's too. `attention`: see
    `architecture.chosen_attention`. `kernels`: of norms, rotary positions and gated activations. See kernels.py.
    """

    path: Name | None = None
    trust_remote_code: bool = False
    config: dict[str, Any] | None = None
    attention: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flex_attention"] = "auto"
    kernels: Literal["torch", "liger"] = "torch"


def _modules(value: Any) -> Any:
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("a pattern, a list of names or all-linear is needed")
    return value if isinstance(value, str) else tuple(names)


class Adapter(Section):
    """`name`: None trains the whole model. `target_modules`: a regular expression over whole names, or last parts."""

    name: Literal["lora"] | None = None
    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Annotated[Any, BeforeValidator(_modules)] = "all-linear"
    rslora: bool = False
    dora: bool = False
    quantization: Literal["4bit"] | None = None


class Embed(Section):
    """`temperature`: what cosine similarities are divided by. `pooling`: how the tokens' states become one vector."""

    temperature: float = Field(0.05, gt=0)
    pooling: Pooling = "mean"


class Batch(Section):
    """In global terms, so that the curve does not depend on the number of devices."""

    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt = 1
    sequence_length: PositiveInt

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches per optimizer step and rank. ConfigurationError when the global batch does not divide."""
        steps, rest = divmod(self.global_batch_size, self.micro_batch_size * data_parallel_size)
        if rest:
            raise ConfigurationError(
                f"batch.global_batch_size: {self.global_batch_size} does not divide into micro_batch_size "
                f"{self.micro_batch_size} x {data_parallel_size} data-parallel ranks"
            )
        return steps


Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class Optimizer(Section):
    """See optim.TRAITS for which optimizer reads which of `betas`, `momentum`, `epsilon`, `bf16_update` and
    `implementation`, torch's word for how an update is computed.
    """

    name: Literal["adamw", "lion", "sgd", "adafactor", "muon", "adamw_bf16", "adamw_8bit"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    momentum: float = Field(0.9, gt=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    bf16_update: Literal["stochastic", "kahan"] = "stochastic"
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Schedule(Section):
    """`decay_steps`: the length of the final decay of wsd (warm-up, stable, decay), and of no other schedule."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt | None = None
    final_ratio: float = Field(0.1, ge=0, le=1)


class Loss(Section):
    """`implementation`: of a loss over tokens; auto is chunked where that can be. See chunked_head.py."""

    implementation: Literal["auto", "chunked", "full", "liger"] = "auto"


class Memory(Section):
    """`selective_keeps`: results that selective keeps. `every_k`: of every_k, which recomputes one layer in so many.

    `gradient_sync`: when ranks exchange gradients; auto is every micro-batch where that keeps them sharded.
    `garbage_collection_steps`: how often Python's garbage is collected, on all ranks at once; 0: as Python does.
    """

    activation_checkpointing: Literal["none", "full", "selective", "every_k", "offload"] = "none"
    selective_keeps: Literal["matmul", "attention"] = "matmul"
    every_k: int = Field(2, ge=2)
    gradient_sync: Literal["auto", "once"] = "auto"
    garbage_collection_steps: NonNegativeInt = 50


class Evaluate(Section):
    """Rows come from `path` (read like `data.path`), else from the data's held-out fraction. 0 steps: never."""

    every_steps: NonNegativeInt = 0
    path: Name | None = None


class Checkpoint(Section):
    """`keep`: the newest ones; at least two, so that there is another behind a damaged one. `best`: and its lowest.

    `background`: None is True, except where the optimizer lies on NVMe, because it takes a copy in memory.
    """

    every_steps: NonNegativeInt = 200
    keep: int = Field(2, ge=2)
    best: Literal["eval_loss"] | None = None
    background: bool | None = None


class Guard(Section):
    """`max_skipped_steps`: not finite, in a row. `rollback_ratio`: of a loss to the smoothed one. None, 0: off."""

    max_skipped_steps: NonNegativeInt = 3
    rollback_ratio: float | None = Field(None, gt=1)
    compare_replicas_every_steps: NonNegativeInt = 0


class Timeout(Section):
    """`step_seconds`: without progress, before a run counts as frozen and ends. 0: never."""

    step_seconds: NonNegativeInt = 600


class Logging(Section):
    every_steps: PositiveInt = 10


Step = Annotated[int, Field(ge=1, strict=True)]
Rank = Annotated[int, Field(ge=0, strict=True)]


class Profile(Section):
    """`steps`: the first and the last that are recorded, from 1, both included; None: none. `ranks`: on which."""

    steps: tuple[Step, Step] | None = Field(None, strict=False)
    ranks: tuple[Rank, ...] = Field((0,), strict=False, min_length=1)


class Dpo(Section):
    """`beta`: how much the reference holds back; ORPO's lambda. `gamma`: SimPO's margin. See preference_loss.py."""

    loss: Literal["sigmoid", "ipo", "kto", "orpo", "simpo"] = "sigmoid"
    beta: float = Field(0.1, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    gamma: float | None = Field(None, ge=0)

    @property
    def has_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")


class Reward(Section):
    """`center_rewards_coefficient`: of the squared sum of a pair's two rewards. None: they may have any mean."""

    center_rewards_coefficient: float | None = Field(None, gt=0)


class Distill(Section):
    """`teacher`: a folder or hub name. `label_weight`: the label loss's part of the sum. See tasks/distill.py."""

    teacher: Name | None = None
    temperature: float = Field(1.0, gt=0)
    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    label_weight: float = Field(0.0, ge=0, lt=1)


def _off(value: Any) -> Any:
    return "off" if value is False else value  # as YAML 1.1 reads the word


class Recipe(Section):
    task: Literal["pretrain", "continue_pretrain", "sft", "distill", "dpo", "reward", "classify", "mlm", "embed"] = (
        "pretrain"
    )
    output_dir: Name
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    steps: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    fp8: Annotated[Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(_off)] = "off"
    model: Model
    adapter: Adapter = Adapter()
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    embed: Embed = Embed()
    distill: Distill = Distill()
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    dpo: Dpo = Dpo()
    reward: Reward = Reward()
    loss: Loss = Loss()
    memory: Memory = Memory()
    compile: Annotated[Literal["off", "regional", "full"], BeforeValidator(_off)] = "off"
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    timeout: Timeout = Timeout()
    logging: Logging = Logging()
    profile: Profile = Profile()
