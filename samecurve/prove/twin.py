"""The twin of a recipe: the same training with a narrow model of a few layers, made for two cores and a minute.

Family, tokenizer, chat template, rows, adapter, precision, packing and optimizer are the recipe's. The twin starts from
a folder that transformers and peft wrote, so that a plain loop (plain_loop.py) can start from it, too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedConfig
from transformers.utils import logging

from samecurve.bench import jobs
from samecurve.config import loader as recipes
from samecurve.config.hub_access import use_cache_without_hub
from samecurve.data import find, sources
from samecurve.data.batches import StepBatches
from samecurve.data.schemas.conversation import ChatSchema, Conversation
from samecurve.errors import ConfigurationError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models import hf_config
from samecurve.models.lora import TASK_TYPES
from samecurve.optim.schedule import learning_rate
from samecurve.specs.tasks import TASKS
from samecurve.tasks import registry

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task

STEPS, SAVED, KILLED = 6, 3, 4  # of each run; the step of the checkpoint; the last step before the kill
ROWS, MICRO_BATCH, LENGTH, MOST_DOCUMENTS, VOCABULARY = 8, 2, 256, 2000, 2048
# Every pipeline here has at most 4 stages. A wider start than usual: with 0.02 such a narrow model hardly learns.
LAYERS, SPREAD = 4, 0.1
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim", "embedding_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8),
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "sliding_window": 32},
}
_LAYERS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"
_LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True}
START, ENDS = 24, "ends of turns"  # tokens by which a conversation is looked up; trained with an answer
_LOOPED = {"pretrain", "continue_pretrain", "sft", "classify", "mlm"}


@dataclass
class Twin:
    """A recipe's twin in a folder.

    Attributes:
        path: the recipe's file.
        settings: `key=value` that make the twin of it.
        recipe: the twin's.
        rows: of each step, the rows by their hashes.
        why_not_looped: why the plain loop does not compute this task; "" if it does.
        trained: tokens by what they are, trained and in all, as [trained, all].
        problems: what is trained that a reader of the recipe would not expect, or is not.
        not_judged: what differs from the recipe and was not judged.
    """

    path: str
    folder: Path
    settings: list[str]
    recipe: Recipe
    rows: list[Counter[str]] = field(default_factory=list)
    why_not_looped: str = ""
    trained: dict[str, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)


def derive(path: str, given: Sequence[str], folder: Path) -> Twin:
    """Write the twin of a recipe into `folder`: model/, adapter/, rows.jsonl, settings.json and judge.py.

    Raises:
        ConfigurationError: the recipe, or its model in this size, is not valid.
        DataError: the rows cannot be read.
    """
    recipe = recipes.load_recipe(path, given, auto=True)
    not_judged: list[str] = []
    use_cache_without_hub(recipe)
    logging.disable_progress_bar()
    for name in ("model", "adapter", "teacher"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "judge.py").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    smaller = [f"batch.sequence_length={min(recipe.batch.sequence_length, LENGTH)}"]
    most = recipe.data.max_samples or MOST_DOCUMENTS + 1
    if recipe.data.path is not None and Path(recipe.data.path).is_file() and most > MOST_DOCUMENTS:
        smaller.append(f"data.max_samples={MOST_DOCUMENTS}")
    started, model = [*given, *smaller], recipe.model
    stand_in = ""  # why the model and its tokenizer cannot be read
    if model.path is not None:
        try:
            hf_config.stored_config(model.path, model.trust_remote_code, model.revision)
        except ConfigurationError as error:
            if Path(model.path).is_dir():
                raise
            stand_in = str(error).partition(" (")[2].partition(");")[0].partition(". ")[0] or str(error)
    if stand_in:
        not_judged.append(
            f"{model.path}: not reached ({stand_in}); a Llama stands in for its family, ChatML for its template "
            f"and {VOCABULARY} tokens learnt from the data for its tokenizer: model.path=FOLDER judges the real ones"
        )
        kept = [word for word in started if word.split("=")[0].split(".")[0] not in ("model", "tokenizer")]
        alone = ["adapter.name=null", f"model.config={json.dumps(_LLAMA)}", f"tokenizer.vocabulary_size={VOCABULARY}"]
        started = [*kept, *alone]
    source = recipes.read_recipe(path, started)  # a rule may want what the stand-in does not have
    assert source.recipe is not None
    task = registry.load_task(source.recipe)
    _write_model(source.recipe, recipe, task, folder)
    own = recipe.tokenizer.path or (None if model.revision or stand_in else model.path)
    settings = _settings(path, given, smaller, recipe, folder, own or str(folder / "model"))
    twin = Twin(path, folder, settings, recipes.load_recipe(path, settings), not_judged=not_judged)
    task = registry.load_task(twin.recipe)
    steps = [*StepBatches(task.train, twin.recipe.seed, twin.recipe.batch, (0, 1), STEPS)]
    twin.rows = [Counter(key for batch in step for key in row_keys(batch)) for step in steps]
    twin.why_not_looped = why_not_looped(twin.recipe, folder)
    if not twin.why_not_looped:
        texts = [[text for batch in step for text in texts_of(batch)] for step in steps]
        _write_loop(twin.recipe, texts, folder)
        _judge_trained(twin, task, [text for step in texts for text in step])
    return twin


def _write_model(recipe: Recipe, real: Recipe, task: Task, folder: Path) -> None:
    """Write model/, and adapter/ for a recipe with one, with random weights; teacher/ for one with a teacher."""
    size = max(len(task.tokenizer), task.vocabulary_size)
    config = narrow(hf_config.model_config(recipe, size, task.special_tokens, task.head))
    model_class = hf_config.find_class(task.head, config)
    assert model_class is not None  # model_config has found it
    usual = getattr(config, "initializer_range", None)
    with torch.random.fork_rng([]):
        torch.manual_seed(real.seed)
        for name in ("model", *(["teacher"] if TASKS[real.task].has_teacher else [])):
            config.initializer_range = SPREAD
            model = model_class(config)
            config.initializer_range = usual
            model.save_pretrained(folder / name)
            task.tokenizer.save_pretrained(folder / name)
        if real.adapter.name is not None:
            from peft import LoraConfig, get_peft_model

            asked, targets = real.adapter, real.adapter.target_modules
            lora = LoraConfig(
                r=asked.rank,
                lora_alpha=asked.alpha,
                target_modules=targets if isinstance(targets, str) else [*targets],
                target_parameters=[*asked.target_parameters] if asked.target_parameters else None,
                modules_to_save=[*asked.modules_to_save] if asked.modules_to_save else None,
                use_rslora=asked.rslora,
                use_dora=asked.dora,
                init_lora_weights=False,  # B is not 0, so that A learns from the first step on
                task_type=TASK_TYPES.get(task.head.kind),
            )
            model.name_or_path = str(folder / "model")
            get_peft_model(model, lora).save_pretrained(str(folder / "adapter"))


def narrow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same family with few layers, narrow widths and no dropout."""
    fields = config.to_dict()
    kinds = fields.get("layer_types") or ()
    layers = max([LAYERS, *(kinds.index(kind) + 1 for kind in {*kinds})])
    for name in [name for name in fields if fields[name] is not None]:
        is_dropout = isinstance(fields[name], float) and ("drop" in name or "pdrop" in name)
        fields[name] = 0.0 if is_dropout else _SIZES.get(name, layers if name in _LAYERS else fields[name])
    heads = fields.get("num_key_value_heads")
    if heads is not None:
        fields["num_key_value_heads"] = 4 if heads == getattr(config, "num_attention_heads", None) else min(heads, 2)
    if kinds:
        fields["layer_types"] = [*kinds[:layers]]
    try:
        return type(config).from_dict({**fields, "dtype": "float32"})
    except Exception as error:  # of any type: each family has checks of its own
        raise ConfigurationError(
            f"model: no {config.model_type} of {layers} narrow layers can be made: {error}"
        ) from error


def _settings(
    path: str, given: Sequence[str], smaller: Sequence[str], recipe: Recipe, folder: Path, own: str
) -> list[str]:
    """Return the `key=value` that make the twin of a recipe, the user's among them. own: path of its tokenizer."""
    left_out = {"path", "revision", "config", "overrides", "new_head", "trust_remote_code"}
    model = {key: value for key, value in recipe.model.model_dump(exclude_unset=True).items() if key not in left_out}
    model |= {"path": str(folder / "model"), "attention": "auto", "kernels": "torch"}  # others need a GPU
    tokenizer: dict[str, Any] = recipe.tokenizer.model_dump(exclude_unset=True, exclude={"vocabulary_size"})
    tokenizer["path"] = own
    blocks: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    if recipe.adapter.name is not None:
        kept = {"quantization": recipe.adapter.quantization, "loraplus_lr_ratio": recipe.adapter.loraplus_lr_ratio}
        blocks["adapter"] = {"path": str(folder / "adapter"), "dropout": 0.0, **kept}
    micro = MICRO_BATCH if recipe.batch.is_auto else min(MICRO_BATCH, recipe.batch.micro_batch_size)
    values: dict[str, Any] = {
        **blocks,
        **({"distill.teacher": str(folder / "teacher")} if TASKS[recipe.task].has_teacher else {}),
        "batch.global_batch_size": min(ROWS, recipe.batch.global_batch_size),
        "batch.micro_batch_size": micro,
        "compile": "off",
        "checkpoint.every_steps": SAVED,
        "checkpoint.background": False,  # so that it is complete before the kill
        "checkpoint.best": None,
        "checkpoint.mirror": None,
        "evaluate.patience": None,
        "export.checkpoint": "last",
        "export.enabled": True,
        "export.verify": "1B",
        "logging.trackers": [],
        "rehearse": False,
    }
    user = [word for word in given if word.partition("=")[0].partition(".")[0] not in blocks]
    own_words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return jobs.shortened(path, [*user, *smaller, *own_words], STEPS)


def row_keys(batch: MicroBatch) -> list[str]:
    """Hash each row that trains something: whole numbers of its inputs and targets."""
    assert batch.places is not None
    size = len(batch.places)
    tensors = {name: tensor for part in (batch.inputs, batch.targets) for name, tensor in part.items()}
    named = [(name, tensor.reshape(size, -1)) for name, tensor in tensors.items() if not tensor.is_floating_point()]
    trains = (batch.labels.reshape(size, -1) != IGNORE_INDEX).any(dim=1).tolist()
    keys = []
    for row in (row for row in range(size) if trains[row]):
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(named):
            digest.update(name.encode() + tensor[row].contiguous().numpy().tobytes())
        keys.append(digest.hexdigest())
    return keys


def texts_of(batch: MicroBatch) -> Iterator[dict[str, list[int]]]:
    """Split rows into the texts that they are made of, as transformers wants them: labels are not shifted.

    Texts that train nothing are left out, and what follows the last trained token of a causal model's.
    """
    ids, positions, mask = (batch.inputs.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    assert ids is not None
    for row in range(len(ids)):
        tokens, labels = ids[row].tolist(), batch.labels[row].tolist()
        if positions is None:  # an encoder's, padded behind
            end = len(tokens) if mask is None else int(mask[row].sum())
            yield {"input_ids": tokens[:end], "labels": labels[:end] if isinstance(labels, list) else [labels]}
            continue
        starts = [place for place, position in enumerate(positions[row].tolist()) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            trained = [place for place in range(start, stop) if labels[place] != IGNORE_INDEX]
            if trained:
                end = trained[-1] + 1
                yield {
                    "input_ids": [*tokens[start:end], labels[end - 1]],
                    "labels": [IGNORE_INDEX, *labels[start:end]],
                }


def why_not_looped(recipe: Recipe, folder: Path) -> str:
    """Return why a plain loop of 60 lines does not compute what this recipe trains; "" if it does."""
    fields = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    reasons = {
        f"the loss of task {recipe.task}": recipe.task not in _LOOPED,
        f"the optimizer {recipe.optimizer.name}": recipe.optimizer.name != "adamw",
        "weights in 4 or 8 bits": recipe.adapter.quantization is not None,
        "products in fp8": recipe.fp8 != "off",
        "the router loss": bool(fields.get("router_aux_loss_coef")) and recipe.model.router_loss != "off",
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def _write_loop(recipe: Recipe, texts: list[list[dict[str, list[int]]]], folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(step) + "\n" for step in texts), encoding="utf-8")
    optimizer = recipe.optimizer
    settings = {
        "auto_class": TASKS[recipe.task].auto_class,
        "learning_rate": optimizer.learning_rate,
        "rates": [learning_rate(recipe, update) for update in range(1, STEPS + 1)],
        "betas": optimizer.betas,
        "epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "lora_b_factor": recipe.adapter.loraplus_lr_ratio or 1.0,
        "max_grad_norm": optimizer.max_grad_norm,
        "groups": [group.model_dump(exclude_none=True) for group in optimizer.groups],
    }
    (folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("plain_loop.py"), folder / "judge.py")


def _judge_trained(twin: Twin, task: Task, texts: list[dict[str, list[int]]]) -> None:
    """Count the texts' tokens by what they are and whether they are trained, and compare with the recipe's promise."""
    counts, data = Counter[tuple[str | None, bool]](), twin.recipe.data
    if TASKS[twin.recipe.task].chats:
        if data.path is None or data.streaming or not data.chat or data.train_on != "assistant":
            twin.not_judged.append("which tokens are trained: only for data.path with data.train_on=assistant")
            return
        by_start: dict[tuple[int, ...], list[tuple[Conversation, str]]] = {}
        selection = sources.Selection.of(twin.recipe, data)
        source = find.find_conversations(data.path, data.pattern, ChatSchema.of(data), selection)
        for conversation in islice(source.documents(), 10 * MOST_DOCUMENTS):
            if (rendered := _rendered(task, twin.recipe, conversation)) is not None:
                ids = task.tokenizer(rendered, add_special_tokens=False)["input_ids"]
                by_start.setdefault(tuple(ids[:START]), []).append((conversation, rendered))
        unknown = 0
        for text in texts:
            ids = text["input_ids"]
            possible = (_kinds(task, twin.recipe, *pair, ids) for pair in by_start.get(tuple(ids[:START]), ()))
            kinds = next(filter(None, possible), None)
            unknown += kinds is None
            counts.update(zip(kinds or (), (label != IGNORE_INDEX for label in text["labels"]), strict=False))
        if unknown:
            why = "tools, reasoning, weights, or another rendering than transformers' apply_chat_template"
            twin.not_judged.append(f"which tokens of {unknown} of {len(texts)} conversations are trained: {why}")
    else:
        first = 1 if "pretrain" in twin.recipe.task else 0  # nothing precedes a causal text's first token
        counts.update(("the texts", label != IGNORE_INDEX) for text in texts for label in text["labels"][first:])
    must = {"assistant"} | ({"the texts"} if "pretrain" in twin.recipe.task else set())
    for kind in sorted({kind for kind, _ in counts if kind}):
        trained, others = counts[kind, True], counts[kind, False]
        twin.trained[kind] = [trained, trained + others]
        if kind in must and others:
            twin.problems.append(f"{others:,} of {trained + others:,} tokens of {kind} are not trained")
        if kind not in (*must, ENDS, "the texts") and trained:
            twin.problems.append(f"{trained:,} of {trained + others:,} tokens of {kind} are trained")


def _rendered(task: Task, recipe: Recipe, conversation: Conversation, num_messages: int | None = None) -> str | None:
    """Render the first messages as transformers does; None for what is not compared here."""
    messages = list(conversation.messages)
    if not messages or not all(set(message) == {"role", "content"} for message in messages):
        return None
    asks = num_messages is not None and num_messages < len(messages) and messages[num_messages]["role"] == "assistant"
    try:
        text = task.tokenizer.apply_chat_template(
            messages[:num_messages],
            tokenize=False,
            add_generation_prompt=asks,
            **{**recipe.data.chat_template_kwargs, **(conversation.template_kwargs or {})},
        )
    except (TemplateError, TypeError, ValueError, LookupError):  # a template may refuse, for example no messages
        return None
    return str(text)


def _kinds(
    task: Task, recipe: Recipe, conversation: Conversation, text: str, ids: list[int]
) -> list[str | None] | None:
    """Say of which role each token is; None if the text has other tokens. A token on an edge has no role."""
    encoded = task.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"][: len(ids)] != ids:
        return None
    spans, at = [], 0
    for index, message in enumerate(conversation.messages):
        before = _rendered(task, recipe, conversation, index)
        at = len(before) if before and text.startswith(before) else at
        content = message["content"].strip()
        if (start := text.find(content, at)) < 0:
            return None
        at = start + len(content)
        is_prompt = message["role"] == "assistant" and index < conversation.num_prompt
        spans.append((start, at, "an earlier assistant" if is_prompt else message["role"]))
    kinds: list[str | None] = []
    for start, end in encoded["offset_mapping"][: len(ids)]:
        over = [span for span in spans if start < span[1] and end > span[0]]
        inside = [role for first, last, role in over if first <= start and end <= last]
        follows = "assistant" in kinds[-2:]  # the token that ends a turn, and perhaps a line break
        kinds.append(inside[0] if inside else None if over else ENDS if follows else "the template")
    return kinds
