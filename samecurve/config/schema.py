"""The recipe's schema: what is trained. A strategy says how it is spread over devices (strategy/).

The text below each key is its meaning in docs/recipe_reference.md, which scripts/pages/recipe_reference.py writes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WrapValidator

from samecurve.config.schema_data import Data, Tokenizer
from samecurve.config.schema_training import Batch, Loss, Memory, Optimizer, Schedule, num_warmup_steps
from samecurve.config.section import (
    LARGEST_INTEGER,
    Count,
    Name,
    Natural,
    PathName,
    Section,
    name_or_import_path,
)
from samecurve.specs.data_names import ProblemType
from samecurve.specs.tasks import MetricName, TaskName
from samecurve.specs.trackers import TrackerName

# numpy takes seeds below 2**32, and the rank is added to this one.
LARGEST_SEED = 2**31 - 1
# The name of a checkpoint's folder has eight digits for the step.
MOST_STEPS = 10**8 - 1
MOST_EPOCHS = 10**6
# 31 years in seconds. Timeouts of some hundred years overflow in PyTorch and Python.
LONGEST_TIMEOUT = 10**9
Pooling = Literal["mean", "cls", "last"]


def _off(value: Any) -> Any:
    return "off" if value is False else value  # YAML 1.1 reads an unquoted off as false


class Model(Section):
    """The model. A recipe gives either `path` (pretrained) or `config` (from scratch)."""

    path: PathName | None = None
    """A pretrained model: a Hugging Face folder, or its name on the hub."""
    revision: Name | None = None
    """Hub: a branch, tag or commit of `path`. null: `main`. The commit that it stands for is in run.json, and a resumed
    run without this key keeps it."""
    trust_remote_code: bool = False
    """Run the Python files that come with `path`, including those of its tokenizer. They can do anything."""
    config: dict[str, Any] | None = None
    """The fields of a Hugging Face config for a model from scratch, or the path of a `config.json` or its folder.
    `model_type` is required."""
    overrides: dict[str, Any] = {}
    """Fields of the config of `path` that this run replaces, such as `{attention_dropout: 0.1}`, `sliding_window`, or
    YaRN: `{max_position_embeddings: 131072, rope_parameters: {rope_type: yarn, factor: 4.0}}`. The export's config has
    them. No field that changes a weight's shape."""
    attention: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flex_attention"] = "auto"
    """The attention implementation. `auto` is `varlen` for most decoders in bf16 on a CPU, on a GPU what the benchmark
    found faster, else `sdpa`, or `eager` where the family has no `sdpa`. `flash_attention_2` needs bf16 or fp16 and,
    with packing, a micro-batch of 1."""
    kernels: Literal["torch", "liger"] = "torch"
    """`liger` uses liger-kernel's norms, rotary positions and gated activations on a GPU."""
    new_head: bool = False
    """Make the task's head, which `path` lacks. `classify` and `reward` do so without this key. An error if `path` has
    it."""
    unknown_tensors: Literal["stop", "keep", "drop"] = "stop"
    """Weights in `path` that transformers' class does not have, such as layers for further tokens (`mtp.*`). Those that
    transformers leaves out by its own rules are copied into the export unchanged, and others are an error (`stop`);
    all are copied (`keep`); none are (`drop`). The header counts them."""
    unproven: bool = False
    """Try what is not known to work with a family and is else refused: `data.packing`, `kernels: liger`, tensor,
    context and expert parallelism. What is known to fail stays refused. The header, run.json and the model card name
    what was used. See [Finetuning](finetuning.md)."""
    router_loss: Annotated[Literal["sequence", "batch", "off"] | None, BeforeValidator(_off)] = None
    """Mixture of experts: balance the experts within each row (`sequence`) or over the global batch (`batch`, one more
    forward pass), or not (`off`). null: `sequence` where the model has a router loss. See [Numerics](numerics.md)."""


def _modules(value: Any) -> Any:
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("expected a pattern, a list of names or all-linear")
    return value if isinstance(value, str) else tuple(names)


class Adapter(Section):
    """A peft adapter on the pretrained model of `model.path`."""

    name: Literal["lora"] | None = None
    """`lora` trains low-rank matrices (and a classifier's new head). null trains the whole model."""
    path: PathName | None = None
    """Go on with the LoRA adapter in this folder (`adapter_config.json`, `adapter_model.safetensors`), for example with
    DPO after SFT, whose reference is the model with this adapter. The folder sets the keys of this block but
    `quantization` and `loraplus_lr_ratio`, and `dropout` where the recipe gives none. An adapter's folder as
    `model.path` does the same."""
    rank: Count = 16
    """The rank of the matrices."""
    alpha: Count = 32
    """The update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    target_modules: Annotated[Any, BeforeValidator(_modules)] = "all-linear"
    """The adapted modules: `all-linear` (all but the output head), a list of the last parts of names, such as
    `[q_proj, v_proj]`, or a regular expression over whole names. `[]` with `target_parameters`: none."""
    target_parameters: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] | None = None
    """Adapted weights by the last parts of their names, for those of no linear layer: the stacked experts of a mixture,
    as `[experts.gate_up_proj, experts.down_proj]`. Each expert gets matrices of its own."""
    modules_to_save: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] | None = None
    """Modules that are trained in full and stored with the adapter, by the last parts of their names, such as
    `[embed_tokens, lm_head]`."""
    loraplus_lr_ratio: float | None = Field(default=None, ge=1, le=1e4)
    """LoRA+: the learning rate of the B matrices, which start at 0, in multiples of that of all others; 16 in the
    paper (arXiv:2402.12354). null: one rate."""
    rslora: bool = False
    """Scale the update by alpha / sqrt(rank) instead (rsLoRA)."""
    dora: bool = False
    """Learn the magnitude of each output separately from its direction (DoRA). Slower."""
    quantization: Literal["4bit", "8bit", "torchao_int8"] | None = None
    """Store the frozen weights of linear layers in 4 bits (QLoRA's NF4) or 8 (int8 with a scale per row), rounded by
    bitsandbytes or torchao, which has to be installed."""


class Embed(Section):
    """Task `embed`."""

    temperature: float = Field(default=0.05, gt=0)
    """Cosine similarities are divided by it. A lower one gives more weight to the nearest negatives."""
    pooling: Pooling = "mean"
    """How the token states become one vector: their mean, the first (`cls`) or the last one. A model of
    sentence-transformers goes on with its own, unless this is given."""
    queue: Natural = 0
    """MoCo: how many positives of earlier steps are negatives, too, as a momentum encoder has embedded them. The
    positives and negatives of a step are then embedded by it as well, and the gradient is that of the anchors. 0: no
    momentum encoder. [A queue of negatives](finetuning.md#a-queue-of-negatives)."""
    momentum: float = Field(default=0.999, ge=0, lt=1)
    """Share of itself that the momentum encoder keeps in a step; the rest are the trained weights."""


class Classify(Section):
    """Task `classify`."""

    problem_type: ProblemType = "single_label"
    """What the label column holds. `single_label`: one class. `multi_label`: a list of any number of classes.
    `regression`: a number. `relevance`: a number from 0 to 1, how well the second text answers the first (a reranker,
    cross-encoder). [Labels](finetuning.md#labels-of-texts)."""


class Evaluate(Section):
    """Evaluation during training."""

    every_steps: Natural = 0
    """Steps between evaluations; the last step is evaluated, too. 0: never. Otherwise `path`, `split` or
    `data.validation_fraction` is needed."""
    every_epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)
    """In place of `every_steps`: passes over the training rows between evaluations, rounded to steps."""
    patience: Count | None = None
    """Early stopping: the run ends after this many evaluations in a row that were not better than the best one before,
    by `checkpoint.best`, or by `eval_loss` without one. null: never."""
    min_improvement: float = Field(default=0.0, ge=0)
    """How much better a value must be for `patience`."""
    samples: Natural = 0
    """At each evaluation, the model continues the prompts of this many held-out rows, by its likeliest tokens, at most
    64. The texts are printed, appended to `samples.jsonl` and shown by `report`."""
    path: PathName | None = None
    """The evaluation data, read like `data.path`. null: a split of `data.path`, or the held-out documents."""
    split: Name | None = None
    """Hub: the split that is evaluated on, of `data.path` where `path` is null."""
    config: Name | None = None
    """Hub: like `data.config`, which it defaults to where `path` is null."""
    revision: Name | None = None
    """Hub: like `data.revision`, which it defaults to where `path` is null."""


class Checkpoint(Section):
    """Frequency of checkpoints, and the ones to keep."""

    every_steps: Natural = 200
    """Steps between checkpoints; the last step writes one too. 0: only when a signal stops the run."""
    every_epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)
    """In place of `every_steps`: passes over the training rows between checkpoints, rounded to steps."""
    keep: int = Field(default=2, ge=2, le=LARGEST_INTEGER)
    """How many of the newest are kept. At least two, so that one is left when the newest is corrupt."""
    best: MetricName | None = None
    """A metric of the evaluation, such as `eval_loss` or `eval_accuracy`: the checkpoint with its best value is kept
    beside the newest ones."""
    background: bool | None = None
    """Write while training continues, from a copy in host memory. null: true, but false where the optimizer state is on
    NVMe. false: training waits for the disk."""
    mirror: Name | None = None
    """A folder of an object store, as a URL for fsspec (`s3://bucket/run`): committed checkpoints and the run's records
    are uploaded there in the background, and a run elsewhere resumes from it. One run per URL.
    See [Checkpoints](checkpoints.md#object-storage)."""


_UNITS = {"M": 10**6, "B": 10**9}


def _model_size(value: Any) -> Any:
    text = "off" if value is False or value == 0 else str(value).strip()
    if text == "off" or re.fullmatch(r"\d+(\.\d+)?[MB]", text):
        return text
    raise ValueError("expected a number of parameters such as 350M or 7B, or off")


class Export(Section):
    """The trained model as a Hugging Face folder."""

    enabled: bool = True
    """Write `model/` after the last step. `python -m samecurve export RUN` makes one of a checkpoint later."""
    checkpoint: Literal["last", "best"] = "last"
    """What is exported: the `last` step, or the checkpoint with the best value of `checkpoint.best`."""
    verify: Annotated[str, BeforeValidator(_model_size)] = "1B"
    """Load `model/` in a new process by transformers alone and compare the outputs with the trained model's, for models
    of up to this many parameters, such as `350M` or `7B`. The new process needs 4 bytes of host memory per parameter.
    `off`: never."""

    def verifies(self, num_parameters: int) -> bool:
        """Whether the export of a model of this size is verified."""
        return self.verify != "off" and num_parameters <= float(self.verify[:-1]) * _UNITS[self.verify[-1]]


class Numerics(Section):
    """Checks of the numbers while a run trains."""

    max_skipped_steps: Natural = 3
    """Steps in a row that may be skipped because loss or gradient is not finite. The next one ends the run."""
    rollback_ratio: float | None = Field(default=None, gt=1)
    """Return to the last checkpoint's weights when the loss exceeds the smoothed loss by this factor. null: off."""
    compare_replicas_every_steps: Natural = 0
    """Steps between comparisons of the weights that ranks replicate, by hash. 0: off."""


class Watchdog(Section):
    """The watchdog."""

    timeout_seconds: int = Field(default=600, ge=0, le=LONGEST_TIMEOUT)
    """Seconds without progress after which the run writes the stacks of all ranks and exits with code 124. 0: never."""


class Logging(Section):
    """Console output and experiment trackers. `metrics.jsonl` has every step."""

    every_steps: Count = 10
    """Steps between lines where the output is not a terminal."""
    trackers: tuple[TrackerName, ...] = Field(default=("tensorboard",), strict=False)
    """Trackers that get the metrics, each by its own package. They are set up by their own environment variables, such
    as `WANDB_MODE` or `MLFLOW_TRACKING_URI`. See [Run directory](run_directory.md#trackers)."""
    on_failure: Literal["stop", "warn"] = "stop"
    """`stop`: a tracker that cannot start ends the run before its first step. `warn`: train without it. A tracker that
    fails later never ends a run."""


class Profile(Section):
    """PyTorch's profiler. See [Profiling](profiling.md)."""

    steps: tuple[Count, Count] | None = Field(default=None, strict=False)
    """The first and the last recorded step, such as `[10, 12]`, counted from 1. null disables profiling."""
    ranks: tuple[Natural, ...] = Field(default=(0,), strict=False, min_length=1)
    """The ranks that write a trace. The lowest of them writes the summary."""


class Dpo(Section):
    """Task `dpo`. All losses except `orpo` and `simpo` use the initial model as the reference model."""

    loss: Literal["sigmoid", "ipo", "kto", "orpo", "simpo"] = "sigmoid"
    """The preference loss. `sigmoid` is DPO."""
    beta: float = Field(default=0.1, gt=0)
    """The strength of the reference model's constraint; for `orpo` the weight of the odds ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """`sigmoid` only: the probability that the two answers of a pair are swapped."""
    gamma: float | None = Field(default=None, ge=0)
    """`simpo` only, and required there: the target reward margin."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """`kto` only: the weight of the good answers' losses."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """`kto` only: the weight of the bad answers' losses."""

    @property
    def has_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")


class Reward(Section):
    """Task `reward`."""

    center_rewards_coefficient: float | None = Field(default=None, gt=0)
    """The weight of a term that pulls the mean reward of a pair to 0. null: no such term. TRL's example has 0.01."""


class ProcessReward(Section):
    """Task `process_reward`."""

    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """Written behind each step. Its last token has the step's label."""


class Distill(Section):
    """Task `distill`."""

    teacher: PathName | None = None
    """The frozen teacher: a Hugging Face folder, or its name on the hub. Required."""
    temperature: float = Field(default=1.0, gt=0)
    """Softens the distributions of teacher and student. Above 1, unlikely tokens count more."""
    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """`forward_kl` makes the student cover the teacher's distribution; `reverse_kl` makes it seek its modes."""
    label_weight: float = Field(default=0.0, ge=0, lt=1)
    """The weight of the cross-entropy with the labels. The divergence has the rest."""


class Recipe(Section):
    """A recipe says what is trained, never how the work is spread over devices."""

    task: Annotated[TaskName, WrapValidator(name_or_import_path)] = "pretrain"
    """The kind of training, see [Fine-tuning](finetuning.md), or the import path `module:Class` of a task of your own,
    see [Extending](extending.md)."""
    task_options: dict[str, Any] = {}
    """A task of your own gets them as `self.options`."""
    output_dir: PathName
    """The run directory. See [Run directory](run_directory.md). A URL such as `s3://bucket/run` is short for
    `checkpoint.mirror` with a local folder, `$SAMECURVE_STAGING/s3/bucket/run`, else `runs/s3/bucket/run`."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seeds the initial weights, the order of the rows and dropout."""
    steps: int = Field(default=1000, ge=1, le=MOST_STEPS)
    """Optimizer steps; or give `epochs`."""
    epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)
    """Passes over the training rows, in place of `steps`: the header says how many steps they are. The last step is
    filled up with the first rows of another pass. Not for streams and mixtures."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """The computing precision. Trained weights stay fp32, except those of `adamw_bf16`. A CPU without bf16
    instructions (AVX512-BF16, AMX) is many times faster in fp32; the header warns where that was measured."""
    fp8: Annotated[Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(_off)] = "off"
    """Compute the layers' linear products in 8 bits with torchao's recipe of that name. It needs `precision: bf16`
    and an Ada or Hopper GPU; a CPU emulates it, slowly."""
    rehearse: bool = False
    """Before the first step, try in processes of their own whether the longest batch, an evaluation, a checkpoint and
    the export fit into memory and on the disk. A run that its launcher restarts skips this.
    See [Clusters](clusters.md#before-the-first-step-rehearse)."""
    model: Model = Model()
    adapter: Adapter = Adapter()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    classify: Classify = Classify()
    embed: Embed = Embed()
    distill: Distill = Distill()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    dpo: Dpo = Dpo()
    reward: Reward = Reward()
    process_reward: ProcessReward = ProcessReward()
    loss: Loss = Loss()
    memory: Memory = Memory()
    compile: Annotated[Literal["off", "auto", "regional", "full"], BeforeValidator(_off)] = "off"
    """`regional` compiles one layer for all that are alike, and the chunked loss. `full` compiles the whole model.
    `auto` is `regional` where at least 1,000 steps are left and the strategy allows it, else `off`; the header says
    why. A batch of another shape compiles once more, varying lengths once for all of them. It needs a C++ compiler on
    a CPU, a C compiler on a GPU."""
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    export: Export = Export()
    numerics: Numerics = Numerics()
    watchdog: Watchdog = Watchdog()
    logging: Logging = Logging()
    profile: Profile = Profile()

    @property
    def warmup_steps(self) -> int:
        return num_warmup_steps(self.steps, self.schedule.warmup_steps, self.schedule.warmup_ratio)

    @property
    def model_paths(self) -> list[str]:
        """The folders and hub names whose models and tokenizers are read; their code may run, see trusted_code.py."""
        return [path for path in (self.model.path, self.tokenizer.path, self.distill.teacher) if path is not None]

    @property
    def evaluation(self) -> Data | None:
        """The evaluation data, read like the training data; None: the held-out part of those, if any."""
        own, data = self.evaluate, self.data
        if own.path is None and own.split is None:
            return None
        chosen = {"split": own.split or "train", "config": own.config, "revision": own.revision, "max_samples": None}
        if own.path is None:
            same = {"config": own.config or data.config, "revision": own.revision or data.revision}
            return data.model_copy(update=chosen | same)
        # evaluate has no pattern of its own; a split is not made of files
        pattern = None if own.split is not None else data.pattern
        # the same data, which training is refused: `evaluate RUN DATA`, whose number of rows this is
        measured = (own.path, own.split or data.split, own.config, own.revision)
        if measured == (data.path, data.split, data.config, data.revision):
            chosen["max_samples"] = data.max_samples
        return data.model_copy(update={"path": own.path, "pattern": pattern, **chosen})
