"""Facts about each task for the recipe, the strategies and the commands. The tasks themselves are in tasks/."""

from __future__ import annotations

from dataclasses import dataclass

from samecurve.specs.data_names import BUILTIN, DOCSTRINGS, FUNCTIONS, MODULES, PREFERENCES


@dataclass(frozen=True)
class TaskSpec:
    """Facts about one task.

    Attributes:
        builtin: built-in data set of the task.
        reads: keys of a recipe that this task reads and some others do not.
        row: content of a row, for tasks whose rows cannot be packed; "" where rows may be packed.
        by_token: whether the loss is a sum over tokens, each computed from its own logits and targets (Task.by_token).
        pipelined: whether the task can run under pipeline parallelism.
        chats: whether the data are, or may be, turns of a conversation.
        has_teacher: whether a second model, the frozen teacher, is loaded.
        auto_class: class of transformers that loads the exported model.
        hub_tag: the hub's pipeline tag of the exported model.
        predicts: example arguments of `predict`; "" for a model that generates text.
    """

    builtin: str
    reads: tuple[str, ...]
    row: str = ""
    by_token: bool = False
    pipelined: bool = False
    chats: bool = False
    has_teacher: bool = False
    auto_class: str = "AutoModelForCausalLM"
    hub_tag: str = "text-generation"
    predicts: str = ""


_TEXTS = ("data.text_column", "data.mixture", "data.streaming")
_CHAT = ("data.prompt_column", "data.chat", "tokenizer.chat_template")
_CONVERSATIONS = ("data.messages_column", "data.completion_column", "data.train_on", *_CHAT)
_PREFERENCES = ("data.chosen_column", "data.rejected_column", *_CHAT)

TASKS = {
    "pretrain": TaskSpec(BUILTIN, _TEXTS, by_token=True, pipelined=True),
    "continue_pretrain": TaskSpec(BUILTIN, _TEXTS, by_token=True, pipelined=True),
    "sft": TaskSpec(FUNCTIONS, ("data.mixture", *_CONVERSATIONS), by_token=True, pipelined=True, chats=True),
    "distill": TaskSpec(
        FUNCTIONS,
        (
            *_CONVERSATIONS,
            *("distill.teacher", "distill.temperature", "distill.divergence", "distill.label_weight"),
        ),
        by_token=True,
        chats=True,
        has_teacher=True,
    ),
    "dpo": TaskSpec(
        PREFERENCES,
        (*_PREFERENCES, "data.train_on", "dpo.loss", "dpo.beta", "dpo.label_smoothing", "dpo.gamma"),
        row="two answers to one prompt",
        pipelined=True,
        chats=True,
    ),
    "reward": TaskSpec(
        PREFERENCES,
        (*_PREFERENCES, "tokenizer.pad_token", "reward.center_rewards_coefficient"),
        row="two answers to one prompt",
        chats=True,
        auto_class="AutoModelForSequenceClassification",
        hub_tag="text-classification",
        predicts="--prompt 'a question' 'an answer'",
    ),
    "classify": TaskSpec(
        MODULES,
        ("data.text_column", "data.text_pair_column", "data.label_column", "data.labels", "tokenizer.pad_token"),
        row="one text",
        auto_class="AutoModelForSequenceClassification",
        hub_tag="text-classification",
        predicts="'a text'",
    ),
    "mlm": TaskSpec(
        BUILTIN,
        ("data.text_column", "tokenizer.pad_token"),
        row="one text",
        by_token=True,
        auto_class="AutoModelForMaskedLM",
        hub_tag="fill-mask",
        predicts="'a [MASK] word'",
    ),
    "embed": TaskSpec(
        DOCSTRINGS,
        (
            *("data.anchor_column", "data.positive_column", "data.negative_columns"),
            *("tokenizer.pad_token", "embed.temperature", "embed.pooling"),
        ),
        row="texts that are read by themselves",
        auto_class="AutoModel",
        hub_tag="sentence-similarity",
        predicts="'a text' 'another text'",
    ),
}


def readers(key: str) -> list[str]:
    """Return the tasks that read a key of TaskSpec.reads."""
    return [task for task, spec in TASKS.items() if key in spec.reads]
