"""Facts about each task for the recipe, the strategies and the commands. The tasks themselves are in tasks/.

A new task is a module in tasks/ and a row of _BY_NAME.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from samecurve.specs.data_names import (
    BUILTIN,
    DOCSTRINGS,
    FUNCTIONS,
    MODULES,
    PREFERENCES,
    STEPS,
    WORDS,
    ByName,
)


@dataclass(frozen=True)
class TaskSpec:
    """Facts about one task.

    Attributes:
        builtin: built-in data set of the task.
        reads: keys of a recipe that this task reads and some others do not.
        refuses: by key, a value that this task cannot use (None: missing), and reason and fix after "task NAME".
        row: content of a row, for tasks whose rows cannot be packed; "" where rows may be packed.
        by_token: whether the loss is a sum over tokens, each computed from its own logits and targets (Task.by_token).
        by_log_probability: whether the loss needs of the logits only the labels' log-probabilities
            (Task.by_log_probability).
        contrasts_rows: whether the loss of a row depends on the other rows of its batch.
        deepspeed_pipeline: whether the task can run under DeepSpeed's pipeline (configs/pipeline.yaml).
        torch_pipeline: whether the task has been compared with one process under PyTorch's pipeline schedules.
        undivided: the reason why a row's tokens cannot be divided over ranks; "" where they can.
        chats: whether the data are, or may be, turns of a conversation.
        has_teacher: whether a second model, the frozen teacher, is loaded.
        auto_class: class of transformers that loads the exported model.
        hub_tag: the hub's pipeline tag of the exported model.
        predicts: example arguments of `predict`; "" for a model that generates text.
        metrics: what its evaluation measures and checkpoint.best may name; keys of BETTER.
    """

    builtin: str
    reads: tuple[str, ...]
    refuses: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    row: str = ""
    by_token: bool = False
    by_log_probability: bool = False
    contrasts_rows: bool = False
    deepspeed_pipeline: bool = False
    torch_pipeline: bool = False
    undivided: str = ""
    chats: bool = False
    has_teacher: bool = False
    auto_class: str = "AutoModelForCausalLM"
    hub_tag: str = "text-generation"
    predicts: str = ""
    metrics: tuple[str, ...] = ("eval_loss", "eval_perplexity", "eval_bits_per_byte")

    @property
    def fills_masks(self) -> bool:
        """The model is an encoder that predicts masked tokens."""
        return self.hub_tag == "fill-mask"

    @property
    def trains_head(self) -> bool:
        """The model has a new head, which is trained in full beside an adapter."""
        return self.auto_class in ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")

    @property
    def takes_chunks(self) -> bool:
        """The loss can be computed in chunks of tokens."""
        return self.by_token or self.by_log_probability

    @property
    def predicts_next_token(self) -> bool:
        """The loss is the cross-entropy of the next token alone."""
        return self.by_token and not self.has_teacher and not self.fills_masks


# Of two values of an evaluation metric, the better one.
BETTER = {
    **dict.fromkeys(("eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_label_loss"), "lower"),
    **dict.fromkeys(("eval_divergence", "eval_rewards_rejected"), "lower"),
    **dict.fromkeys(("eval_accuracy", "eval_f1", "eval_margin", "eval_rewards_chosen"), "higher"),
    "eval_mae": "lower",
    "eval_pearson": "higher",
    **dict.fromkeys(("eval_accuracy_at_1", "eval_accuracy_at_5", "eval_mrr_at_10"), "higher"),
}
OF_REGRESSION = ("eval_mae", "eval_pearson")
_TEXTS = ("data.text_column", "data.mixture", "data.streaming", "data.truncation", "evaluate.samples")
_CHAT = (
    *("data.format", "data.prompt_column", "data.chat", "data.chat_template_kwargs", "data.truncation"),
    *("tokenizer.chat_template", "tokenizer.template_date"),
)
_CONVERSATIONS = (
    *("data.messages_column", "data.completion_column", "data.train_on", "data.reasoning", "evaluate.samples"),
    *_CHAT,
)
_OF_PAIRS = ("eval_loss", "eval_accuracy", "eval_margin", "eval_rewards_chosen", "eval_rewards_rejected")
_PREFERENCES = ("data.chosen_column", "data.rejected_column", *_CHAT)

_BY_NAME = {
    "pretrain": TaskSpec(BUILTIN, _TEXTS, by_token=True, deepspeed_pipeline=True, torch_pipeline=True),
    "continue_pretrain": TaskSpec(
        BUILTIN,
        _TEXTS,
        {"model.path": (None, "starts from a pretrained model; set it to a folder or hub name")},
        by_token=True,
        deepspeed_pipeline=True,
        torch_pipeline=True,
    ),
    "sft": TaskSpec(
        FUNCTIONS,
        ("data.mixture", *_CONVERSATIONS),
        by_token=True,
        deepspeed_pipeline=True,
        torch_pipeline=True,
        chats=True,
    ),
    "distill": TaskSpec(
        FUNCTIONS,
        (
            *_CONVERSATIONS,
            *("distill.teacher", "distill.temperature", "distill.divergence", "distill.label_weight"),
        ),
        {
            "distill.teacher": (None, "needs a teacher; set it to the folder or hub name of the teacher model"),
            "loss.implementation": (
                "liger",
                "also needs the teacher's logits, and liger computes cross-entropy only; use auto",
            ),
        },
        by_token=True,
        torch_pipeline=True,
        chats=True,
        has_teacher=True,
        metrics=("eval_loss", "eval_label_loss", "eval_divergence", "eval_perplexity", "eval_bits_per_byte"),
    ),
    "dpo": TaskSpec(
        PREFERENCES,
        (
            *(*_PREFERENCES, "data.train_on", "dpo.loss", "dpo.beta", "dpo.label_smoothing", "dpo.gamma"),
            *("dpo.desirable_weight", "dpo.undesirable_weight"),
        ),
        {
            "data.train_on": (
                "all",
                "compares two answers to the same prompt by their own tokens; use assistant or completion",
            )
        },
        row="two answers to one prompt",
        by_log_probability=True,
        deepspeed_pipeline=True,
        torch_pipeline=True,
        chats=True,
        metrics=_OF_PAIRS,
    ),
    "reward": TaskSpec(
        PREFERENCES,
        (*_PREFERENCES, "tokenizer.pad_token", "reward.center_rewards_coefficient"),
        row="two answers to one prompt",
        torch_pipeline=True,
        chats=True,
        auto_class="AutoModelForSequenceClassification",
        hub_tag="text-classification",
        predicts="--prompt 'a question' 'an answer'",
        metrics=_OF_PAIRS,
    ),
    "classify": TaskSpec(
        MODULES,
        (
            *("data.text_column", "data.text_pair_column", "data.label_column", "data.labels"),
            *("data.truncation", "tokenizer.pad_token", "classify.problem_type"),
        ),
        row="one text",
        torch_pipeline=True,
        auto_class="AutoModelForSequenceClassification",
        hub_tag="text-classification",
        predicts="'a text'",
        metrics=("eval_loss", "eval_accuracy", "eval_f1", *OF_REGRESSION),
    ),
    "token_classify": TaskSpec(
        WORDS,
        ("data.words_column", "data.label_column", "data.labels", "data.truncation", "tokenizer.pad_token"),
        row="one text",
        auto_class="AutoModelForTokenClassification",
        hub_tag="token-classification",
        predicts="'a text'",
        metrics=("eval_loss", "eval_accuracy", "eval_f1"),
    ),
    "process_reward": TaskSpec(
        STEPS,
        (
            *("data.text_column", "data.words_column", "data.label_column", "data.truncation"),
            *("tokenizer.pad_token", "process_reward.step_separator"),
        ),
        row="one solution",
        auto_class="AutoModelForTokenClassification",
        hub_tag="token-classification",
        predicts="--file solutions.jsonl",
        metrics=("eval_loss", "eval_accuracy", "eval_f1"),
    ),
    "mlm": TaskSpec(
        BUILTIN,
        ("data.text_column", "tokenizer.pad_token"),
        row="one text",
        undivided="its models also attend to later tokens, and only causal attention can be split",
        by_token=True,
        auto_class="AutoModelForMaskedLM",
        hub_tag="fill-mask",
        predicts="'a [MASK] word'",
        metrics=("eval_loss", "eval_perplexity", "eval_accuracy"),
    ),
    "embed": TaskSpec(
        DOCSTRINGS,
        (
            *("data.anchor_column", "data.positive_column", "data.negative_columns"),
            *("data.format", "data.num_negatives", "data.truncation"),
            *("tokenizer.pad_token", "embed.temperature", "embed.pooling", "embed.queue", "embed.momentum"),
        ),
        {
            "batch.global_batch_size": (1, "contrasts the rows of a batch; set it to 2 or more"),
            "model.new_head": (True, "uses no head; set it to false"),
        },
        row="texts that are read by themselves",
        contrasts_rows=True,
        torch_pipeline=True,
        auto_class="AutoModel",
        hub_tag="sentence-similarity",
        predicts="'a text' 'another text'",
        metrics=("eval_loss", "eval_accuracy_at_1", "eval_accuracy_at_5", "eval_mrr_at_10"),
    ),
}
# A class of the user's own, see tasks/own.py. It is not imported where its facts are read.
OWN_TASK = TaskSpec(BUILTIN, ("data.text_column", "data.mixture", "data.truncation"), metrics=("eval_loss",))


TASKS = ByName(_BY_NAME, OWN_TASK)

# type checkers refuse a computed Literal, by which pydantic checks the recipe
if TYPE_CHECKING:
    TaskName = MetricName = str
else:
    TaskName, MetricName = Literal[tuple(TASKS)], Literal[tuple(BETTER)]


def readers(key: str) -> list[str]:
    """Return the tasks that read a key of TaskSpec.reads."""
    return [task for task, spec in TASKS.items() if key in spec.reads]
