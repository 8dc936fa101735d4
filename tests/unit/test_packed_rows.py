"""Rows of whole samples with marks of what is trained. Rows without marks: test_data.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_data import all_rows, in_order
from tiny_families import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from samecurve.config.schema import Adapter, Batch
from samecurve.data.batches import StepBatches
from samecurve.data.datasets.base import DocumentRows, PackedRows, Rows, grouped
from samecurve.data.datasets.mixture import MixedRows
from samecurve.data.datasets.packed_samples import PackedSampleRows, best_fit_decreasing
from samecurve.data.datasets.preference import AnswerRows, JudgedRows, ScoredRows
from samecurve.data.datasets.retrieval import RetrievalRows
from samecurve.data.datasets.streaming import MixedStreams, StreamRows
from samecurve.data.datasets.text import LabelledRows, MaskedRows, Masking, TaggedRows
from samecurve.data.micro_batch import MicroBatch
from samecurve.data.token_store import TokenStream
from samecurve.engines.forward import gaps_of
from samecurve.errors import ConfigurationError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models import lora, packed_rows
from samecurve.models.attention import mask_facts, varlen
from samecurve.models.packed_rows import check_packing
from samecurve.specs.model_families import families

X = IGNORE_INDEX
PAD = 99


def stream(*samples: list[int], trained: str | None = None) -> TokenStream:
    """trained: a 1 or 0 for each token; white space is skipped."""
    tokens = np.array([token for sample in samples for token in sample], dtype=np.uint16)
    marks = None if trained is None else np.array([int(mark) for mark in trained if mark != " "], dtype=np.uint8)
    assert marks is None or len(marks) == len(tokens)
    return TokenStream(tokens, np.cumsum([0, *map(len, samples)]), "x", marks)


def random_stream(num_samples: int, longest: int, seed: int = 0) -> TokenStream:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_samples)
    marks = (rng.random(lengths.sum()) < 0.4).astype(np.uint8)
    tokens = rng.integers(0, 1000, lengths.sum()).astype(np.uint16)
    return TokenStream(tokens, np.cumsum([0, *lengths]), "x", marks)


def test_packed_samples_by_hand():
    samples = stream([1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13], trained="001 01011 01 000")
    rows = PackedSampleRows(samples, 6, PAD)
    input_ids, position_ids, labels = in_order(all_rows(rows))
    # 4 places of the second sample and 2 of the first; the third does not fit any more; the last trains nothing
    assert input_ids.tolist() == [[4, 5, 6, 7, 1, 2], [9, PAD, PAD, PAD, PAD, PAD]]
    assert position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert labels.tolist() == [[5, X, 7, 8, X, 3], [10, X, X, X, X, X]]
    assert (rows.num_targets, rows.num_dropped, rows.num_truncated) == (5, 1, 0)
    assert all(array.dtype == np.int64 for array in (input_ids, position_ids, labels))


@pytest.mark.parametrize("rows_class", [PackedSampleRows, DocumentRows])
@pytest.mark.parametrize(
    ("truncation", "kept", "labels", "counts"),
    [
        ("right", [[1, 2, 3], [11, 12, 13]], [3, 4, 8, 14], (2, 3, 1)),
        ("left", [[3, 4, 5], [12, 13, 14]], [4, 6, 8, 14, 15], (2, 3, 1)),  # TRL's keep_end: tokens[-4:]
        ("drop", [], [8], (0, 0, 3)),
        ("error", [[1, 2, 3], [11, 12, 13]], [3, 4, 8, 14], (2, 3, 1)),
    ],
)
def test_each_truncation_by_hand(rows_class, truncation, kept, labels, counts):
    """Rows of 3 places, so 4 tokens: 2 and 1 tokens too many; [9, 10] trains nothing."""
    samples = stream([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15], [7, 8], [9, 10], trained="001101 00011 01 00")
    rows = rows_class(samples, 3, PAD, truncation)
    input_ids, _, found = in_order(all_rows(rows))
    assert sorted(row for row in input_ids.tolist() if row[0] != 7) == kept
    assert sorted(found[found != X].tolist()) == labels
    assert (rows.num_truncated, rows.num_truncated_tokens, rows.num_dropped) == counts
    assert rows.too_long.tolist() == [0, 1]
    same = rows.fingerprint == rows_class(samples, 3, PAD).fingerprint
    assert same is (truncation in ("right", "error"))


@pytest.mark.parametrize("rows_class", [PackedSampleRows, DocumentRows])
@pytest.mark.parametrize("sequence_length", [3, 17, 40])
def test_every_marked_token_that_fits_is_a_target_once(rows_class, sequence_length):
    samples = random_stream(200, longest=30)
    expected = []
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        places = np.arange(start + 1, min(end, start + 1 + sequence_length))
        expected += samples.tokens[places][samples.trained[places] > 0].tolist()
    rows = rows_class(samples, sequence_length, PAD)
    labels = all_rows(rows).labels
    assert sorted(labels[labels != X].tolist()) == sorted(expected)
    assert rows.num_targets == len(expected) > 100


def test_no_sample_is_cut_in_two_and_every_one_begins_at_position_0():
    samples = random_stream(200, longest=30)
    rows = PackedSampleRows(samples, 40, PAD)
    input_ids, position_ids, _ = in_order(all_rows(rows))
    found = []
    for ids, positions, index in zip(input_ids, position_ids, range(len(rows)), strict=True):
        starts = np.flatnonzero(positions == 0)
        used = rows.sizes[rows.members[rows.row_offsets[index] : rows.row_offsets[index + 1]]]
        assert np.diff(starts).tolist() == used[:-1].tolist()
        found += [ids[start : start + size].tolist() for start, size in zip(starts, used, strict=True)]
    ends = zip(samples.offsets[:-1], samples.offsets[1:], strict=True)
    whole = [samples.tokens[a : b - 1].tolist() for a, b in ends if samples.trained[a + 1 : b].any()]
    assert sorted(found) == sorted(whole)


def test_packing_by_hand():
    # 7 opens a bin, 5 another; 4 does not fit to 7, but to 5; 3 fits to 7 exactly; 2 opens a third
    members, offsets = best_fit_decreasing(np.array([3, 4, 7, 2, 5]), 10)
    assert [part.tolist() for part in np.split(members, offsets[1:-1])] == [[2, 0], [4, 1], [3]]


@pytest.mark.parametrize("seed", range(3))
def test_packing_holds_every_item_once_in_few_bins(seed):
    sizes = np.random.default_rng(seed).integers(1, 65, 500)
    members, offsets = best_fit_decreasing(sizes, 64)
    assert sorted(members.tolist()) == list(range(500))
    loads = np.add.reduceat(sizes[members], offsets[:-1])
    assert loads.max() <= 64
    assert len(loads) <= -(-11 * sizes.sum() // (9 * 64)) + 1


def test_grouped_rows_are_of_like_length_in_steps_of_any_order():
    rows = grouped(DocumentRows)(random_stream(1000, longest=300), 256, PAD, global_batch_size=4)
    positions = np.arange(2 * len(rows) - 2 * len(rows) % 4)
    read = rows.at_positions(positions, seed=3)
    assert read[40:48].tolist() == rows.at_positions(np.arange(40, 48), seed=3).tolist()
    steps = rows.sizes[read].reshape(-1, 4)
    plain = rows.sizes[DocumentRows.at_positions(rows, positions, 3)].reshape(-1, 4)
    assert np.ptp(steps, axis=1).mean() < np.ptp(plain, axis=1).mean() / 10
    order = steps.mean(axis=1)[:32]
    assert (np.diff(order) > 0).sum() < 25  # the steps of a group are not in the order of their lengths


def test_the_longest_batch_has_the_longest_rows_of_all():
    rows = grouped(DocumentRows)(random_stream(200, longest=600), 512, PAD, global_batch_size=6)
    batch = Batch(global_batch_size=6, micro_batch_size=2, sequence_length=512)
    found = [StepBatches(rows, 0, batch, (rank, 2), 30).longest() for rank in range(2)]
    assert [part.labels.shape for part in found[0]] == [(2, 512), (1, 512)]
    read = np.concatenate([part.inputs["input_ids"].numpy() for parts in found for part in parts])
    by_length = sorted(range(len(rows)), key=lambda row: -rows.sizes[row])
    assert (read == rows[np.array(by_length[:6])].inputs["input_ids"]).all()


def test_grouped_rows_lose_nothing_but_padding():
    samples = random_stream(64, longest=420)
    rows = grouped(DocumentRows)(samples, 400, PAD, global_batch_size=4)
    batch = Batch(global_batch_size=4, micro_batch_size=1, sequence_length=400)
    shards = [StepBatches(rows, 0, batch, (rank, 2), 15) for rank in range(2)]
    widths, trained = set(), 0
    for step in range(len(rows) // 4):
        micro_batches = [micro for shard in shards for micro in shard.at(step)]
        together = rows.width(shards[0].rows_of(step))
        assert {(micro.inputs["input_ids"].shape, micro.width) for micro in micro_batches} == {
            ((1, together), together)
        }
        trained += sum(int((micro.labels != X).sum()) for micro in micro_batches)
        widths.add(together)
    assert widths <= {128, 256, 384, 400} and len(widths) > 2  # none is 64 modulo 128, see models/attention/cudnn.py
    expected = sum(int((rows[shards[0].rows_of(step)].labels != X).sum()) for step in range(len(rows) // 4))
    assert trained == expected > 0
    assert rows.fingerprint != grouped(DocumentRows)(samples, 400, PAD, global_batch_size=8).fingerprint


def test_inputs_are_counted_whether_they_are_trained_or_not():
    samples = stream([1, 2, 3], [4, 5, 6, 7, 8], [9, 10], trained="001 01011 01")
    assert PackedSampleRows(samples, 6, PAD).num_inputs(np.array([0, 1])) == 7
    assert PackedSampleRows(samples, 6, PAD).num_inputs(np.array([1])) == 1
    assert DocumentRows(samples, 3, PAD).num_inputs(np.array([1, 2])) == 3 + 1
    assert PackedRows(samples, 6, PAD).num_inputs(np.array([0, 1])) == 10


EAGER_ONLY = {"codegen", "flint", "gemma2", "gpt_neox_japanese", "gptj", "gpt_neo", "granite_swa", "granitemoe_swa"}
EAGER_ONLY |= {"gpt_oss", "mimo_v2_flash", "vaultgemma"}
PACKS = families("packed") | families("separated")
RECURRENT = ["falcon_mamba", "jamba", "mamba", "mamba2", "minimax", "recurrent_gemma"]
SAMPLES = [[3, 14, 15, 92, 4, 8, 7, 6, 5, 1], [6, 5, 9], [35, 89, 79, 32, 38, 46], [26, 43], [7, 1, 2, 3, 4, 5, 6, 7]]


# flex_attention is compiled for each shape, which takes a CPU up to a minute
CASES = [(family, "eager") for family in sorted(PACKS)]
CASES += [(family, "sdpa") for family in sorted(PACKS - EAGER_ONLY)]
CASES += [(family, varlen.NAME) for family in sorted(families("varlen"))]
FLEX = [pytest.param(name, "flex_attention", marks=pytest.mark.full) for name in ("llama", "qwen2")]


@pytest.mark.parametrize(("family", "attention"), CASES + FLEX)
def test_samples_of_a_packed_row_do_not_see_each_other(family, attention):
    """Two rows in one micro-batch: their samples begin at different places, and one is padded."""
    assert largest_difference(family, attention) < 1e-4


@pytest.mark.parametrize("family", ["opt", "bloom", "falcon"])
def test_families_that_would_leak_are_refused(family):
    """When this fails because transformers has changed, the family may be packed too."""
    assert largest_difference(family, "eager") > 0.1
    with pytest.raises(ConfigurationError, match=f"a {family} mixes packed documents"):
        check_packing(tiny_config(family), True, 16, [])
    check_packing(tiny_config(family), False, 16)


def test_hybrids_are_packed_with_tested_transformers_only(monkeypatch):
    monkeypatch.setattr(packed_rows, "version", lambda name: "5.22.1")
    check_packing(tiny_config("llama"), True, 16)
    with pytest.raises(ConfigurationError, match=r"a qwen3_next are kept .* 5.23 and later, and 5.22.1 is installed"):
        check_packing(tiny_config("qwen3_next"), True, 16)


def test_an_unlisted_family_is_packed_if_unproven():
    config, uses = SimpleNamespace(model_type="foo"), []
    with pytest.raises(ConfigurationError, match=r"a foo is not known to keep .* model\.unproven: true"):
        check_packing(config, True, 16)  # pyright: ignore
    check_packing(config, True, 16, uses)  # pyright: ignore
    assert uses == ["packed rows of a foo; run `python -m samecurve inspect RECIPE --leak_test`"]


@pytest.mark.parametrize("family", [*sorted(families("separated")), *RECURRENT])
def test_padding_does_not_change_a_hybrid(family):
    """Padding on the right, as rows of one document have: hybrids that are not packed are trained so."""
    model, longest = decisive_model(family, "eager").eval(), max(map(len, SAMPLES)) + 3
    ids = torch.tensor([sample + [PAD] * (longest - len(sample)) for sample in SAMPLES])
    with torch.no_grad():
        padded = model(input_ids=ids, position_ids=torch.arange(longest).expand_as(ids), use_cache=False).logits
        for sample, logits in zip(SAMPLES, padded, strict=True):
            alone = model(input_ids=torch.tensor([sample]), use_cache=False).logits[0]
            torch.testing.assert_close(logits[: len(sample)], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["bamba", "bailing_hybrid", "gpt_oss", "lfm2", "qwen3_next"])
def test_gradients_of_separated_documents(family):
    """Of one convolution, each recurrence, and masks made without position_ids."""
    model = decisive_model(family, "eager").train()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def gradients(logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = sum(part.square().sum() for part in logits)
        return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True))

    packed, alone = map(gradients, zip(*documents(model), strict=True))
    for name, gradient in alone.items():
        if gradient is not None:
            assert (packed[name] - gradient).norm() <= 3e-4 * gradient.norm(), name


@pytest.mark.parametrize("family", sorted(families("separated")))
def test_separated_families_leak_by_themselves(family, monkeypatch):
    """When this fails because transformers has changed, the family may do without models/packed_rows.py."""
    monkeypatch.setattr(packed_rows, "install", lambda model: False)
    monkeypatch.setattr(mask_facts, "known", mask_facts.MaskFacts)
    assert largest_difference(family, "eager") > 0.1


def test_gaps_by_hand():
    """Documents of 3 and 60 tokens, and one of 63: 60 + 7 need two chunks."""
    gaps = packed_rows.Gaps.of(torch.tensor([0, 3, 63, 126]), torch.Size((2, 63)))
    assert gaps.length == 64 + 128
    assert gaps.places[0].tolist() == [*range(3), *range(64, 124)] and gaps.places[1].tolist() == [*range(63)]
    tokens = torch.arange(2.0 * 63 * 5).view(2, 63, 5)
    assert gaps.collect(gaps.spread(tokens, -1.0)).equal(tokens)
    assert (gaps.spread(tokens, -1.0) == -1).sum() == 2 * (192 - 63) * 5


@torch.no_grad()
def largest_difference(family: str, attention: str) -> float:
    """Between the logits of packed samples and the same samples alone."""
    pairs = list(documents(decisive_model(family, attention).eval()))
    assert len(pairs) == 5 and all(packed.isfinite().all() for packed, _ in pairs)
    return max(float((packed - alone).abs().max()) for packed, alone in pairs)


def decisive_model(family: str, attention: str) -> PreTrainedModel:
    """With weights that are large enough for a leak to show."""
    torch.manual_seed(0)
    config = tiny_config(family, initializer_range=0.5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, weight in model.named_parameters():
        if "conv" in name or name.endswith("dt_bias"):
            torch.nn.init.normal_(weight, std=0.5)
    return model


def documents(model: PreTrainedModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each sample's logits, (tokens, vocabulary_size), in its packed row and alone."""
    rows = PackedSampleRows(stream(*SAMPLES), 16, PAD)
    input_ids, position_ids, _ = map(torch.from_numpy, in_order(all_rows(rows)))
    inputs = {"input_ids": input_ids, "position_ids": position_ids}
    more = gaps_of(MicroBatch(inputs, {})) if packed_rows.install(model) else {}
    with mask_facts.masks_from(mask_facts.MaskFacts(positions=position_ids)):
        packed = model(**inputs, **more, use_cache=False).logits
    assert len(rows) == 2
    for row in range(len(rows)):
        place = 0
        for member in rows.members[rows.row_offsets[row] : rows.row_offsets[row + 1]]:
            sample = SAMPLES[member][:-1]
            alone = model(input_ids=torch.tensor([sample]), use_cache=False).logits[0]
            yield packed[row, place : place + len(sample)], alone
            place += len(sample)


def test_an_adapted_output_projection_is_computed_by_itself(monkeypatch):
    """The kernel that includes it, on a GPU, would take the weight below the adapter."""
    from transformers.models.bamba import modeling_bamba

    kernel = "mamba2_split_conv1d_scan_combined"
    monkeypatch.setattr(modeling_bamba, kernel, lambda *args, **kwargs: "the kernel's", raising=False)
    model = AutoModelForCausalLM.from_config(tiny_config("bamba"))
    packed_rows.install(model)
    assert getattr(modeling_bamba, kernel)() == "the kernel's"
    lora.inject(model, Adapter(name="lora", rank=2))
    packed_rows.install(model)
    assert getattr(modeling_bamba, kernel)() is None


# A property of every kind of rows in every world: what each step reads, taken from what its ranks read.


def labelled_stream(num_rows: int, segments: str = "none") -> TokenStream:
    """Documents that differ in their first token. segments: two of each ("pair"), or as many as texts of a row."""
    rng = np.random.default_rng(num_rows)
    lengths = rng.integers(4, 40, num_rows)
    offsets = np.cumsum([0, *lengths])
    tokens = rng.integers(0, 60_000, offsets[-1]).astype(np.uint16)
    tokens[offsets[:-1]] = np.arange(num_rows)
    marks = np.ones(offsets[-1], dtype=np.uint8)
    second = np.zeros(offsets[-1], dtype=np.uint8)
    for start, length in zip(offsets[:-1], lengths, strict=True):
        second[start + length // 2 : start + length] = segments == "pair"
    return TokenStream(tokens, offsets, "x", marks, second, np.zeros(num_rows, dtype=np.uint8))


def tagged_stream(num_rows: int) -> TokenStream:
    labelled = labelled_stream(num_rows)
    return replace(labelled, tags=np.zeros(len(labelled.tokens), dtype=np.int16))


MASKING = Masking(mask_token=1, vocabulary_size=100, special=(), rate=0.0)
KINDS = {
    "packed": lambda n, size: PackedRows(stream([*range(3 * n + 1)]), 3, PAD),
    "packed documents": lambda n, size: PackedSampleRows(stream(*([i, i, i, i, i] for i in range(n))), 4, PAD),
    "documents": lambda n, size: DocumentRows(labelled_stream(n), 64, PAD),
    "grouped documents": lambda n, size: grouped(DocumentRows)(labelled_stream(n), 64, PAD, global_batch_size=size),
    "labelled": lambda n, size: LabelledRows(labelled_stream(n), 64, PAD),
    "grouped labelled": lambda n, size: grouped(LabelledRows)(labelled_stream(n), 64, PAD, global_batch_size=size),
    "masked": lambda n, size: MaskedRows(labelled_stream(n), 64, PAD, MASKING),
    "grouped masked": lambda n, size: grouped(MaskedRows)(labelled_stream(n), 64, PAD, MASKING, global_batch_size=size),
    "answers": lambda n, size: AnswerRows(labelled_stream(n, "pair"), 64, PAD),
    "grouped answers": lambda n, size: grouped(AnswerRows)(labelled_stream(n, "pair"), 64, PAD, global_batch_size=size),
    "scored": lambda n, size: ScoredRows(labelled_stream(n, "pair"), 64, PAD),
    "grouped scored": lambda n, size: grouped(ScoredRows)(labelled_stream(n, "pair"), 64, PAD, global_batch_size=size),
    "judged": lambda n, size: JudgedRows(labelled_stream(n), 64, PAD),
    "grouped judged": lambda n, size: grouped(JudgedRows)(labelled_stream(n), 64, PAD, global_batch_size=size),
    "tagged": lambda n, size: TaggedRows(tagged_stream(n), 64, PAD),
    "grouped tagged": lambda n, size: grouped(TaggedRows)(tagged_stream(n), 64, PAD, global_batch_size=size),
    "retrieval": lambda n, size: RetrievalRows(labelled_stream(n, "pair"), 64, PAD),
    "grouped retrieval": lambda n, size: grouped(RetrievalRows)(
        labelled_stream(n, "pair"), 64, PAD, global_batch_size=size
    ),
}
SHAPES = [(12, 12), (2, 1), (3, 2), (60, 8), (61, 32), (100, 64), (97, 24), (70, 34), (71, 35), (300, 7)]
MORE_SHAPES = [(60, 60), (900, 64), (2000, 7), (1024, 512), (24, 8), (59, 29), (60, 59)]


def read_by_all_ranks(rows, seed: int, size: int, world: int, num_steps: int) -> np.ndarray:
    """(steps, rows per step): the first token of each row, from the micro-batches of every rank."""
    batch = Batch(global_batch_size=size, micro_batch_size=1, sequence_length=64)
    shards = [StepBatches(rows, seed, batch, (rank, world), num_steps) for rank in range(world)]
    return np.array(
        [[int(m.inputs["input_ids"][0, 0]) for shard in shards for m in shard.at(step)] for step in range(num_steps)]
    )


def test_every_kind_of_rows_is_covered():
    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    covered = {type(make(12, 4)) for make in KINDS.values()}
    ours = {kind for kind in below(Rows) if kind.__module__.startswith("samecurve.")}
    without_rows = {kind for kind in ours if kind.__subclasses__()} - covered
    others = {MixedRows, MixedStreams, StreamRows}  # test_mixture.py, test_streaming.py
    assert ours - covered - without_rows == others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(60, 60), (97, 24)])
def test_every_epoch_reads_each_row_once_and_no_step_reads_one_twice(kind, num_rows, size):
    rows = KINDS[kind](num_rows, size)
    assert len(rows) == num_rows
    num_steps = -(-3 * num_rows // size)
    steps = read_by_all_ranks(rows, 3, size, 2, num_steps)
    assert all(len(set(step)) == size for step in steps.tolist())
    for epoch in np.split(steps.ravel()[: 3 * num_rows], 3):
        assert len(set(epoch.tolist())) == num_rows
    assert np.array_equal(read_by_all_ranks(rows, 3, size, 4, 3), steps[:3])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
def test_the_same_for_many_sizes(grouped, seed):
    """At any number of rows and rows per step, and in epochs far away."""
    for num_rows, size in SHAPES + (MORE_SHAPES if seed else []):
        rows = KINDS["grouped documents" if grouped else "documents"](num_rows, size)
        for first in (0, 1000 * num_rows // size):
            batch = Batch(global_batch_size=size, micro_batch_size=1, sequence_length=64)
            steps = StepBatches(rows, seed, batch, (0, 1), 2**40)
            read = np.array([steps.rows_of(step) for step in range(first, first + -(-3 * num_rows // size) + 2)])
            assert all(len(set(step)) == size for step in read.tolist()), (num_rows, size)
            start = -first * size % num_rows
            for begin in range(start, read.size - num_rows + 1, num_rows):
                assert len(set(read.ravel()[begin : begin + num_rows].tolist())) == num_rows, (num_rows, size, first)


def padding(rows, steps: np.ndarray) -> float:
    return 1 - rows.sizes[steps].sum() / sum(64 * -(-rows.sizes[step].max() // 64) * len(step) for step in steps)


@pytest.mark.parametrize(("num_rows", "size", "most"), [(60, 4, 0.35), (900, 8, 0.25), (10_000, 64, 0.25)])
def test_groups_save_padding(num_rows, size, most):
    """Of lengths whose logarithms are normal. Without groups half to three quarters of the tokens are padding."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, num_rows).astype(int), 3, 1500)
    documents = TokenStream(rng.integers(0, 1000, lengths.sum()).astype(np.uint16), np.cumsum([0, *lengths]), "x")
    rows = grouped(DocumentRows)(documents, 1024, PAD, global_batch_size=size)
    positions = np.arange(4 * num_rows // size * size)
    read = rows.at_positions(positions, 1).reshape(-1, size)
    plain = DocumentRows.at_positions(DocumentRows(documents, 1024, PAD), positions, 1).reshape(-1, size)
    assert padding(rows, read) < most < 0.45 < padding(rows, plain)
    again = rows.at_positions(positions, 2).reshape(-1, size)
    shared = {frozenset(step) for step in read.tolist()} & {frozenset(step) for step in again.tolist()}
    assert len(shared) < len(read) / 10  # a row meets others under another seed
    epochs = [{frozenset(step) for step in part.tolist()} for part in (read[: len(read) // 4], read[len(read) // 4 :])]
    assert len(epochs[0] & epochs[1]) < len(read) / 10  # and in another epoch


def test_a_step_with_a_row_twice_is_refused():
    """The guard: whatever the order says."""

    class Copies(DocumentRows):
        def at_positions(self, positions, seed, steps=None):
            return np.minimum(np.asarray(positions) % len(self), 5)

    rows = Copies(random_stream(40, longest=30), 16, PAD)
    batch = Batch(global_batch_size=4, micro_batch_size=1, sequence_length=16)
    batches = StepBatches(rows, 0, batch, (0, 1), 2)
    assert len(batches.at(0)) == 4
    with pytest.raises(AssertionError, match="step 1 reads a row 3 times, 1 at most are needed"):
        batches.at(1)
