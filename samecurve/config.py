"""The recipe's schema: what is trained. How it is spread over devices is the strategy's business (engines/)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from .errors import ConfigurationError

# every byte and two special tokens
SMALLEST_VOCABULARY = 256 + 2
# numpy takes seeds below 2**32, and the rank is added to this one
LARGEST_SEED = 2**31 - 1
# empty is what a shell makes of `data.path=$UNSET`; read as a folder it would be the working directory
Name = Annotated[str, Field(min_length=1)]
Pooling = Literal["mean", "cls", "last"]


class Section(BaseModel):
    """strict: a quoted number is text and is refused, not read as a number. A list from YAML may fill a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Section):
    """`path`: a pretrained Hugging Face folder or hub name. `config`: the fields of a from-scratch config.

    `trust_remote_code`: run the Python files that come with `path`, the tokenizer's too.
    """

    path: Name | None = None
    trust_remote_code: bool = False
    config: dict[str, Any] | None = None
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"


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


class Tokenizer(Section):
    """`path`: a tokenizer's folder (default: `model.path`). `vocabulary_size`: train a byte-level BPE on the data.

    `chat_template`: a Jinja file that replaces the tokenizer's own template, or `chatml`, see chatml.py.
    """

    path: Name | None = None
    chat_template: Name | None = None
    vocabulary_size: int | None = Field(None, ge=SMALLEST_VOCABULARY)


class MixtureSource(Section):
    """One data set of several. `weight`: of its rows, relative to the others'. Columns: None is what `data` says."""

    path: Name
    weight: float = Field(gt=0)
    pattern: str | None = None
    text_column: Name | None = None
    messages_column: Name | None = None
    prompt_column: Name | None = None
    completion_column: Name | None = None


class Data(Section):
    """sft reads `messages_column`, or `prompt_column` and `completion_column`; the other tasks read `text_column`.

    `mixture`: several data sets in place of `path`. `streaming`: text is tokenised while training goes on. classify
    also reads `text_pair_column` and `label_column`; `labels` names its classes in their order. dpo and reward read
    `prompt_column`, `chosen_column` and `rejected_column`; embed `anchor_column`, `positive_column` and
    `negative_columns`, None: those of the first row.
    """

    path: Name | None = None
    mixture: Annotated[tuple[MixtureSource, ...], Field(min_length=1, strict=False)] | None = None
    pattern: str | None = None
    text_column: str = "text"
    text_pair_column: Name | None = None
    label_column: Name = "label"
    labels: Annotated[tuple[Name, ...], Field(min_length=2, strict=False)] | None = None
    anchor_column: Name = "anchor"
    positive_column: Name = "positive"
    negative_columns: Annotated[tuple[Name, ...], Field(strict=False)] | None = None
    messages_column: Name | None = None
    prompt_column: Name | None = None
    completion_column: Name | None = None
    chosen_column: Name = "chosen"
    rejected_column: Name = "rejected"
    chat: bool = True
    train_on: Literal["assistant", "all"] = "assistant"
    packing: bool = True
    group_by_length: bool = False
    held_out_fraction: float = Field(0.0, ge=0.0, lt=1.0)
    streaming: bool = False
    shuffle_buffer_mib: float = Field(64.0, gt=0)
    cache_dir: str | None = None

    @property
    def name(self) -> str:
        """For messages about all of the training data."""
        return self.path if self.path is not None else "data.mixture"

    def read_from(self, path: str) -> Data:
        """The same, with another path."""
        return self.model_copy(update={"path": path})

    def sources(self) -> tuple[Data, ...]:
        """What each data set of the mixture is read by; this itself where there is no mixture."""
        if self.mixture is None:
            return (self,)
        given = (source.model_dump(exclude={"weight"}, exclude_none=True) for source in self.mixture)
        return tuple(self.model_copy(update={"mixture": None, "pattern": None, **keys}) for keys in given)


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
    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Schedule(Section):
    """`decay_steps`: the length of the final decay of wsd (warm-up, stable, decay), and of no other schedule."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt | None = None
    final_ratio: float = Field(0.1, ge=0, le=1)


class Memory(Section):
    activation_checkpointing: Literal["none", "full"] = "none"


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


class Recipe(Section):
    task: Literal["pretrain", "continue_pretrain", "sft", "distill", "dpo", "reward", "classify", "mlm", "embed"] = (
        "pretrain"
    )
    output_dir: Name
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    steps: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
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
    memory: Memory = Memory()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    timeout: Timeout = Timeout()
    logging: Logging = Logging()
