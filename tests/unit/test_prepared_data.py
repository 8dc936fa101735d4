"""A script's own data loader: the same rows per step on any number of processes, and after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from samecurve.accelerator.prepared_data import PreparedData, count_units
from samecurve.accelerator.prepared_loader import Units
from samecurve.errors import ConfigurationError

PROBE = Path(__file__).with_name("prepared_data_probe.py")


class Numbers(Dataset):
    """Row i is the number i. `read` has the rows that were read."""

    def __init__(self, rows: int):
        self.rows, self.read = rows, []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index):
        self.read.append(index)
        return torch.as_tensor(index)


class Groups:
    """A batch sampler of the user's own, shuffled by PyTorch's global generator: batches of 3, 1 and 4 rows."""

    def __iter__(self):
        order = torch.randperm(8).tolist()
        return iter([order[:3], order[3:4], order[4:]])

    def __len__(self) -> int:
        return 3


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(11), batch_size=4, shuffle=True),
    "in order": lambda: DataLoader(Numbers(11), batch_size=3),
    "small batches": lambda: DataLoader(Numbers(5), batch_size=2, shuffle=True),
    "no last batch": lambda: DataLoader(Numbers(11), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Numbers(9), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda: DataLoader(Numbers(6), batch_size=4, sampler=WeightedRandomSampler([1, 2, 3, 1, 5, 6], 7)),
    "own batch sampler": lambda: DataLoader(Numbers(8), batch_sampler=Groups()),
    "rows read together": lambda: DataLoader(
        Numbers(7), batch_size=None, sampler=BatchSampler(SequentialSampler(range(7)), 3, False)
    ),
}


@pytest.fixture(autouse=True)
def one_process():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    set_seed(5)
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(steps: int = 1, kind: type = PreparedData, **options):
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return kind(cpu=True, gradient_accumulation_steps=steps, **{"dataloader_config": config, **options})


def prepare(loader: DataLoader, rank: int = 0, processes: int = 1, **options):
    """The loader as a rank of several has it; a single process has rank 0's order."""
    prepared = accelerator(**options).prepare_data_loader(loader)
    prepared.batches.shard = (rank, processes)
    return prepared


def rows(loader, stop: int | None = None) -> list[list[int]]:
    """Rows of this rank in each batch, without a copied one."""
    own = []
    for number, batch in enumerate(loader, start=1):
        own.append(batch.tolist()[: loader.part.rows[loader.batches.shard[0]]])
        if number == stop:
            break
    return own


def whole(parts: list[list[list[int]]]) -> list[list[int]]:
    """Global batches from those of each rank."""
    return [sum(batch, []) for batch in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", LOADERS)
def test_rows_per_batch_are_equal_on_any_number_of_processes(name):
    epochs = {}
    for processes in (1, 2, 3, 4):
        loaders = [prepare(LOADERS[name](), rank, processes) for rank in range(processes)]
        epochs[processes] = [whole([rows(loader) for loader in loaders]) for _ in range(3)]
    assert all(epochs[processes] == epochs[1] for processes in epochs)
    if name not in ("in order", "rows read together"):
        assert epochs[1][0] != epochs[1][1] != epochs[1][2]
    for epoch in epochs[1]:
        read = sum(epoch, [])
        if name != "weighted":  # with replacement
            assert len(set(read)) == len(read) == (8 if name == "no last batch" else len(LOADERS[name]().dataset))


@pytest.mark.parametrize("name", ["shuffled", "in order", "no last batch"])
def test_one_process_has_accelerates_own_order(name):
    stock = accelerator(kind=accelerate.Accelerator).prepare_data_loader(LOADERS[name]())
    expected = []
    for epoch in range(3):
        stock.set_epoch(epoch)  # without it, the stock sampler repeats the first epoch after a resume
        expected.append([batch.tolist() for batch in stock])
    prepared = prepare(LOADERS[name]())
    assert [rows(prepared) for _ in range(3)] == expected


@pytest.mark.parametrize(("batch", "rank", "expected"), [(5, 0, [0, 1]), (5, 1, [2, 3, 4]), (1, 0, [0]), (1, 1, [0])])
def test_an_uneven_batch_is_split_and_never_padded(batch, rank, expected):
    loader = prepare(DataLoader(Numbers(batch), batch_size=batch), rank, 2)
    (part,) = [part.tolist() for part in loader]
    assert part == expected
    assert loader.part.rows == [batch // 2, batch - batch // 2]


@pytest.mark.parametrize("name", ["shuffled", "in order", "small batches", "weighted", "own batch sampler"])
@pytest.mark.parametrize("done", [1, 2])
def test_another_number_of_processes_continues_mid_epoch(name, done):
    reference = prepare(LOADERS[name]())
    expected = [rows(reference) for _ in range(3)]
    loader = prepare(LOADERS[name](), 1, 3)
    rows(loader)
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    set_seed(99)  # the seed of the order comes from the state
    loaders = [prepare(LOADERS[name](), rank, 2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
    again = [whole([rows(loader) for loader in loaders]) for _ in range(2)]
    rest = [expected[1][done:], expected[2]]
    assert again == (rest if rest[0] else [expected[2], again[1]])  # an epoch's end is the next one's start


def test_another_batch_size_continues_after_the_same_rows(caplog):
    loader = prepare(DataLoader(Numbers(12), batch_size=4))
    rows(loader, 1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    smaller = prepare(DataLoader(Numbers(12), batch_size=2))
    smaller.load_state_dict(state)
    assert rows(smaller)[0] == [4, 5]
    assert not caplog.text
    other = prepare(DataLoader(Numbers(12), batch_size=3))
    other.load_state_dict(state)
    assert rows(other)[0] == [3, 4, 5]
    assert "1 rows are read again" in caplog.text


def test_the_position_is_that_of_the_last_finished_step():
    loader = prepare(LOADERS["in order"](), steps=2)
    positions, synced = [], []
    for _ in loader:
        with loader.accelerator.accumulate():
            synced.append(loader.accelerator.sync_gradients)
        state = loader.state_dict()
        positions.append((state["epoch"], state["batches"], state["rows"], state["unfinished"]))
    assert synced == [False, True, False, True]
    assert positions == [(0, 0, 0, 1), (0, 2, 6, 0), (0, 2, 6, 1), (1, 0, 0, 0)]


@pytest.mark.parametrize(("skipped", "first"), [(2, 2), (3, 2), (1, 1), (0, 0)])
def test_a_skip_replaces_the_restored_position(skipped, first, caplog):
    loader = prepare(LOADERS["in order"]())
    loader.load_state_dict({"epoch": 4, "batches": 2, "rows": 6, "unfinished": 1, "seed": 1})
    active = loader.accelerator.skip_first_batches(loader, skipped)
    assert len(active) == 4 - first and len(loader) == 4
    assert rows(active)[0][0] == 3 * first
    assert loader.dataset.read == list(range(3 * first, 11))  # skipped rows are not read
    assert ("the loaded checkpoint was taken after 2 batches" in caplog.text) == (skipped < 2)
    assert loader.iteration == 5
    assert rows(loader)[0] == [0, 1, 2]


@pytest.mark.parametrize("kind", [PreparedData, accelerate.Accelerator])
def test_the_epoch_after_a_skip_has_its_own_order(kind):
    """Accelerate 1.15 repeats the epoch's permutation, and its skipping loader gathers padding."""
    owner = accelerator(kind=kind)
    loader = owner.prepare_data_loader(LOADERS["shuffled"]())
    first = torch.cat(list(owner.skip_first_batches(loader, 1))).tolist()
    second = torch.cat(list(loader)).tolist()
    assert (second[4:] == first) == (kind is accelerate.Accelerator)


@pytest.mark.parametrize(
    ("steps", "sync_at_end", "expected"),
    [
        (1, True, [(3, 3), (3, 3), (3, 3), (2, 2)] * 2),
        (2, True, [(3, 6), (3, 6), (3, 5), (2, 5)] * 2),
        (3, True, [(3, 9), (3, 9), (3, 9), (2, 2)] * 2),
        # one batch of the step is in the next epoch: three times the known one, then 3 / 2 of the next two
        (3, False, [(3, 9), (3, 9), (3, 9), (2, 6), (3, 9), (3, 9), (3, 8), (2, 8)]),
    ],
)
def test_units_of_each_optimizer_step(steps, sync_at_end, expected):
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_at_end)
    options = {"gradient_accumulation_plugin": plugin, "gradient_accumulation_steps": 1}
    config = DataLoaderConfiguration(split_batches=True)
    owner = PreparedData(cpu=True, dataloader_config=config, **options)
    loader = owner.prepare_data_loader(LOADERS["in order"]())
    counted = []
    for _ in range(2):
        for _ in loader:
            with owner.accumulate():
                counted.append(owner.units)
    assert [(units.micro_batch, units.step) for units in counted] == expected
    assert owner.units is None


def test_an_evaluation_within_a_step_reads_nothing_ahead():
    owner = accelerator(2)
    train, held_out = (owner.prepare_data_loader(LOADERS["in order"]()) for _ in range(2))
    for number, _ in enumerate(train):
        with owner.accumulate():
            assert owner.units == Units(3 if number < 3 else 2, 6 if number < 2 else 5)
        if number == 1:
            for count, _ in enumerate(held_out, start=1):
                assert len(held_out.dataset.read) == min(3 * count, 11)
                if count == 2:
                    break
            assert owner.gradient_state.active_dataloader is train
    assert held_out.state_dict()["batches"] == 0


def test_a_copied_row_counts_no_units():
    owner = accelerator()
    loader = owner.prepare_data_loader(DataLoader(Numbers(3), batch_size=2))
    loader.batches.shard = (0, 2)
    counted = [owner.units.micro_batch for _ in loader]
    assert counted == [1, 0]


def test_a_loop_that_is_left_begins_the_next_epoch():
    loader = prepare(LOADERS["shuffled"]())
    expected = [rows(loader) for _ in range(3)]
    loader = prepare(LOADERS["shuffled"]())
    next(iter(loader))  # a look at a batch
    assert not loader.gradient_state.in_dataloader
    for epoch in range(3):
        for _, batch in zip(range(1), loader, strict=False):
            assert batch.tolist() == expected[epoch][0]
            assert loader.units().step == 4  # as in a backward pass
        state = loader.state_dict()
        assert (state["epoch"], state["batches"]) == (epoch, 1)


def test_set_epoch_keeps_only_its_own_position(caplog):
    loader = prepare(LOADERS["shuffled"]())
    expected = [rows(loader) for _ in range(3)]
    state = {"epoch": 2, "batches": 1, "rows": 4, "unfinished": 0, "seed": loader.batches.seed}
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert rows(loader) == expected[2][1:]
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert rows(loader) == expected[0]
    assert "set_epoch(0)" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_leaves_the_global_generator_alone(workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = prepare(DataLoader(Numbers(11), batch_size=4, shuffle=True, **options), 1, 2)
    expected = rows(prepare(LOADERS["shuffled"](), 1, 2))
    before = torch.get_rng_state()
    assert rows(loader) == expected
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "config", "reason"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), {}, "IterableDataset Stream"),
        (LOADERS["in order"], {"split_batches": False}, "split_batches=False"),
        (LOADERS["in order"], {"dispatch_batches": True}, "dispatch_batches=True"),
        (
            lambda: DataLoader(Numbers(8), 4, sampler=DistributedSampler(Numbers(8), 1, 0)),
            {},
            "a DistributedSampler",
        ),
    ],
)
def test_what_accelerate_prepares_alone_is_named(loader, config, reason, caplog):
    config = DataLoaderConfiguration(**{"split_batches": True, **config})
    owner = accelerator(dataloader_config=config)
    prepared = owner.prepare_data_loader(loader())
    assert reason in caplog.text and len(caplog.records) == 1
    assert len(list(prepared)) in (2, 3, 4)
    assert owner.units is None
    assert len(list(owner.skip_first_batches(prepared, 1))) == len(list(prepared)) - 1


def test_a_loss_repeated_for_a_whole_batch_counts_each_row_once():
    """As transformers' run_clm_no_trainer.py does it, on Accelerate's own class and here."""
    means = []
    for kind in (PreparedData, accelerate.Accelerator):
        owner = accelerator(kind=kind)
        loader = owner.prepare_data_loader(LOADERS["shuffled"]())
        losses = [owner.gather_for_metrics(batch.float().mean().repeat(4)) for batch in loader]
        assert [len(part) for part in losses] == [4, 4, 3]
        means.append(torch.cat(losses).mean().item())
    assert means == [pytest.approx(5.0)] * 2


@pytest.mark.parametrize(("length", "refused"), [(8, True), (2, True), (3, False), (4, False), (1, False), (0, True)])
def test_values_of_no_rows_are_refused(length, refused):
    owner = accelerator()
    for _ in owner.prepare_data_loader(LOADERS["shuffled"]()):  # the last batch has 3 rows of 4
        pass_on = owner.gradient_state.end_of_dataloader
        if pass_on and refused:
            with pytest.raises(ConfigurationError, match=f"{length} values for 3 rows"):
                owner.gather_for_metrics({"losses": torch.ones(length)})
        elif pass_on:
            assert len(owner.gather_for_metrics(torch.ones(length))) == min(length, 3)


CAUSAL = SimpleNamespace(loss_type="ForCausalLM", config=SimpleNamespace())
LABELS = torch.tensor([[1, 2, -100], [-100, 4, 5]])


@pytest.mark.parametrize(
    ("batch", "model", "expected"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), None, 3),
        ({"labels": torch.tensor([1, -100, 0])}, None, 2),
        ({"labels": torch.rand(4, 2)}, None, 4),
        ({"labels": LABELS}, None, 4),
        ({"labels": LABELS}, CAUSAL, 3),
        ({"labels": LABELS, "shift_labels": LABELS}, CAUSAL, 4),
        ({"labels": LABELS[:, 0]}, CAUSAL, 1),
        ({"labels": LABELS}, SimpleNamespace(loss_type="ForTokenClassification", config=SimpleNamespace()), 4),
        (
            {"labels": LABELS},
            SimpleNamespace(loss_type="ForConditionalGeneration", config=SimpleNamespace(is_encoder_decoder=True)),
            4,
        ),
        ({"texts": ["a"], "x": [torch.zeros(2), 1]}, None, 2),
    ],
)
def test_units_of_a_batch(batch, model, expected):
    assert count_units(batch, model) == expected


@pytest.mark.parametrize(
    ("batch", "warned"),
    [
        ((LABELS.abs(), LABELS), True),
        ({"input_ids": LABELS.abs(), "target": LABELS}, True),
        ({"input_ids": LABELS.abs(), "labels": LABELS}, False),
        ((LABELS.float(), LABELS.abs()), False),
    ],
)
def test_labels_that_are_not_counted_are_said(batch, warned, caplog):
    owner = accelerator()
    MultiProcessAdapter.warning_once.cache_clear()
    owner.count_units(batch)
    owner.count_units(batch)
    assert caplog.text.count("a batch without") == int(warned)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2ForTokenClassification", "T5ForConditionalGeneration"])
def test_units_are_what_a_transformers_loss_averages(name):
    import transformers

    sizes = {"vocab_size": 7, "num_labels": 7, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    small = {"n_embd": 8, "n_layer": 1, "n_head": 1, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes, **small)).eval()
    labels = torch.tensor([[1, 2, -100, 3], [-100, 4, 5, -100]])
    output = model(input_ids=labels.clamp(min=0), labels=labels)
    shift = int(name.endswith("LMHeadModel"))
    logits, targets = output.logits[:, : 4 - shift], labels[:, shift:]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.isclose(output.loss * count_units({"labels": labels}, model), total)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_share_units_and_gather_each_row_once(processes, tmp_path):
    command = [sys.executable, str(PROBE), str(tmp_path), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    set_seed(0)  # as rank 0
    one_process = rows(prepare(LOADERS["shuffled"]()))
    for rank in ranks:
        assert rank["train"] == one_process
        assert rank["steps"] == [4 + 4, 3]  # rows of two batches, and of the epoch's last one
        assert rank["gathered"] == rank["objects"] == list(range(11))
        assert rank["repeated"] == [pytest.approx(5.0)] * 2
        assert rank["nested"] == [[2 * number, number] for number in range(11)]
        assert rank["custom"] == ranks[0]["custom"]
        assert rank["seed"] == ranks[0]["seed"]
    stock = [rank["stock"] for rank in ranks]
    assert stock[0] != list(range(11))  # Accelerate 1.15 counts padding after skip_first_batches
    assert sum(rank["micro"][0] for rank in ranks) == 4
