from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_templates import tokenizer_of
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from samecurve.config.schema import Batch
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.data.datasets.base import DocumentRows, PackedRows, Rows, causal_arrays
from samecurve.data.micro_batch import MicroBatch
from samecurve.data.schemas.classification import Example, ExampleEncoder, WholeTextEncoder
from samecurve.data.schemas.retrieval import Match, MatchEncoder
from samecurve.data.token_store import DocumentEncoder, TokenStream
from samecurve.data.tokenizer import BEGIN_OF_TEXT, BEGIN_OF_TURN, END_OF_TEXT, END_OF_TURN
from samecurve.losses.cross_entropy import IGNORE_INDEX

X = IGNORE_INDEX
PAD = 99


def stream(*documents: list[int]) -> TokenStream:
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    return TokenStream(tokens, np.cumsum([0, *map(len, documents)]), fingerprint="x")


def random_stream(num_documents: int, longest: int, vocabulary: int = 50, seed: int = 0) -> TokenStream:
    rng = np.random.default_rng(seed)
    return stream(*[rng.integers(0, vocabulary, rng.integers(2, longest + 1)).tolist() for _ in range(num_documents)])


def all_rows(rows):
    return rows[np.arange(len(rows))]


def in_order(arrays):
    return arrays.inputs["input_ids"], arrays.inputs["position_ids"], arrays.labels


def test_packed_rows_by_hand():
    rows = PackedRows(stream([1, 2, 3], [4, 5], [6, 7, 8, 9]), sequence_length=5, padding_token=PAD)
    input_ids, position_ids, labels = in_order(all_rows(rows))
    assert len(rows) == 2
    assert input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, PAD]]
    assert position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert labels.tolist() == [[2, 3, X, 5, X], [7, 8, 9, X, X]]
    assert rows.num_targets == 6
    assert all(array.dtype == np.int64 for array in (input_ids, position_ids, labels))


def test_packed_rows_that_cut_a_document():
    rows = PackedRows(stream([1, 2, 3, 4, 5, 6, 7], [8, 9]), sequence_length=3, padding_token=PAD)
    input_ids, position_ids, labels = in_order(all_rows(rows))
    assert input_ids.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert position_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 1]]
    assert labels.tolist() == [[2, 3, 4], [5, 6, 7], [X, 9, X]]


def test_document_rows_by_hand():
    rows = DocumentRows(stream([1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11, 12, 13, 14]), 3, padding_token=PAD)
    input_ids, position_ids, labels = in_order(all_rows(rows))
    assert input_ids.tolist() == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]
    assert position_ids.tolist() == [[0, 1, 2]] * 3
    assert labels.tolist() == [[2, 3, X], [6, 7, 8], [10, 11, 12]]
    assert (rows.num_dropped, rows.num_truncated, rows.num_targets) == (1, 1, 8)


def test_document_rows_are_padded():
    input_ids, _, labels = in_order(all_rows(DocumentRows(stream([1, 2]), 4, padding_token=PAD)))
    assert input_ids.tolist() == [[1, 2, PAD, PAD]]
    assert labels.tolist() == [[2, X, X, X]]


@pytest.mark.parametrize("sequence_length", [2, 3, 8, 31, 500])
def test_packing_makes_every_token_a_target_once_but_the_first_of_each_document(sequence_length):
    documents = random_stream(40, longest=25, vocabulary=1000)
    rows = PackedRows(documents, sequence_length, PAD)
    labels = all_rows(rows).labels
    expected = np.delete(documents.tokens, documents.offsets[:-1])
    assert labels[labels != X].tolist() == expected.tolist()
    assert rows.num_targets == len(expected)


def test_num_targets_is_what_the_rows_hold():
    rows = DocumentRows(random_stream(30, longest=20), 11, PAD)
    assert rows.num_targets == (all_rows(rows).labels != X).sum()


@pytest.mark.parametrize("rows_class", [PackedRows, DocumentRows])
def test_target_bytes_counts_the_targets_text(rows_class):
    rows = rows_class(stream([1, 2, 3], [4, 2, 0]), 5, PAD)
    assert rows.target_bytes(np.array([0, 1, 10, 100, 1000])) == (10 + 100) + (10 + 0)


def test_fingerprint_tells_rows_apart():
    documents = random_stream(3, 9)
    rows = [PackedRows(documents, 4, PAD), PackedRows(documents, 5, PAD), DocumentRows(documents, 4, PAD)]
    assert len({r.fingerprint for r in rows}) == 3
    assert PackedRows(documents, 4, PAD).fingerprint == rows[0].fingerprint


def tiny_model(family: str, attention: str) -> torch.nn.Module:
    sizes = {"vocab_size": 100, "initializer_range": 0.5}
    config = {
        "llama": LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        ),
        "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **sizes),
    }[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_documents_of_a_packed_row_do_not_see_each_other(family, attention):
    model = tiny_model(family, attention)
    documents = [[3, 14, 15, 92], [6, 5], [35, 89, 79, 32, 38, 46], [26, 43]]
    rows = all_rows(PackedRows(stream(*documents), 17, PAD))
    input_ids, position_ids, _ = map(torch.from_numpy, in_order(rows))
    packed = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[0]
    start = 0
    for document in documents:
        alone = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
        torch.testing.assert_close(packed[start : start + len(document)], alone, rtol=1e-5, atol=1e-5)
        start += len(document)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_padding_changes_no_trained_logit(family):
    model = tiny_model(family, "sdpa")
    first, second = (all_rows(DocumentRows(stream([1, 2, 3, 4]), 9, token)) for token in (5, 77))
    logits = [
        model(
            input_ids=torch.from_numpy(rows.inputs["input_ids"]),
            position_ids=torch.from_numpy(rows.inputs["position_ids"]),
            use_cache=False,
        ).logits[0, :4]
        for rows in (first, second)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def batch(global_batch_size: int = 8, micro_batch_size: int = 1) -> Batch:
    return Batch(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, sequence_length=6)


NOTHING = (X,) * 6  # labels of a row that trains nothing


def step_content(rows, world: int, micro: int, step: int) -> Counter:
    """The multiset of rows that all ranks together read in a step."""
    shards = [StepBatches(rows, 3, batch(8, micro), (rank, world), 9).at(step) for rank in range(world)]
    sizes = batch(8, micro).micro_batches(world)
    assert [[len(m.labels) for m in shard] for shard in shards] == [[max(n, 1) for n in share] for share in sizes]
    assert {m.inputs["input_ids"].shape[1] for shard in shards for m in shard} == {6}
    found = Counter(tuple(row.tolist()) for shard in shards for m in shard for row in m.labels)
    untrained = sum(share.count(0) for share in sizes)
    assert found[NOTHING] >= untrained
    return found - Counter({NOTHING: untrained})


@pytest.mark.parametrize("rows_class", [PackedRows, DocumentRows])
def test_a_step_reads_the_same_rows_under_any_shard_and_micro_batch(rows_class):
    rows = rows_class(random_stream(23, longest=12), 6, PAD)
    for step in (0, 2, 7):  # 23 documents: step 2 lies across the end of the first epoch of DocumentRows.
        reference = step_content(rows, 1, 8, step)
        assert reference.total() == 8
        even = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
        for world, micro in [*even, (1, 3), (2, 3), (3, 1), (3, 2), (5, 1), (7, 4), (11, 1)]:
            assert step_content(rows, world, micro, step) == reference


def test_an_epoch_reads_every_row_once():
    rows = DocumentRows(random_stream(24, longest=12, vocabulary=1000), 6, PAD)
    read = [m.inputs["input_ids"] for step in range(3) for m in StepBatches(rows, 0, batch(), (0, 1), 3).at(step)]
    assert sorted(torch.cat(read).tolist()) == sorted(all_rows(rows).inputs["input_ids"].tolist())


def test_iteration_is_the_pure_function_and_counts():
    rows = DocumentRows(random_stream(16, longest=12), 6, PAD)
    batches = StepBatches(rows, 1, batch(8, 4), (0, 1), num_steps=5, start_step=2)
    assert (batches.samples, batches.epoch) == (16, 1.0)
    seen = []
    for micro_batches in batches:
        expected = batches.at(batches.step - 1)
        assert all(torch.equal(m.labels, e.labels) for m, e in zip(micro_batches, expected, strict=True))
        assert batches.last_wait_seconds > 0
        seen.append((batches.step, batches.samples, batches.epoch))
    assert seen == [(3, 24, 1.5), (4, 32, 2.0), (5, 40, 2.5)]


def test_iteration_can_be_left_and_taken_up_again():
    rows = DocumentRows(random_stream(16, longest=12), 6, PAD)
    batches = StepBatches(rows, 1, batch(), (0, 1), num_steps=4)
    next(iter(batches))
    assert len(list(batches)) == 3


def test_an_error_of_the_reading_thread_reaches_the_loop():
    class Broken(DocumentRows):
        def __getitem__(self, indices):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(StepBatches(Broken(random_stream(16, 12), 6, PAD), 1, batch(), (0, 1), num_steps=4)))


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2), (8, 1), (16, 2)])
def test_evaluation_reads_every_row_once_and_equally_often_on_each_shard(world, micro):
    rows = DocumentRows(random_stream(13, longest=12, vocabulary=1000), 6, PAD)
    shards = [EvaluationBatches(rows, micro, (rank, world)) for rank in range(world)]
    size = min(micro, -(-13 // world))  # not more than a rank's share
    assert {len(shard) for shard in shards} == {-(-13 // (world * size))}
    assert {m.labels.shape for shard in shards for m in shard} == {(size, 6)}
    labels = torch.cat([m.labels for shard in shards for m in shard])
    assert labels[(labels != X).any(dim=1)].tolist() == all_rows(rows).labels.tolist()


def test_going_on_looks_at_nothing_before_it():
    """A billion rows and a position in the middle cost what a thousand cost: only the step's own rows are asked for."""

    class Counted(Rows):
        num_targets = num_inputs = None

        def __init__(self, num_rows):
            self.num_rows, self.asked, self.sequence_length = num_rows, [], 4

        def __len__(self):
            return self.num_rows

        def __getitem__(self, indices):
            self.asked += indices.tolist()
            return causal_arrays(*np.zeros((3, len(indices), 4), dtype=np.int64))

    batch = Batch(global_batch_size=8, micro_batch_size=2, sequence_length=4)
    for num_rows in (10**3, 10**9):
        rows = Counted(num_rows)
        step = num_rows // 16
        batches = StepBatches(rows, 0, batch, (1, 2), step + 1, start_step=step)
        (micro_batches,) = batches
        assert len(micro_batches) == 2 and len(rows.asked) == 4 and len(set(rows.asked)) == 4
        assert rows.asked == batches.rows_of(step)[4:].tolist()
        assert max(rows.asked) > num_rows // 8


def test_another_batch_size_goes_on_at_the_same_row():
    rows = DocumentRows(random_stream(90, 6), 4, PAD)
    small, large = (Batch(global_batch_size=size, micro_batch_size=1, sequence_length=4) for size in (4, 6))
    before = StepBatches(rows, 0, small, (0, 1), 5)
    after = StepBatches(rows, 0, large, (0, 1), 9, start_step=5, start_samples=20)
    read = [row for step in range(5) for row in before.rows_of(step)]
    read += [row for step in range(5, 9) for row in after.rows_of(step)]
    whole = StepBatches(rows, 0, Batch(global_batch_size=44, micro_batch_size=1, sequence_length=4), (0, 1), 1)
    assert read == whole.rows_of(0).tolist()
    assert after.samples == 20


def test_a_row_of_several_sequences_stays_whole():
    """Row i holds the sequences 10 i and 10 i + 1; one more than fits into two micro-batches."""

    class Two(DocumentRows):
        def __len__(self):
            return 3

        def __getitem__(self, indices):
            sequences = (10 * np.asarray(indices)[:, None, None] + np.arange(2)[:, None]).repeat(6, axis=2)
            found = causal_arrays(sequences, sequences, sequences)
            return replace(found, targets=found.targets | {"weights": np.asarray(indices)})

    rows = Two(random_stream(3, 6), 6, PAD)
    batches = EvaluationBatches(rows, 2, (0, 1))
    assert {m.inputs["input_ids"].shape for m in batches} == {(4, 6)}
    assert [m.inputs["input_ids"][:, 0].tolist() for m in batches] == [[0, 1, 10, 11], [20, 21, 0, 1]]
    assert [m.labels[:, 0].tolist() for m in batches] == [[0, 1, 10, 11], [20, 21, X, X]]
    assert [m.targets["weights"].tolist() for m in batches] == [[0, 1], [2, 0]]
    (whole,) = StepBatches(rows, 0, batch(2, 2), (0, 1), 1).at(0)
    shards = [m for rank in range(2) for m in StepBatches(rows, 0, batch(2, 1), (rank, 2), 1).at(0)]
    assert [m.labels.shape for m in shards] == [(2, 6)] * 2
    assert torch.equal(torch.cat([m.labels for m in shards]), whole.labels)


def test_padding_rows_train_nothing():
    """A row of two sequences has two lines in the model's input and one value in a target of each row."""
    tokens, labels, of_rows = torch.arange(12).reshape(4, 3), torch.ones(4, 3, dtype=torch.long), torch.tensor([5, 6])
    found = MicroBatch({"input_ids": tokens}, {"labels": labels, "margin": of_rows}).padded(2, 3)
    assert found.inputs["input_ids"].tolist() == [*tokens.tolist(), *tokens[:2].tolist()]
    assert found.labels.tolist() == [[1] * 3] * 4 + [[X] * 3] * 2
    assert found.targets["margin"].tolist() == [5, 6, 5]


def test_a_gpu_gets_what_it_can_copy_by_itself(monkeypatch):
    """Pinned before it is handed out, by a thread here or by PyTorch's loader, and copied while the device computes."""
    pinned, copied, loaders = [], [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr("samecurve.data.batches.DataLoader", lambda *_, **options: loaders.append(options) or [whole])
    monkeypatch.setattr("samecurve.data.batches._MultiProcessingDataLoaderIter", iter)
    rows = DocumentRows(random_stream(16, longest=12), 6, PAD)
    ((whole,),) = StepBatches(rows, 1, batch(8, 8), (0, 1), num_steps=1)
    tensors = [*whole.inputs.values(), *whole.targets.values()]
    assert {tensor.data_ptr() for tensor in tensors} == {tensor.data_ptr() for tensor in pinned}
    assert len(list(StepBatches(rows, 1, batch(), (0, 1), num_steps=1, num_workers=1))) == 1
    assert [options["pin_memory"] for options in loaders] == [True]
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: copied.append((device, how)) or tensor)
    whole.to("cuda")
    assert copied == [("cuda", {"non_blocking": True})] * len(tensors)


def test_texts_with_special_tokens_are_counted():
    """They are encoded as text, and transformers' pipelines would read them as tokens."""
    one = tokenizer_of(None, BEGIN_OF_TEXT, END_OF_TEXT, None, BEGIN_OF_TURN, END_OF_TURN)
    texts = ["plain", f"rendered {BEGIN_OF_TURN}user", f"{END_OF_TURN}{END_OF_TURN}"]
    examples = [Example("a:1", text, None, "x") for text in texts]
    for encoder, documents in (
        (DocumentEncoder(one), texts),
        (WholeTextEncoder(one), texts),
        (ExampleEncoder(one, 64, ("x",), False), examples),
        (MatchEncoder(one, 64), [Match("a:1", ("plain", text)) for text in texts]),
    ):
        found = encoder.encode(documents)
        assert encoder.counts["documents_with_special_tokens"] == 2, encoder
        assert all(one.convert_tokens_to_ids(END_OF_TURN) not in list(document.tokens) for document in found)
