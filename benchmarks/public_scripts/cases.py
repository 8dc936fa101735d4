"""Which scripts are judged, under which strategies and with which arguments; what their findings come from."""

from __future__ import annotations

from typing import NamedTuple

# of a kind of finding, unless a case says otherwise; page.py has a paragraph for most causes
CAUSES = {"rows": "order of rows", "learning rate": "schedule"}
CLIPPING = {"norm": "clipping"}


class Case(NamedTuple):
    """Attributes:
    library: whose checkout has the script.
    path: of the script, below `examples` there.
    arguments: of the script.
    strategies: with the causes of findings that only this strategy has, by their kind.
    causes: of findings under any strategy, by their kind; "" is of one that does not run or is not judged.
    """

    library: str
    path: str
    arguments: str = ""
    strategies: dict[str, dict[str, str]] = {"ddp": {}}
    causes: dict[str, str] = {}

    @property
    def script(self) -> str:
        return self.path.rpartition("/")[2]

    def cause(self, strategy: str, kind: str) -> str:
        return (CAUSES | self.causes | self.strategies[strategy]).get(kind, "")


def example(path: str, strategies: dict[str, dict[str, str]] | None = None, **causes: str) -> Case:
    named = {kind.replace("_", " ").strip(): cause for kind, cause in causes.items()}
    return Case("accelerate", path, "", strategies or {"ddp": {}}, named)


def no_trainer(path: str, data: str, strategies: dict[str, dict[str, str]] | None = None, **causes: str) -> Case:
    return Case("transformers", path, f"{data} --seed 1 --output_dir out", strategies or {"ddp": {}}, causes)


def files(kind: str) -> str:
    return (
        f"--model_name_or_path bert-base-cased --train_file {kind}_train.json --validation_file {kind}_validation.json"
    )


TRAINER = "--do_train --output_dir out --report_to none --per_device_train_batch_size 4"
GLUE = "--model_name_or_path bert-base-cased --task_name mrpc"
TEXT = "--train_file text.txt --validation_split_percentage 10"
CASES = [
    Case(
        "transformers",
        "pytorch/language-modeling/run_clm.py",
        f"--model_name_or_path llama {TEXT} --block_size 32 {TRAINER}",
        {"ddp": {}, "fsdp": {}},
    ),
    Case(
        "transformers",
        "pytorch/text-classification/run_glue.py",
        f"{GLUE} {TRAINER}",
        {"ddp": {}, "zero2": {}},
        {"loss": "loss times processes"},
    ),
    no_trainer(
        "pytorch/language-modeling/run_clm_no_trainer.py",
        f"--model_name_or_path gpt2 {TEXT} --block_size 32",
        {"ddp": {}, "zero2": CLIPPING},
    ),
    no_trainer("pytorch/text-classification/run_glue_no_trainer.py", GLUE),
    no_trainer("pytorch/token-classification/run_ner_no_trainer.py", files("ner"), loss="mean of means"),
    no_trainer("pytorch/multiple-choice/run_swag_no_trainer.py", files("swag")),
    no_trainer("pytorch/question-answering/run_qa_no_trainer.py", files("squad"), context="padding"),
    no_trainer(
        "pytorch/language-modeling/run_mlm_no_trainer.py",
        f"--model_name_or_path bert-base-cased {TEXT} --max_seq_length 32",
    ),
    example("nlp_example.py", {"ddp": {}, "zero2": CLIPPING, "fsdp": {}}),
    example("by_feature/gradient_accumulation.py"),
    example("by_feature/checkpointing.py"),
    example("by_feature/tracking.py"),
    example("by_feature/early_stopping.py"),
    example("by_feature/ddp_comm_hook.py"),
    example("by_feature/local_sgd.py", ranks="ranks train apart, as asked for"),
    example("by_feature/automatic_gradient_accumulation.py"),
]
