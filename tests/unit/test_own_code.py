"""What a recipe may name by import path: what is found, what is refused and why, and which rows are read again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from samecurve.cli import commands
from samecurve.config import loader, own_code
from samecurve.config.schema import Optimizer
from samecurve.errors import ConfigurationError, DataError
from samecurve.optim import own
from samecurve.optim.factory import build_optimizer, state_names
from samecurve.specs.data_names import is_import_path
from samecurve.tasks import registry
from samecurve.tasks.registry import with_rows


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(own_code, "_allowed", {})
    monkeypatch.setattr(own, "_TRIED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def recipe(tmp_path: Path, *overrides: str, **keys):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = {"output_dir": str(tmp_path / "run"), "model": {"config": {"model_type": "llama", **sizes}}}
    content |= {"tokenizer": {"vocabulary_size": 300}, "batch": {"sequence_length": 32, "global_batch_size": 4}}
    file = tmp_path / "recipes" / "mine.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content | keys))
    return loader.load_recipe(str(file), overrides)


def module(tmp_path: Path, text: str, name: str = "mine.py") -> None:
    file = tmp_path / "recipes" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def texts(tmp_path: Path) -> str:
    module(tmp_path, "".join(json.dumps({"text": f"{n} words"}) + "\n" for n in range(200)), "mine.jsonl")
    return f"data.path={tmp_path}/recipes/mine.jsonl"


@pytest.mark.parametrize("value", ["a:B", "a.b_c:D", "é:Ü"])
def test_an_import_path_is_one(value):
    assert is_import_path(value)


@pytest.mark.parametrize("value", ["builtin:python-stdlib", "s3://a/b", "a:b:c", "a:", ":b", "a b:c", "a.:b", "1:2", 3])
def test_no_import_path(value):
    assert not is_import_path(value)


@pytest.mark.parametrize("key", own_code.KEYS)
def test_a_missing_module_is_reported_with_its_folders(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        recipe(tmp_path, f"{key}=nowhere.at_all:Thing", *([] if "source" in key else ["data.path=mine.py"]))
    said = str(caught.value)
    assert f"{key}: found nowhere.at_all:Thing, but there is no module nowhere.at_all" in said
    assert f"folders searched: {tmp_path}/recipes, {tmp_path} and" in said and "command line" in said


REFUSED = {
    "nothing = 1": "has no Task; it defines no class or function",
    "class Other: pass\ndef more(): pass": "has no Task; it has Other and more",
    "class Task: pass": "mine:Task is class Task, not a subclass of samecurve.tasks.own.OwnTask",
    "Task = 3": "mine:Task is a int, not a subclass",
    "import nowhere_to_be": "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be'",
    "def (": "cannot be imported: SyntaxError",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_task_that_is_none(text, tmp_path):
    module(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        registry.load_task(recipe(tmp_path, "task=mine:Task", "data.path=builtin:python-stdlib"))
    assert str(caught.value).startswith("task: ") and REFUSED[text] in str(caught.value)


def test_a_module_with_the_name_of_an_installed_one(tmp_path):
    module(tmp_path, "class Task: pass", "yaml.py")
    with pytest.raises(ConfigurationError, match=r"but Python imports another module yaml, from .*rename yours"):
        registry.load_task(recipe(tmp_path, "task=yaml:Task", "data.path=builtin:python-stdlib"))


def test_a_base_file_names_what_lies_beside_it(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "hidden_task.py").write_text("from samecurve.tasks.own import OwnTask as Task")
    (tmp_path / "base" / "base.yaml").write_text("task: hidden_task:Task")
    found = recipe(tmp_path, "data.path=builtin:python-stdlib", base="../base/base.yaml")
    assert own_code.hashes(found).keys() == {"hidden_task:Task"}


ENCODE = "from samecurve.tasks.own import OwnTask\nclass Task(OwnTask):\n    def encode(self, row):\n        return "
WRONG = {
    "row['question']": "mine.jsonl:1: Task.encode failed with KeyError: 'question'",
    "[1, 2], [True]": "mine.jsonl:1: Task.encode returned 2 tokens, but 1 marks",
    "[1, 300], [True, True]": "mine.jsonl:1: Task.encode returned 300, but ids end at ",
}


@pytest.mark.parametrize("result", WRONG)
def test_rows_that_the_task_cannot_encode(result, tmp_path):
    module(tmp_path, ENCODE + result)
    with pytest.raises(DataError) as caught:
        registry.load_task(recipe(tmp_path, "task=mine:Task", texts(tmp_path)))
    assert WRONG[result] in str(caught.value)


LOSSES = {
    "logits.float().mean()": "loss / count of 2 rows at once is ",
    "self.cross_entropy(logits, labels) / self.count(labels)": "return sums, never means, and let count say over how",
    "(logits - logits.mean(0)).square().sum()": "row by row 0 / 6, so the curve would depend on the micro-batch",
    "None": "loss returned None, expected an fp32 scalar with a gradient",
    "logits.sum(-1)": "loss returned torch.float32 of shape (2, 4), expected",
    "torch.zeros(())": "loss returned torch.float32 of shape (), expected",
    "logits.log_softmax(-1)[1].sum()": "failed with IndexError on logits of shape (2, 4, ",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_no_sum(loss, tmp_path):
    module(
        tmp_path,
        f"import torch\nfrom samecurve.tasks.own import OwnTask\nclass Task(OwnTask):\n"
        f"    cross_entropy = OwnTask.loss\n    def loss(self, logits, labels):\n        return {loss}",
    )
    with pytest.raises(ConfigurationError) as caught:
        registry.load_task(recipe(tmp_path, "task=mine:Task", texts(tmp_path)))
    assert str(caught.value).startswith("task: mine:Task") and LOSSES[loss] in str(caught.value)


def test_a_loss_by_token_is_a_sum_over_tokens(tmp_path):
    module(
        tmp_path,
        "from samecurve.tasks.own import OwnTask\nclass Task(OwnTask):\n    by_token = True\n"
        "    def loss(self, logits, labels):\n"
        "        return super().loss(logits, labels) + logits.sum(-2).square().sum()",
    )
    with pytest.raises(ConfigurationError, match=r"token by token .* or set by_token to False"):
        registry.load_task(recipe(tmp_path, "task=mine:Task", texts(tmp_path)))


CONFLICTS = {
    "data.path=mine.py": "data.source: found mine:rows, which returns all rows, but data.path is given",
    "data.streaming=true": "data.source: found mine:rows, which returns all rows, but data.streaming is given",
    "task_options={a: 1}": "task_options: found a, but only a task that is named by its import path has options",
    "optimizer.options={a: 1}": "optimizer.options: found a, but only an optimizer that is named by its import path",
    "data.source=rows": "expected an import path such as my_package.my_module:my_function",
    "task=mine.Task": "'embed', or an import path such as my_module:Name",
}


@pytest.mark.parametrize("override", CONFLICTS)
def test_keys_that_contradict(override, tmp_path):
    module(tmp_path, "rows = list")
    with pytest.raises(ConfigurationError) as caught:
        recipe(tmp_path, "data.source=mine:rows", override)
    assert CONFLICTS[override] in str(caught.value).replace('"', "'")


ROWS = """
from helper import WORD
CALLS = []
def rows(number, file=None):
    CALLS.append(number)
    return ({"text": f"{WORD} {n}"} for n in range(number))
"""


def test_rows_are_made_again_when_what_makes_them_changes(tmp_path):
    """The module, one that it imports, the options, or the content of a file that an option names."""
    table = tmp_path / "table.txt"

    def read(number: int = 3) -> tuple[str, int]:
        """The path of the rows, and the number of calls of a freshly imported function."""
        for name in ("mine", "helper"):
            sys.modules.pop(name, None)
        options = {"number": number, "file": str(table)}
        found = with_rows(recipe(tmp_path, "data.source=mine:rows", f"data.source_options={json.dumps(options)}"))
        assert found.data.source is None
        return found.data.path, len(sys.modules["mine"].CALLS)

    module(tmp_path, ROWS)
    module(tmp_path, "WORD = 'word'", "helper.py")
    table.write_text("a")
    first, calls = read()
    assert calls == 1 and Path(first).read_text().splitlines()[2] == '{"text": "word 2"}'
    assert read() == (first, 0)
    paths = [first, read(number=4)[0]]
    module(tmp_path, "WORD = 'another'", "helper.py")
    paths.append(read()[0])
    table.write_text("b")
    paths.append(read()[0])
    module(tmp_path, ROWS + "\n")
    paths.append(read()[0])
    assert len(set(paths)) == 5 and "another" in Path(paths[-1]).read_text()


BAD_ROWS = {
    "def rows(): yield {'a': 1}; yield 3": "failed with TypeError after 1 rows: row 2 is 3, not a dict",
    "def rows(): yield {'a': {1}}": "failed with TypeError after 0 rows: Object of type set is not JSON serializable",
    "def rows(number): return []": "failed with TypeError after 0 rows: rows() missing 1 required",
    "def rows(): return []": "returned no rows",
    "def rows(): raise RuntimeError('no network')": "failed with RuntimeError after 0 rows: no network",
}


@pytest.mark.parametrize("text", BAD_ROWS)
def test_a_source_without_rows(text, tmp_path):
    module(tmp_path, text)
    with pytest.raises(DataError) as caught:
        with_rows(recipe(tmp_path, "data.source=mine:rows"))
    assert str(caught.value).startswith("data.source: mine:rows ") and BAD_ROWS[text] in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_a_hub_dataset_is_a_source(tmp_path):
    datasets = pytest.importorskip("datasets")
    assert datasets.Dataset
    module(tmp_path, "from datasets import Dataset\ndef rows(): return Dataset.from_list([{'text': 'a', 'n': 1}])")
    found = with_rows(recipe(tmp_path, "data.source=mine:rows"))
    assert Path(found.data.path).read_text() == '{"text": "a", "n": 1}\n'


ANY_TASK = {
    "pretrain": {"text": "a b c"},
    "sft": {"prompt": "a?", "completion": "b"},
    "dpo": {"prompt": "a?", "chosen": "b", "rejected": "c"},
    "classify": {"text": "a", "label": "x"},
}


@pytest.mark.parametrize("task", ANY_TASK)
def test_every_task_reads_a_source(task, tmp_path):
    row = (
        "{name: f'{value} {n}' if name != 'label' else 'xy'[n % 2] for name, value in " + f"{ANY_TASK[task]}.items()}}"
    )
    module(tmp_path, f"def rows():\n    return [{row} for n in range(60)]")
    loaded = registry.load_task(recipe(tmp_path, f"task={task}", "data.source=mine:rows", "data.packing=false"))
    assert len(loaded.train) == 60


def optimizer(name: str, **keys) -> Optimizer:
    own_code.allow([name], [])
    return Optimizer(name=name, weight_decay=keys.pop("weight_decay", 0.0), options=keys)


ACCEPTED = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adagrad": ("sum",),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "SGD": (),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_of_torch(name, foreach, tmp_path):
    """Their states are found, and one that goes on from stored states takes the steps that the other takes."""
    settings = optimizer(f"torch.optim:{name}", weight_decay=0.1, foreach=foreach)
    own.check(settings, shards=True)
    assert state_names(settings, {"a": (2, 3)}) == {"a": ACCEPTED[name]}
    weight = torch.nn.Parameter(torch.ones(3))
    built = build_optimizer([{"params": [weight], "weight_decay": 0.1}], settings)
    assert type(built) is getattr(torch.optim, name) and built.param_groups[0]["lr"] == settings.learning_rate
    assert {*built.empty_state(weight)} - {"step"} == {*ACCEPTED[name]}


MOMENTUM = """
import torch
class Base(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.number = 0
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    self.update(group, weight, self.state[weight])
class Hidden(Base):  # counts updates where no checkpoint looks
    def update(self, group, weight, state):
        self.number += 1
        weight.sub_(weight.grad, alpha=group["lr"] / self.number)
class Adapting(Base):  # as Prodigy
    def update(self, group, weight, state):
        weight.sub_(weight.grad, alpha=group["lr"])
        group["lr"] *= 0.5
class Means(Base):
    def update(self, group, weight, state):
        state["means"] = weight.grad.mean(-1)
class Mixed(Base):
    def update(self, group, weight, state):
        if weight.dim() == 2:
            state["mean"] = weight.grad.clone()
class Normed(Base):
    def update(self, group, weight, state):
        weight.sub_(weight.grad / weight.grad.norm(), alpha=group["lr"])
class Plain(Base):
    def __init__(self, params, lr):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})
class Rateless(Base):
    def __init__(self, params, lr, weight_decay=0.0):
        torch.optim.Optimizer.__init__(self, params, {"weight_decay": 0.0})
class Stepless(Base):
    step = torch.optim.Optimizer.step
class NoOptimizer: pass
"""
UNFIT = {
    "Hidden": "does not go on from step alone: it keeps something else",
    "Adapting": "changes settings of its parameter groups",
    "Means": "keeps means = a tensor of shape (6,) for a weight of shape (6, 4) after one update",
    "Mixed": "keeps other states for a vector than for a matrix",
    "Rateless": 'has no "lr" among its defaults',
    "Stepless": "failed with NotImplementedError in its first step",
    "NoOptimizer": "is class NoOptimizer, not a subclass of torch.optim",
    "Normed": "updates the parts of a weight otherwise than the whole",
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_optimizer_whose_state_no_checkpoint_holds(name, tmp_path):
    module(tmp_path, MOMENTUM)
    own_code.allow([f"mine:{name}"], [str(tmp_path / "recipes")])
    settings = Optimizer(name=f"mine:{name}", weight_decay=0.0)
    with pytest.raises(ConfigurationError) as caught:
        own.check(settings, shards=True)
    assert str(caught.value).startswith(f"optimizer.name: mine:{name} ") and UNFIT[name] in str(caught.value)
    if name == "Normed":
        own.check(settings, shards=False)


@pytest.mark.parametrize(
    ("name", "options", "decay", "said"),
    [
        ("torch.optim:SGD", {"momentums": 1}, 0.0, "optimizer.name: torch.optim:SGD does not take lr and"),
        ("torch.optim:NAdam", {}, 0.0, "keeps mu_product = "),
        ("torch.optim:Adafactor", {}, 0.0, "keeps row_var = a tensor of shape"),
        ("mine:Plain", {}, 0.1, "optimizer.weight_decay: found 0.1, but mine:Plain has no weight_decay"),
    ],
)
def test_options_and_decay_that_it_does_not_take(name, options, decay, said, tmp_path):
    module(tmp_path, MOMENTUM)
    own_code.allow([name], [str(tmp_path / "recipes")])
    with pytest.raises(ConfigurationError, match=said):
        own.check(Optimizer(name=name, weight_decay=decay, options=options), shards=False)


@pytest.mark.parametrize("path", ["evil", "a b:c", "x.py"])
def test_the_option_wants_an_import_path(path, tmp_path, capsys):
    assert commands.main(["evaluate", str(tmp_path), "--own_code", path]) == 2
    assert f"--own_code: found {path}, expected MODULE:NAME" in capsys.readouterr().err
