"""Reference log-probabilities: each pair its own, whatever the ranks; found again; and what cannot be used is told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from file_damage import DAMAGES
from test_preferences import stream

from samecurve.data.batches import EvaluationBatches
from samecurve.data.datasets.base import grouped
from samecurve.data.datasets.preference import AnswerRows
from samecurve.data.micro_batch import MicroBatch
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import NumericError, StorageError
from samecurve.interfaces.task import InitialState
from samecurve.tasks import reference_logprobs

PAIRS = [([1, 2, 3 + n], [1, 2, 40 + n, 5]) for n in range(11)]
MODEL = "a model"


class Ranks:
    """Stands for an engine of `size` ranks. The value of an answer is its first trained token."""

    def __init__(self, rows: AnswerRows, size: int, rank: int = 0, factor: float = 1.0):
        self.rows, self.shard, self.factor, self.calls = rows, (rank, size), factor, 0

    def features(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        self.calls += 1
        return torch.cat([self._of(other, micro_batches) for other in range(self.shard[1])])

    def _of(self, other: int, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """What another rank would have found, from that rank's own batches at the same places."""
        own, theirs = (EvaluationBatches(self.rows, 2, (rank, self.shard[1])) for rank in (self.shard[0], other))
        places = [
            next(i for i in range(len(own)) if torch.equal(own[i].labels, batch.labels)) for batch in micro_batches
        ]
        return torch.cat([self._values(theirs[place]) for place in places])

    def _values(self, batch: MicroBatch) -> torch.Tensor:
        return self.factor * batch.labels.max(dim=-1).values.view(-1, 2).float()


def give(rows, engine, cache, model=MODEL, precision="fp32"):
    batch = SimpleNamespace(micro_batch_size=2)
    recipe = SimpleNamespace(data=SimpleNamespace(cache_dir=str(cache)), precision=precision, batch=batch)
    start = InitialState(engine, recipe, None, ControlGroup(), lambda: None)
    reference_logprobs.provide_reference(rows, "training pairs", start, model)
    return np.asarray(rows.reference)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pair_has_its_own_whatever_the_number_of_ranks(size, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_logprobs, "_MICRO_BATCHES", 2)  # at a time, so that several are put together
    rows = AnswerRows(stream(*PAIRS), 8, 0)
    found = give(rows, Ranks(rows, size), tmp_path)
    assert found.dtype == np.float32 and found.tolist() == [[3 + n, 40 + n] for n in range(11)]
    assert rows[np.array([4, 2])].targets["reference"].tolist() == [[7, 44], [5, 42]]


def test_they_are_found_again_unless_model_rows_or_precision_are_others(tmp_path):
    def calls(rows, **changes) -> int:
        engine = Ranks(rows, 1)
        give(rows, engine, tmp_path, **changes)
        return engine.calls

    assert calls(AnswerRows(stream(*PAIRS), 8, 0)) == 1
    assert calls(AnswerRows(stream(*PAIRS), 8, 0)) == 0
    assert calls(AnswerRows(stream(*PAIRS), 8, 0), model="another one") == 1
    assert calls(AnswerRows(stream(*PAIRS), 8, 0), precision="bf16") == 1
    assert calls(AnswerRows(stream(*PAIRS), 16, 0)) == 1
    assert calls(grouped(AnswerRows)(stream(*PAIRS), 8, 0, global_batch_size=2)) == 1


def test_the_rows_are_the_same_data_with_and_without_them(tmp_path):
    rows = AnswerRows(stream(*PAIRS), 8, 0)
    before = rows.fingerprint
    give(rows, Ranks(rows, 1), tmp_path)
    assert rows.fingerprint == before


def test_what_is_not_finite_is_told_and_not_kept(tmp_path):
    rows = AnswerRows(stream(*PAIRS), 8, 0)
    with pytest.raises(NumericError, match="the log-probabilities of 11 of 11 training pairs are not finite"):
        give(rows, Ranks(rows, 1, factor=float("inf")), tmp_path)
    assert not list(tmp_path.glob("references/*"))


@pytest.mark.parametrize(
    ("name", "damage"), [*(("log_probabilities.npy", damage) for damage in DAMAGES), ("files.json", "cut")]
)
def test_a_damaged_file_is_computed_again(name, damage, tmp_path, capsys):
    rows = AnswerRows(stream(*PAIRS), 8, 0)
    expected = give(rows, Ranks(rows, 1), tmp_path).tolist()
    (file,) = tmp_path.glob(f"references/*/{name}")
    assert DAMAGES[damage](file)
    rows = AnswerRows(stream(*PAIRS), 8, 0)  # the others map the damaged file
    engine = Ranks(rows, 1)
    assert give(rows, engine, tmp_path).tolist() == expected
    assert engine.calls == 1
    assert f"{file.parent}: {name} " in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "references").write_text("a file where the folder would be")
    rows = AnswerRows(stream(*PAIRS), 8, 0)
    with pytest.raises(StorageError, match="the cache could not be written"):
        give(rows, Ranks(rows, 1), tmp_path)
