"""save_state and load_state of the Accelerator in one process, beside those of Accelerate."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, OrderedDict
from functools import reduce

import accelerate
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

import samecurve
from samecurve.accelerator.portable_values import decode, encode
from samecurve.accelerator.states import SERIES
from samecurve.checkpoint import commit
from samecurve.checkpoint.manifest import check_files, list_checkpoints
from samecurve.errors import CheckpointError, NumericError, StorageError
from samecurve.storage.filesystem import LocalFileSystem

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, 0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9, dampening=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, 0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, 0.01, centered=True, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 0.01),
    "Rprop": lambda groups: torch.optim.Rprop(groups, 0.01),
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Accelerate's state is one for the process."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


class Average:
    """A registered object: an average of a weight, with the kinds of values that state dicts have."""

    def __init__(self):
        self.mean, self.seen = torch.zeros(3), Counter()

    def update(self, model):
        self.mean = 0.9 * self.mean + 0.1 * model[1].weight.detach()[:3]
        self.seen[model.training] += 1

    def state_dict(self):
        return {"mean": self.mean, "seen": self.seen, "best": float("inf"), 3: (np.arange(2), None)}

    def load_state_dict(self, state):
        assert state["best"] == float("inf") and state[3][1] is None and state[3][0].tolist() == [0, 1]
        self.mean, self.seen = state["mean"], state["seen"]


class Script:
    """A user's loop: convolution in channels_last, BatchNorm, a frozen layer, two learning rates and a schedule."""

    def __init__(self, folder=None, optimizer="AdamW", kind: type = samecurve.Accelerator, seed=0, **project):
        torch.manual_seed(seed)
        configuration = ProjectConfiguration(str(folder), **project) if folder else None
        self.accelerator = kind(project_config=configuration)
        layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 1))
        model = nn.Sequential(*layers)
        model[0].to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        model[3].register_parameter("codes", nn.Parameter(torch.randint(9, (3,)).byte(), requires_grad=False))
        model[3].requires_grad_(False)
        groups = [{"params": [*model[:2].parameters()]}, {"params": [*model[4].parameters()], "lr": 0.002}]
        trained = OPTIMIZERS[optimizer](groups)
        schedule = torch.optim.lr_scheduler.MultiStepLR(trained, [2, 4], gamma=0.5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, trained, schedule)
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            x = torch.randn(6, 2, 4, 4) + random.random() + np.random.rand()
            loss = (self.model(x) - x.mean((1, 2, 3))[:, None]).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.average.update(self.model)
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in self.model.state_dict().items()}, self.average.mean


def equal(first, second):
    assert first[0] == second[0] and torch.equal(first[2], second[2])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_run_goes_on_bit_for_bit(optimizer, tmp_path):
    script = Script(optimizer=optimizer)
    script.train(3)
    folder = script.accelerator.save_state(tmp_path / "state")
    expected = script.train(3)
    assert not [path for path in folder.iterdir() if path.suffix in (".pkl", ".bin", ".pt")]
    for steps in (0, 2):  # of a fresh script, and of one that has other states already
        other = Script(optimizer=optimizer, seed=9)
        other.train(steps)
        other.accelerator.load_state(tmp_path / "state")
        equal(other.train(3), expected)
        assert other.optimizer.param_groups[1]["lr"] == 0.0005


@pytest.mark.parametrize(
    ("kind", "state"), [(torch.optim.Adafactor, "row_var"), (torch.optim.LBFGS, "al"), (torch.optim.AdamW, "")]
)
def test_what_an_optimizer_cannot_save_is_said_at_its_first_step(kind, state, tmp_path, recwarn):
    accelerator = samecurve.Accelerator()
    model = nn.Linear(3, 4)
    model, optimizer = accelerator.prepare(model, kind(model.parameters()))

    def closure():
        loss = model(torch.ones(2, 3)).square().mean()
        accelerator.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    said = [str(warning.message) for warning in recwarn if "save_state will fail" in str(warning.message)]
    assert len(said) == bool(state) and all(f"{kind.__name__}: the state {state} " in line for line in said)
    if state:
        with pytest.raises(CheckpointError, match=f"the state {state} of"):
            accelerator.save_state(tmp_path / "state")
    else:
        accelerator.save_state(tmp_path / "state")


def test_a_state_before_the_first_step_forgets_the_later_one(tmp_path):
    script = Script()
    script.accelerator.save_state(tmp_path / "state")
    expected = script.train(2)
    script.accelerator.load_state(tmp_path / "state")
    assert not script.optimizer.state
    equal((*script.train(2)[:2], expected[2]), expected)


def test_names_are_those_of_the_plain_model(tmp_path):
    script = Script()
    script.accelerator._models[0] = torch.compile(script.model)
    second = script.accelerator.prepare(nn.Linear(2, 2))
    index = json.loads((script.accelerator.save_state(tmp_path / "state") / "index.json").read_text())
    names = [name for name, weight in script.model.named_parameters() if weight.is_floating_point()]
    assert [*index] == [*names, *(f"model_1/{name}" for name, _ in second.named_parameters())]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": [1, {"b": object()}]}, r"registered object 1 \(Odd\)\.a\[1\]\.b: found builtins\.object"),
        ({"a": np.array(["text"])}, r"\.a: found numpy\.ndarray of <U4"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, r"\.a: found torch\.Tensor of torch\.complex64"),
        ({"a": lambda: None}, r"\.a: found builtins\.function"),
        ({"a": "x" * 2**26}, r"larger than 67,108,864 bytes, most of them in registered object 1; let its state_dict"),
        (reduce(lambda inner, _: [inner], range(98), []), r"more than 100 levels .* in registered object 1; let its"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(value, complaint, tmp_path):
    class Odd(Average):
        def state_dict(self):
            return value

    script = Script()
    script.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(CheckpointError, match=complaint):
        script.accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_values_come_back_with_their_types():
    value = {
        "text": "ä",
        "$key": True,
        2: (1, [2.5, float("-inf"), None]),
        "big": {"state": 2**127 + 1},
        "ordered": OrderedDict(b=1, a=2),
        "counts": Counter({3: 4}),
        "names": {"x", "y"},
        "number": np.float32(0.5),
    }
    tensors: dict = {}
    encoded = encode(value | {"t": torch.ones(2, 3).bfloat16(), 1: torch.tensor(7), "1": torch.tensor(8)}, "o", tensors)
    decoded = decode(encoded, lambda key: tensors[key].reshape(-1))
    assert decoded.pop("t").dtype == torch.bfloat16 and (decoded.pop(1), decoded.pop("1")) == (7, 8)
    assert decoded == value and [type(item) for item in decoded.values()][:-1] == [type(v) for v in value.values()][:-1]


def states(folder):
    return [path.name for path in list_checkpoints(LocalFileSystem(), folder / "checkpoints", SERIES)]


def test_names_and_limit_are_accelerates(tmp_path):
    own = Script(tmp_path / "own", automatic_checkpoint_naming=True, total_limit=2)
    stock = Script(tmp_path / "stock", kind=accelerate.Accelerator, automatic_checkpoint_naming=True, total_limit=2)
    for script in (own, stock):
        returned = [str(script.accelerator.save_state()) for _ in range(4)]
        assert returned[-1].endswith("checkpoints/checkpoint_3") and script.accelerator.save_iteration == 4
    assert states(tmp_path / "own") == states(tmp_path / "stock") == ["checkpoint_3", "checkpoint_2"]
    own.accelerator.project_configuration.iteration = 3
    with pytest.raises(ValueError, match="already exists. Please manually override"):
        own.accelerator.save_state()
    again = Script(tmp_path / "own", automatic_checkpoint_naming=True, total_limit=2)
    again.accelerator.load_state()
    assert again.accelerator.save_state().name == "checkpoint_4"


@pytest.mark.parametrize("kind", [samecurve.Accelerator, accelerate.Accelerator])
def test_a_failed_save_leaves_the_only_checkpoint(kind, tmp_path, monkeypatch):
    """Accelerate's own makes room first."""
    script = Script(tmp_path, kind=kind, automatic_checkpoint_naming=True, total_limit=1)
    script.accelerator.save_state()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("accelerate.checkpointing.save", full)
    monkeypatch.setattr(LocalFileSystem, "create", full)
    with pytest.raises((StorageError, OSError)):
        script.accelerator.save_state()
    whole = not check_files(LocalFileSystem(), tmp_path / "checkpoints" / "checkpoint_0")
    assert whole == (kind is samecurve.Accelerator)
    assert states(tmp_path) == (["checkpoint_0"] if whole else ["checkpoint_1"])


def test_a_crash_before_rotation_leaves_one_more(tmp_path, monkeypatch):
    script = Script(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    script.accelerator.save_state()
    with monkeypatch.context() as crash, pytest.raises(KeyboardInterrupt):
        crash.setattr(commit, "rotate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        script.accelerator.save_state()
    assert states(tmp_path) == ["checkpoint_1", "checkpoint_0"]
    again = Script(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    again.accelerator.load_state()
    again.accelerator.save_state()
    assert states(tmp_path) == ["checkpoint_2"]


def test_a_damaged_newest_is_skipped_with_a_line(tmp_path, capsys):
    script = Script(tmp_path, automatic_checkpoint_naming=True)
    script.train(1)
    script.accelerator.save_state()
    expected = script.train(2)
    newest = script.accelerator.save_state()
    file = newest / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    other = Script(tmp_path, automatic_checkpoint_naming=True)
    other.accelerator.load_state()
    assert "skipped an unusable checkpoint" in (text := capsys.readouterr().out) and "checkpoint_1/rank_00000" in text
    equal(other.train(2), expected)
    assert other.accelerator.save_state().name == "checkpoint_2"
    with pytest.raises(CheckpointError, match="checkpoint_1 cannot be used"):
        other.accelerator.load_state(newest)


def test_a_replaced_folder_keeps_the_users_files(tmp_path):
    script, folder = Script(), tmp_path / "state"
    (folder / "plots" / "rank_00000.safetensors").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    for _ in range(2):
        script.train(1)
        script.accelerator.save_state(folder)
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "plots" / "rank_00000.safetensors").is_dir()
    assert not check_files(LocalFileSystem(), folder) and [path.name for path in tmp_path.iterdir()] == ["state"]
    with pytest.raises(ValueError, match="give it one of its own"):
        script.accelerator.save_state("")


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    script, folder = Script(), tmp_path / "state"
    script.accelerator.save_state(folder)
    script.train(1)
    rename, expected = LocalFileSystem.rename, []

    def once(self, old, new):
        if expected:
            raise KeyboardInterrupt
        expected.append(new)
        rename(self, old, new)

    with monkeypatch.context() as crash, pytest.raises(KeyboardInterrupt):
        crash.setattr(LocalFileSystem, "rename", once)
        script.accelerator.save_state(folder)
    assert not folder.exists()
    expected = script.train(2)
    other = Script(seed=4)
    other.accelerator.load_state(folder)
    equal(other.train(2), expected)


def test_buffers_come_back_as_they_are_or_are_refused_by_name(tmp_path):
    """A mask of -inf is no diverged weight."""
    naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = samecurve.Accelerator(cpu=True, project_config=naming)
    mask = torch.full((2, 2), -torch.inf).triu(1)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask.clone())
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state()
    model.mask.zero_()
    accelerator.load_state()
    assert torch.equal(model.mask, mask)
    model.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"angles: found a buffer in torch.complex64.*view_as_real"):
        accelerator.save_state()


def test_another_model_is_refused_with_its_differences(tmp_path):
    script = Script()
    script.accelerator.save_state(tmp_path / "state")
    before = script.train(1)
    script.model[4] = nn.Linear(4, 2)
    script.accelerator.register_for_checkpointing(Average())
    script.model[1].register_buffer("mean", torch.ones(2))
    with pytest.raises(CheckpointError, match=r"(?s)1\.mean: only in the script.*object 1: only in the script"):
        script.accelerator.load_state(tmp_path / "state")
    script.accelerator._custom_objects.pop()
    del script.model[1].mean
    with pytest.raises(CheckpointError, match=r"4\.weight: \(1, 4\) in the checkpoint, \(2, 4\) in the model"):
        script.accelerator.load_state(tmp_path / "state")
    assert torch.equal(script.model[0].weight, before[1]["0.weight"])
    with pytest.raises(CheckpointError, match="optimizer 0: AdamW in the checkpoint, SGD in the script"):
        Script(optimizer="SGD").accelerator.load_state(tmp_path / "state")


def test_folders_of_others_say_who_reads_them(tmp_path, capsys):
    Script(kind=accelerate.Accelerator).accelerator.save_state(str(tmp_path / "stock"))
    script = Script()
    with pytest.raises(CheckpointError, match=r"accelerate\.Accelerator\.load_state\(accelerator, '.*/stock'\)"):
        script.accelerator.load_state(tmp_path / "stock")
    with pytest.raises(ValueError, match="folder does not exist"):
        script.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="automatic checkpoint naming is disabled"):
        script.accelerator.load_state()
    script.accelerator.save_state(tmp_path / "state", exclude_frozen_parameters=True)
    assert "without effect: exclude_frozen_parameters" in capsys.readouterr().out


def test_a_state_of_accelerate_goes_on_here(tmp_path):
    stock, script, again = Script(kind=accelerate.Accelerator), Script(seed=9), Script(seed=8)
    for part in (stock, script, again):
        part.accelerator._custom_objects.clear()  # Accelerate unpickles them by torch.load, with their own classes
    stock.train(3)
    stock.accelerator.save_state(str(tmp_path / "stock"))
    expected = stock.train(3)
    accelerate.Accelerator.load_state(script.accelerator, str(tmp_path / "stock"))
    script.accelerator.save_state(tmp_path / "state")
    equal((*script.train(3)[:2], expected[2]), expected)
    again.accelerator.load_state(tmp_path / "state")
    equal((*again.train(3)[:2], expected[2]), expected)


def test_hooks_write_into_the_folder_and_read_from_it(tmp_path):
    script, calls = Script(), []

    def save(models, weights, folder):
        assert models == [script.model] and weights.pop().keys() == script.model.state_dict().keys()
        with open(f"{folder}/config.json", "w") as file:
            file.write("{}")

    script.accelerator.register_save_state_pre_hook(save)
    script.accelerator.register_load_state_pre_hook(lambda models, folder: calls.append((models, folder)))
    folder = script.accelerator.save_state(tmp_path / "state")
    script.accelerator.load_state(folder)
    assert (folder / "config.json").read_text() == "{}" and calls == [([script.model], str(folder))]


def test_an_unfinished_step_begins_again(tmp_path, capsys):
    class Loader(DataLoader):
        position = 3

        def state_dict(self):
            return {"batches": self.position}

        def load_state_dict(self, state):
            self.position = state["batches"]

    script = Script()
    script.accelerator.gradient_accumulation_steps = 4
    script.accelerator.step = 6
    loader = Loader([*range(8)])  # pyright: ignore[reportArgumentType]
    script.accelerator._dataloaders += [loader, DataLoader([*range(8)])]  # pyright: ignore[reportArgumentType]
    script.model(torch.ones(2, 2, 4, 4)).sum().backward()
    folder = script.accelerator.save_state(tmp_path / "state")
    loader.position, script.accelerator.step = 0, 0
    script.accelerator.load_state(folder)
    assert (script.accelerator.step, loader.position) == (4, 3) and script.model[0].weight.grad is None
    assert "no position of loader 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("harm", "error", "complaint"),
    [
        ("nan", NumericError, "weight/4.bias holds values that are not finite"),
        ("double", CheckpointError, "4.bias: found a parameter in torch.float64"),
        ("state", CheckpointError, r"AdamW: the state rows of 4\.weight is torch\.float32 \(4, 9\)"),
    ],
)
def test_a_state_that_cannot_be_kept_exactly_is_refused(harm, error, complaint, tmp_path):
    script = Script()
    script.train(1)
    if harm == "nan":
        script.model[4].bias.data.fill_(torch.nan)
    elif harm == "double":
        script.model[4].bias.data = script.model[4].bias.data.double()
    else:
        script.optimizer.state[script.model[4].weight]["rows"] = torch.ones(4, 9)
    with pytest.raises(error, match=complaint):
        script.accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_second_disk_without_links_copies(tmp_path, monkeypatch):
    script = Script()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes.txt").write_text("mine")
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    assert (script.accelerator.save_state(tmp_path / "state") / "notes.txt").read_text() == "mine"
    shutil.rmtree(tmp_path / "state")
