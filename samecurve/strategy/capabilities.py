"""What a recipe may ask of each way of distributing a run: a table of recipe keys by modes.

A new way is a `Mode` and its cells; then `python -m scripts.pages.capabilities > docs/capabilities.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import describe, joined
from samecurve.specs.data_names import OWN, is_import_path
from samecurve.specs.environment import dated
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.specs.tasks import TASKS, TaskSpec

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy


@dataclass(frozen=True)
class Mode:
    """A way of distributing a run.

    Attributes:
        applies: whether a strategy distributes a run in this way, too; several modes may apply to one.
        instead: what a message suggests to who needs a value that is refused.
        within: the mode of which this one is a part; its cells hold, too.
    """

    name: str
    applies: Callable[[Strategy], bool]
    instead: str = "configs/fsdp.yaml"
    within: Mode | None = None

    @property
    def untested(self) -> str:
        return f"has not been compared with one process under {self.name}"


TENSOR = Mode("tensor parallelism", lambda strategy: strategy.dims.tp > 1)
CONTEXT = Mode("context parallelism", lambda strategy: strategy.dims.cp > 1)
GATHERED = Mode("context parallelism by all-gather", lambda s: s.context_parallel == "allgather", within=CONTEXT)
RING = Mode("context parallelism by a ring", lambda strategy: strategy.context_parallel == "ring", within=CONTEXT)
EXPERT = Mode("expert parallelism", lambda strategy: strategy.dims.ep > 1)
TORCH_PIPELINE = Mode("PyTorch's pipeline", lambda strategy: strategy.torch_schedule is not None, "another strategy")
ZERO_BUBBLE = Mode(
    "a zero-bubble schedule", lambda s: s.torch_schedule is not None and s.torch_schedule.folded, within=TORCH_PIPELINE
)
WHOLE_BACKWARD = Mode(
    "any other schedule of PyTorch's pipeline",
    lambda s: s.torch_schedule is not None and not s.torch_schedule.folded,
    within=TORCH_PIPELINE,
)
CUT_STAGES = Mode(
    "tensor-parallel stages", lambda s: TORCH_PIPELINE.applies(s) and s.dims.tp > 1, within=TORCH_PIPELINE
)
DEEPSPEED_PIPELINE = Mode("DeepSpeed's pipeline", lambda strategy: strategy.schedule == "deepspeed")
ZERO_3 = Mode("ZeRO-3", lambda strategy: strategy.sharding == "zero3")
ZERO_2 = Mode("ZeRO-2", lambda strategy: strategy.sharding == "zero2")
FSDP = Mode("FSDP", lambda strategy: strategy.shards_model)
DEEPSPEED = Mode("DeepSpeed without offload", lambda s: s.backend == "deepspeed" and not s.offloads_optimizer)
DEEPSPEED_OFFLOAD = Mode("DeepSpeed with offload", lambda s: s.backend == "deepspeed" and s.offloads_optimizer)
NVME = Mode("ZeRO-3 with weights on NVMe", lambda strategy: "param:nvme" in strategy.offload)
FSDP_OFFLOAD = Mode("FSDP with offload", lambda strategy: FSDP.applies(strategy) and strategy.offloads_optimizer)


@dataclass(frozen=True)
class Cell:
    """What modes take of a recipe key. Values that it does not name are allowed, unless `allowed` names the only ones.

    Attributes:
        modes: each mode's reason why it takes no others, after "found VALUE, but".
        allowed: the only values that the modes take; empty where they take all but `refused`.
        fix: what to do; "" for "use ALLOWED, or MODE.instead".
        tasks: the tasks for which the cell holds; empty for all.
    """

    key: str
    modes: dict[Mode, str]
    allowed: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    fix: str = ""
    tasks: tuple[str, ...] = ()

    def refuses(self, value: Any) -> bool:
        if value == OWN or is_import_path(value):  # of which no list names one
            return OWN in self.refused
        return value not in self.allowed if self.allowed else value in self.refused


def problems(value: Callable[[str], Any], strategy: Strategy, key: str) -> Iterator[str]:
    """Say why a strategy does not take the recipe's value of a key, once for each mode that refuses it.

    Args:
        value: returns the value of a key of the recipe.

    Raises:
        InvalidValue: the recipe has no valid value of the key.
    """
    written = value(key)
    if written in (None, False) and key in ("fp8", "compile"):
        written = "off"  # YAML reads a bare off as false
    for cell in CELLS:
        if cell.key != key or not cell.refuses(written) or (cell.tasks and value("task") not in cell.tasks):
            continue
        for mode, why in cell.modes.items():
            if mode.applies(strategy):
                fix = cell.fix or f"use {joined(map(_as_typed, cell.allowed))}, or {mode.instead}"
                yield f"found {_as_typed(written)}, but {why}; {fix}"


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else describe(value)


def _tasks(takes: Callable[[TaskSpec], Any]) -> tuple[str, ...]:
    return tuple(name for name, spec in TASKS.items() if takes(spec))


def _untested(what: str, *modes: Mode) -> dict[Mode, str]:
    return {mode: f"{what} {mode.untested}" for mode in modes}


def _of_whole_matrices() -> Iterator[Cell]:
    for name, whole in ((name, spec.whole) for name, spec in OPTIMIZERS.items() if spec.whole):
        tensor, expert = f"it {whole}, of which a rank has only some columns", f"it {whole}, and {EXPERT.untested}"
        yield Cell("optimizer.name", {TENSOR: tensor, EXPERT: expert}, refused=(name,), fix=_USUAL)
        why = f"it {whole}, and DeepSpeed passes parts of many weights to the optimizer as one flat tensor"
        fix = "use configs/fsdp.yaml or configs/ddp.yaml, or adamw, lion or sgd"
        yield Cell("optimizer.name", {DEEPSPEED: why}, refused=(name,), fix=fix)
        why = f"it {whole}, which ranks would have to exchange from host memory"
        why = "its kernels are untested on shards in host memory" if name == "adamw_8bit" else why
        yield Cell("optimizer.name", {FSDP_OFFLOAD: why}, refused=(name,), fix="use configs/fsdp.yaml, or adamw")


_USUAL = "use adamw, lion or sgd, or configs/fsdp.yaml"
_PLAIN = "use configs/ddp.yaml, configs/fsdp.yaml, configs/zero2.yaml or configs/zero3.yaml"
_ANOTHER = "use another strategy, for example configs/fsdp.yaml"
_ONE_STAGE = "set parallelism_config_tp_size to 1, or use another strategy"
_IN_CHUNKS = "tensor-parallel stages compute the loss in chunks of tokens, and its loss needs"
_BESIDE_LINEAR = "adapter.target_parameters", "adapter.modules_to_save"

CELLS = (
    # task
    Cell(
        "task",
        {
            TENSOR: f"no encoder family has a tensor-parallel plan in {dated('transformers')}",
            TORCH_PIPELINE: "only decoders can be split into stages, and its model is an encoder",
        },
        _tasks(lambda spec: not spec.fills_masks),
    ),
    *(
        Cell("task", {CONTEXT: spec.undivided}, refused=(name,), fix="use configs/fsdp.yaml")
        for name, spec in TASKS.items()
        if spec.undivided
    ),
    Cell(
        "task",
        _untested("classification of tokens", TENSOR, CONTEXT, EXPERT, TORCH_PIPELINE),
        refused=_tasks(lambda spec: spec.auto_class == "AutoModelForTokenClassification"),
        fix="use configs/fsdp.yaml",
    ),
    Cell(
        "task",
        {CUT_STAGES: f"{_IN_CHUNKS} the teacher's whole logits"},
        refused=_tasks(lambda spec: spec.torch_pipeline and spec.has_teacher),
        fix=_ONE_STAGE,
    ),
    Cell(
        "task",
        {CUT_STAGES: f"{_IN_CHUNKS} whole rows"},
        refused=_tasks(lambda spec: spec.torch_pipeline and not spec.has_teacher and not spec.takes_chunks),
        fix=_ONE_STAGE,
    ),
    Cell(
        "task",
        {DEEPSPEED_PIPELINE: "a pipeline cannot run a teacher model"},
        refused=_tasks(lambda spec: not spec.deepspeed_pipeline and spec.has_teacher),
        fix=_ANOTHER,
    ),
    Cell(
        "task",
        {DEEPSPEED_PIPELINE: "a pipeline supports causal language models only"},
        refused=_tasks(lambda spec: not spec.deepspeed_pipeline and not spec.has_teacher),
        fix=_ANOTHER,
    ),
    Cell(
        "task",
        _untested("a task of your own", TENSOR, CONTEXT, EXPERT, TORCH_PIPELINE, DEEPSPEED_PIPELINE),
        refused=(OWN,),
        fix=_PLAIN,
    ),
    # numbers
    Cell(
        "precision",
        {
            **_untested("fp16's loss scale", TENSOR, CONTEXT, TORCH_PIPELINE),
            EXPERT: f"in fp16, FSDP2 of {dated('torch')} divides the gradients of unsharded experts once too often",
        },
        ("fp32", "bf16"),
    ),
    Cell(
        "fp8",
        {
            TENSOR: "torchao replaces the linear layers that tensor parallelism splits",
            **_untested("fp8", CONTEXT),
            EXPERT: "torchao replaces linear layers only, and experts are none",
            **_untested("a layer of torchao", TORCH_PIPELINE),
        },
        ("off",),
    ),
    Cell(
        "fp8",
        {
            ZERO_3: "ZeRO-3 gathers each layer's weights only briefly, while torchao's layers keep them until the "
            "backward pass"
        },
        ("off",),
        fix="use off, or configs/fsdp.yaml, which frees them itself",
    ),
    # adapters
    Cell("adapter.dora", {TENSOR: "DoRA's norms need whole rows of weights that are split across ranks"}, (False,)),
    *(
        Cell(key, _untested("it", TENSOR, CONTEXT, TORCH_PIPELINE, DEEPSPEED_PIPELINE), (None,))
        for key in _BESIDE_LINEAR
    ),
    Cell("adapter.modules_to_save", _untested("it", EXPERT), (None,)),
    Cell("adapter.target_parameters", {EXPERT: "the experts' columns are interleaved in peft's B matrices"}, (None,)),
    Cell(
        "adapter.quantization",
        {
            TENSOR: "tensor parallelism splits linear layers of floating-point weights only",
            NVME: "DeepSpeed reads weights from a disk into buffers of the model's own dtype, and these are integers",
            **_untested("a quantized layer", EXPERT, TORCH_PIPELINE, DEEPSPEED_PIPELINE, FSDP_OFFLOAD),
        },
        refused=("4bit", "8bit", "torchao_int8"),
        fix="use configs/fsdp.yaml or configs/zero3.yaml, or null",
    ),
    # optimizers
    Cell(
        "optimizer.name",
        {DEEPSPEED_OFFLOAD: "DeepSpeed updates an offloaded optimizer with its own CPU Adam, whatever is configured"},
        ("adamw",),
        fix="use adamw, or a strategy without offload, for example configs/zero3.yaml",
    ),
    *_of_whole_matrices(),
    Cell("optimizer.name", _untested("it", TENSOR, EXPERT), refused=("adamw_bf16",), fix=_USUAL),
    Cell(
        "optimizer.name",
        {DEEPSPEED: "DeepSpeed makes fp32 copies of bf16 weights and passes those to the optimizer"},
        refused=("adamw_bf16",),
        fix="use configs/fsdp.yaml or configs/ddp.yaml, or adamw",
    ),
    Cell("optimizer.name", _untested("it", TORCH_PIPELINE), ("adamw", "lion", "sgd")),
    Cell(
        "optimizer.name",
        {
            **_untested("an optimizer of your own", TENSOR, CONTEXT, EXPERT, TORCH_PIPELINE, FSDP_OFFLOAD),
            DEEPSPEED_OFFLOAD: "DeepSpeed updates an offloaded optimizer with its own CPU Adam, whatever is configured",
        },
        refused=(OWN,),
        fix=_PLAIN,
    ),
    Cell(
        "optimizer.implementation",
        {DEEPSPEED_OFFLOAD: "DeepSpeed updates an offloaded optimizer with its own CPU Adam"},
        ("fused",),
        fix="remove it",
    ),
    # the model and its loss
    Cell(
        "model.kernels",
        {TENSOR: "Liger's kernels read whole weights", **_untested("a Liger kernel", CONTEXT, EXPERT, TORCH_PIPELINE)},
        ("torch",),
    ),
    Cell(
        "model.attention",
        {CONTEXT: "the ranks that share a row cannot exchange its inputs"},
        ("auto", "sdpa", "varlen"),
    ),
    Cell(
        "model.attention",
        {GATHERED: "it needs the queries of whole rows and a rank has only some of them"},
        refused=("varlen",),
        fix="use auto or sdpa, or configs/fsdp_ulysses.yaml",
    ),
    Cell(
        "model.attention",
        {
            RING: "parallelism_config_cp_comm_strategy: alltoall has its own attention, which merges the blocks of a "
            "ring"
        },
        refused=("sdpa", "varlen"),
        fix="use auto, or remove that key from the strategy",
    ),
    Cell(
        "loss.implementation",
        {TENSOR: "Liger's kernel reads the whole output head", **_untested("Liger's kernel", CONTEXT, EXPERT)},
        ("auto", "full", "chunked"),
    ),
    Cell("loss.implementation", _untested("Liger's kernel", TORCH_PIPELINE), ("auto", "chunked", "full")),
    Cell(
        "loss.implementation",
        {CUT_STAGES: "no rank of the last stage has whole logits"},
        refused=("full",),
        fix="use auto or chunked, or another strategy",
    ),
    Cell(
        "loss.implementation",
        {TORCH_PIPELINE: "the last stage needs the teacher's whole logits"},
        refused=("chunked",),
        fix="use auto or full, or another strategy",
        tasks=_tasks(lambda spec: spec.has_teacher),
    ),
    Cell(
        "loss.implementation",
        {DEEPSPEED_PIPELINE: "DeepSpeed's pipeline passes complete logits to the loss"},
        refused=("chunked", "liger"),
        fix="use auto or full",
    ),
    # speed and memory
    Cell("compile", _untested("a whole compiled model", TENSOR, CONTEXT), ("off", "auto", "regional")),
    Cell(
        "compile",
        {
            EXPERT: f"all_to_all_single of {dated('torch')} takes the tokens of each rank as numbers of the host, "
            "which it reads in each layer"
        },
        ("off", "auto"),
    ),
    Cell(
        "compile",
        {
            ZERO_BUBBLE: f"{dated('torch')} computes wrong gradients of compiled layers whose backward pass is cut "
            "(zero bubble)"
        },
        ("off", "auto"),
        fix="use off, or configs/pipeline.yaml",
    ),
    Cell("compile", {WHOLE_BACKWARD: "no process has the whole model"}, refused=("full",), fix="use off or regional"),
    Cell(
        "compile",
        {DEEPSPEED_PIPELINE: "no process of a pipeline holds the whole model"},
        refused=("full",),
        fix="use regional",
    ),
    Cell(
        "compile",
        {FSDP: "FSDP gathers weights around every layer, which splits the compiled graph there anyway"},
        refused=("full",),
        fix="use regional",
    ),
    Cell(
        "compile",
        {ZERO_3: "ZeRO-3 gathers weights inside every layer, which causes constant recompilation"},
        ("off", "auto"),
        fix="use off, or configs/fsdp.yaml, which gathers them around each layer",
    ),
    Cell(
        "memory.activation_checkpointing",
        _untested("this kind of recomputation", CONTEXT, EXPERT),
        ("none", "full", "selective"),
    ),
    Cell(
        "memory.activation_checkpointing",
        _untested("this kind of recomputation", TORCH_PIPELINE),
        ("none", "full", "selective", "every_n_layers"),
    ),
    Cell(
        "memory.activation_checkpointing",
        {ZERO_BUBBLE: f"{dated('torch')} cannot cut the backward pass of a layer recomputed in part (zero bubble)"},
        refused=("selective",),
        fix="use full or none, or configs/pipeline.yaml",
    ),
    Cell("memory.gradient_sync", _untested("the key", TENSOR, EXPERT, TORCH_PIPELINE), ("auto",)),
    Cell(
        "memory.gradient_sync",
        {ZERO_2: "ZeRO-2 reduces gradients as they are made", ZERO_3: "ZeRO-3 reduces gradients as they are made"},
        refused=("last_micro_batch",),
        fix="use auto",
    ),
    # the data and the checks of a run
    Cell(
        "data.group_by_length",
        {DEEPSPEED_PIPELINE: "pipeline stages exchange tensors of one fixed shape"},
        (False,),
        fix="set it to false",
    ),
    Cell(
        "numerics.compare_replicas_every_steps",
        {TORCH_PIPELINE: "replicas of a stage cannot be compared under PyTorch's pipeline yet"},
        (0,),
    ),
)
KEYS = tuple(dict.fromkeys(cell.key for cell in CELLS))
