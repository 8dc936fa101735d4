"""Limits of the formulas. They describe training a causal language model, or an adapter of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.config import loader
from samecurve.config.documents import Document, format_problems, merge_blocks, read_document
from samecurve.config.inheritance import apply_override
from samecurve.config.rules_model import flash_packed
from samecurve.config.schema import Memory, Recipe
from samecurve.config.schema_data import SMALLEST_VOCABULARY
from samecurve.config.schema_training import Batch
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.planner import model_shape
from samecurve.planner.hardware import Gpu
from samecurve.planner.model_shape import Frozen, ModelShape
from samecurve.specs import loss_chunks
from samecurve.specs.model_families import FAMILIES, NOT_KNOWN, families, without_varlen
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.specs.precision import COMPILED
from samecurve.specs.tasks import TASKS

# Kinds of memory.activation_checkpointing that are counted as another one, and what to tell of it.
APPROXIMATED = {
    "offload": ("full", "full, with the inputs on the device"),
    "every_n_layers": ("none", "none"),
    "selective, attention": ("full", "full, without the results of attention"),
}

_WINDOWED = ("varlen", "flash_attention_2", "flex_attention")  # kernels that leave out scores outside of a window

# Families whose layers gather whole activations under transformers' plan (5.23): features are cut there, and no heads.
GATHERING = ("phi3",)


def refuse(recipe: Recipe, document: Document | None = None) -> None:
    """Raise ConfigurationError for a recipe whose sizes are not known.

    Args:
        recipe: without errors.
        document: where it was read, for the place of the key.
    """

    if recipe.optimizer.freezes:
        place = f"{document.place(('optimizer', 'groups'))}: " if document else ""
        text = "found frozen parameters, but the formulas are those of training all weights; optimizer.groups=[] plans "
        raise ConfigurationError(f"{place}optimizer.groups: {text}that, an upper bound")
    if recipe.batch.is_auto:
        place = f"{document.place(('batch', 'micro_batch_size'))}: " if document else ""
        raise ConfigurationError(
            f"{place}batch.micro_batch_size: found auto, but only train.py and rehearse "
            "look for the number; give one, or leave the key out of the recipe to search over it"
        )


def left_out(request: PlanRequest, card: Gpu) -> list[str]:
    """List what the prediction for a GPU does not count, for the reader."""
    assert request.source.recipe
    recipe, window = request.source.recipe, request.window
    uncounted: list[str] = []
    if recipe.precision == "fp32":
        slower = "products are counted at bf16 rates, for want of others (device.peak_tflops.fp32 of a cluster file)"
        smaller = "activations of models without gated MLPs are counted in 16 bits"
        told = smaller if card.fp32_tflops else f"{slower}, and {smaller}"
        more = "more memory" if card.fp32_tflops else "more memory and time"
        uncounted.append(f"precision fp32. {told[0].upper()}{told[1:]}: expect {more}")
    if not TASKS[recipe.task].predicts_next_token:
        uncounted.append(f"task {recipe.task}. Texts are counted as through a language model with its head")
    if recipe.task == "dpo" and recipe.dpo.has_reference:
        uncounted.append(
            "task dpo. The reference is the model itself before the first step, so that its log-probabilities need no "
            "memory of their own; the time of that one pass over the rows is not counted"
        )
    if kind := APPROXIMATED.get(_kind(recipe.memory)):
        asked = f"memory.activation_checkpointing {recipe.memory.activation_checkpointing}"
        uncounted.append(f"{asked}. It is counted as {kind[1]}")
    untold = ", ".join(model_shape.uncounted(recipe.adapter))
    others = {
        "task embed. Hard negatives that data.num_negatives or data.negative_columns does not give are not counted": (
            recipe.task == "embed" and sequences(recipe) == 2
        ),
        "optimizer.name muon. The products that orthogonalise weights take time that is not counted, and AdamW's "
        "second state of embeddings, head and norms is not either": recipe.optimizer.name == "muon",
        f"sliding_window {window}. Attention is counted as over whole rows: expect less time": (
            0 < window < recipe.batch.sequence_length and recipe.model.attention in _WINDOWED
        ),
        f"model_type {request.family}. Tensor parallelism is counted as if it divided activations that this family's "
        "layers gather whole: expect more memory": request.family in GATHERING,
        f"adapter: trained weights of {untold} are not counted": untold,
        "adapter.name lora. The time of the adapter's own small products is not counted": recipe.adapter.name,
        "optimizer.name adamw_bf16. Weights and states are counted in fp32: expect less memory": (
            recipe.optimizer.name == "adamw_bf16"
        ),
    }
    uncounted += [text for text, applies in others.items() if applies]
    if recipe.fp8 != "off" and not card.fp8_tflops:
        uncounted.append(f"fp8 {recipe.fp8}. Products are those of bf16, because no rate of this GPU is known")
    if recipe.model.kernels == "liger":
        uncounted.append("model.kernels liger. Norms, rotary positions and gated activations are counted as PyTorch's")
    if recipe.loss.implementation == "liger":
        uncounted.append("loss.implementation liger. It is counted as chunked, head and loss a few tokens at a time")
    if recipe.compile == "auto":
        uncounted.append("compile auto. The layers are counted uncompiled; a run that compiles them needs less")
    return uncounted


def checkpointing(memory: Memory) -> str:
    """Return how the formulas count a recipe's activation checkpointing: as none, selective or full."""
    return APPROXIMATED.get(_kind(memory), (memory.activation_checkpointing, ""))[0]


def _kind(memory: Memory) -> str:
    kind = memory.activation_checkpointing
    return f"{kind}, attention" if kind == "selective" and memory.selective_save == "attention" else kind


def sequences(recipe: Recipe) -> int:
    """Return the sequences of a row: two answers of a pair; an anchor, its positive and its hard negatives."""
    if recipe.task == "embed":
        return 2 + (recipe.data.num_negatives or len(recipe.data.negative_columns or ()))
    return 2 if recipe.task == "reward" or (recipe.task == "dpo" and recipe.dpo.loss != "kto") else 1


def optimizer_bytes(recipe: Recipe) -> int:
    """Bytes per parameter of the optimizer's states, without the fp32 weights."""
    states = len(OPTIMIZERS[recipe.optimizer.name].states)
    return states if recipe.optimizer.name == "adamw_8bit" else 4 * states  # 8 bits each, else fp32


# A training job apart from its strategy and machines.


ADAM = 8


@dataclass(frozen=True)
class PlanRequest:
    """A training job apart from strategy and machines.

    Attributes:
        source: the recipe as written, by which the strategies' own rules judge.
        optimizer_bytes: of its states, per parameter.
        average_bytes: of a momentum encoder, per trained parameter.
        fixed: of "micro_batch" and "checkpointing", those that a search must leave as they are.
        family: the model's `model_type`, "" if it is not known.
        attention: as `model.attention`; auto where a CPU computes varlen, and a GPU sdpa.
        fp8: as the recipe's `fp8`; "" for none.
        compile: whether layers are compiled; not where `auto` has still to decide.
        frozen, teacher, sequences: as Job's.
        window: tokens that a layer with a sliding window sees; 0 where no layer has one.
    """

    shape: ModelShape
    batch: Batch
    source: RecipeSource
    precision: str = "bf16"
    checkpointing: str = "none"
    chunked_loss: bool = True
    optimizer_bytes: int = ADAM
    fixed: frozenset[str] = frozenset()
    attention: str = "sdpa"
    fp8: str = ""
    compile: bool = False
    family: str = ""
    frozen: Frozen | None = None
    teacher: ModelShape | None = None
    average_bytes: int = 0
    sequences: int = 1
    window: int = 0

    @classmethod
    def of_recipe(
        cls,
        source: RecipeSource,
        fields: Mapping[str, Any],
        name: str,
        vocab: int | None = None,
        fixed: frozenset[str] = frozenset(),
    ) -> PlanRequest:
        """Describe what a recipe trains.

        Args:
            source: of a recipe without errors.
            fields: of the model's Hugging Face config.
            name: of the config, for messages.
            vocab: size of a tokenizer that is trained for the job.
            fixed: see the class.

        Raises:
            ConfigurationError: the config lacks a dimension.
        """
        recipe = source.recipe
        assert recipe is not None
        shape, teacher = model_shape.shape(fields, name, vocab), None
        if TASKS[recipe.task].has_teacher:
            path = str(recipe.distill.teacher)
            teacher = model_shape.shape(model_shape.read(path, f"{name}: distill.teacher {path}: "), path)
        element_bytes = 4 if recipe.precision == "fp32" else 2
        # where a GPU has been measured, models/attention/choice.py may choose another
        attention = recipe.model.attention
        if attention == "auto" and FAMILIES.get(fields.get("model_type", ""), NOT_KNOWN).score_bytes:
            attention = "eager"
        elif attention == "auto":
            gains = recipe.precision == "bf16" and TASKS[recipe.task].auto_class == "AutoModelForCausalLM"
            attention = "auto" if gains and not without_varlen(fields) else "sdpa"
        # by what is known of the family; an engine tries the model's head
        is_scaled = fields.get("model_type") in families("whole_logits") or fields.get("final_logit_softcapping")
        in_chunks = loss_chunks.are_allowed(recipe.loss.implementation, recipe.precision) and not is_scaled
        window = fields.get("sliding_window")
        return cls(
            shape,
            recipe.batch,
            source,
            recipe.precision,
            checkpointing(recipe.memory),
            in_chunks and TASKS[recipe.task].takes_chunks,
            optimizer_bytes(recipe),
            fixed,
            attention,
            "" if recipe.fp8 == "off" else recipe.fp8,
            recipe.compile in COMPILED,
            str(fields.get("model_type") or ""),
            model_shape.adapted(shape, recipe.adapter, element_bytes) if recipe.adapter.name else None,
            teacher,
            4 if recipe.task == "embed" and recipe.embed.queue else 0,
            sequences(recipe),
            window if isinstance(window, int) and fields.get("use_sliding_window", True) else 0,
        )

    def with_memory(self, micro_batch: int, checkpointing: str) -> PlanRequest:
        """Change what may be changed without changing the curve."""
        batch = self.batch.model_copy(update={"micro_batch_size": micro_batch})
        return replace(self, batch=batch, checkpointing=checkpointing)

    def changes(self, micro_batch: int, checkpointing: str, ranks: int) -> dict[str, dict[str, Any]]:
        """Return the values by which a choice of the search differs from the recipe, by block and key."""
        batch, memory = {}, {}
        # a job's micro-batch is lowered to a rank's rows, which the search has not chosen
        if micro_batch != min(self.batch.micro_batch_size, self.rows_of_a_rank(ranks)):
            batch["micro_batch_size"] = micro_batch
        assert self.source.recipe
        given = self.source.recipe.memory
        if "checkpointing" not in self.fixed and checkpointing != given.activation_checkpointing:
            memory["activation_checkpointing"] = checkpointing
            # settings of the recipe's own kind go with it
            usual = {key: Memory.model_fields[key].default for key in ("selective_save", "every_n_layers")}
            memory |= {key: value for key, value in usual.items() if value != getattr(given, key)}
        return {"batch": batch, "memory": memory}

    def takes(self, micro_batch: int) -> bool:
        """Whether the recipe's own rules allow a micro-batch."""
        sizes = {"batch.micro_batch_size": micro_batch}
        return not any(flash_packed(lambda key: sizes[key] if key in sizes else self.source.value(key)))

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch.global_batch_size * self.sequences * self.batch.sequence_length

    def rows_of_a_rank(self, ranks: int) -> int:
        """Rows of a step that the fullest data-parallel rank reads."""
        return self.batch.rows_per_rank(ranks)[0]


# Reads what is to be trained: a recipe, or a model without one.


SEARCHED = {
    "micro_batch": ("batch", "micro_batch_size"),
    "checkpointing": ("memory", "activation_checkpointing"),
}
DEFAULT_BATCH = {"global_batch_size": 256, "micro_batch_size": 1}
LONGEST = 4096  # tokens of a row, where the model has as many positions
POSITIONS = ("max_position_embeddings", "n_positions")


def is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def read(name: str, overrides: Sequence[str], fill: Callable[[Document], object] | None = None) -> PlanRequest:
    """Read a recipe, or a model's config.json, its folder or a hub name in the local cache.

    What the overrides set is fixed; other memory settings are for the search to choose. No data are needed. `fill`: as
    in `loader.read_recipe`.

    Raises:
        ConfigurationError: with every problem found.
    """
    if is_recipe(name):
        source = loader.read_recipe(name, overrides, fill)
        elsewhere = loader.data_elsewhere(source)
        if problems := [problem for problem in source.document.problems if problem.key not in elsewhere]:
            raise ConfigurationError(format_problems(problems))
        assert source.recipe is not None
        refuse(source.recipe, source.document)
        model = source.recipe.model
        described = f"{name}: model.{'config' if model.config else f'path {model.path}'}"
    else:
        source, described = _bare(name, model_shape.read(name), overrides, fill), name
    recipe = source.recipe
    assert recipe is not None
    model = recipe.model
    fields = model.config or {**model_shape.read(str(model.path), f"{described}: "), **model.overrides}
    typed = source.document.typed
    # a block that is given whole on the command line fixes its keys, too
    blocks = {(block,) for block, _ in SEARCHED.values()} & typed.keys()
    fixed = frozenset(name for name, path in SEARCHED.items() if path in typed or path[:1] in blocks)
    return PlanRequest.of_recipe(source, fields, described, recipe.tokenizer.vocabulary_size, fixed)


def bare_recipe(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a recipe for a model without one says.

    A folder or hub name has weights and a tokenizer; a config.json is trained from scratch, with a tokenizer of its
    vocabulary.
    """
    from_scratch = name.endswith(".json")
    vocabulary = {"tokenizer": {"vocabulary_size": fields.get("vocab_size")}} if from_scratch else {}
    positions = next((fields[key] for key in POSITIONS if isinstance(fields.get(key), int)), LONGEST)
    return {
        "output_dir": f"runs/{Path(name).stem}",
        "model": {"config": fields} if from_scratch else {"path": name},
        "batch": {**DEFAULT_BATCH, "sequence_length": min(LONGEST, positions)},
        **vocabulary,
    }


def _bare(
    name: str, fields: dict[str, Any], overrides: Sequence[str], fill: Callable[[Document], object] | None
) -> RecipeSource:
    document = Document(name, scratch_files={name})  # nobody typed this batch, so that a strategy's file replaces it
    # a recipe needs data, and Python's own library is on every machine
    data = {"data": {"path": TASKS["pretrain"].builtin}}
    document.content = merge_blocks(document.content, merge_blocks(bare_recipe(name, fields), data))
    for override in overrides:
        apply_override(document, override)
    if fill is not None:
        fill(document)
    if name.endswith(".json") and not document.typed.keys() & {("tokenizer",), ("tokenizer", "vocabulary_size")}:
        config = read_document(name)
        block = ("text_config",) if config.get("text_config") else ()
        size = config.get(*block, "vocab_size")
        if isinstance(size, int) and size < SMALLEST_VOCABULARY:
            least = f"expected at least {SMALLEST_VOCABULARY}, the bytes and two tokens of a tokenizer that is trained"
            config.problem((*block, "vocab_size"), f"found {size}, {least}; give more tokens")
            raise ConfigurationError(format_problems(config.problems))
    recipe = loader.validate_recipe(document)
    refuse(recipe, document)
    return RecipeSource(document, recipe, frozenset())
