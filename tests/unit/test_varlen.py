"""Attention by documents: equal to attention with the mask that it goes without, gradients too."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from reads import Reads
from tiny_families import tiny_config
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen as torch_varlen
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from samecurve.config.schema import Recipe
from samecurve.data.micro_batch import BatchFacts, MicroBatch
from samecurve.engines import context_parallel
from samecurve.errors import ConfigurationError
from samecurve.models.attention import block_causal, choice, varlen
from samecurve.models.attention.mask_facts import MaskFacts, masks_from
from samecurve.models.hf_config import find_class
from samecurve.specs.heads import CAUSAL
from samecurve.specs.model_families import without_varlen
from samecurve.strategy.parallel_dims import ParallelDims

LENGTHS = ((700,), (1, 299, 400), (64, 20, 30, 5, 81, 256, 244), (690, 10))
ROWS, LENGTH, HEADS, WIDTH = len(LENGTHS), 700, 4, 16


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


def masks(
    window: int | None = None, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, varlen.VarlenMask]:
    """What transformers makes for sdpa, (rows, 1, queries, keys), and for varlen."""
    build = create_causal_mask if window is None else create_sliding_window_causal_mask
    found = []
    for name in ("sdpa", "varlen"):
        config = AutoConfig.for_model("mistral", sliding_window=window, attn_implementation=name)
        inputs = torch.empty(ROWS, LENGTH, 8)
        found.append(
            build(
                config=config,
                inputs_embeds=inputs,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=positions() if attention_mask is None else None,
            )
        )
    return tuple(found)


def tensors(dtype: torch.dtype, key_heads: int = HEADS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value as a model has them, in memory (rows, sequence, heads, width); the output's gradient."""
    torch.manual_seed(0)
    shapes = [(ROWS, LENGTH, heads, WIDTH) for heads in (HEADS, key_heads, key_heads, HEADS)]
    query, key, value, gradient = (torch.randn(shape).to(dtype) for shape in shapes)
    return [x.transpose(1, 2).detach().requires_grad_() for x in (query, key, value)], gradient


def masked(inputs: list[torch.Tensor], gradient: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of attention as it is written in books."""
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ keys.transpose(2, 3) * WIDTH**-0.5).masked_fill(~mask, float("-inf"))
    output = (torch.softmax(scores, -1) @ values).transpose(1, 2)
    output.backward(gradient)
    return [output, query.grad, key.grad, value.grad]


def by_documents(inputs: list[torch.Tensor], gradient: torch.Tensor, visible: varlen.VarlenMask) -> list[torch.Tensor]:
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    output, _ = varlen.attention(torch.nn.Module(), query, key, value, visible, scaling=WIDTH**-0.5)
    output.backward(gradient)
    return [output, query.grad, key.grad, value.grad]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a.detach().double() - b).abs().max().detach()) for a, b in zip(found, exact, strict=True))


def relative_l2(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("window", [None, 1, 100, 690])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_equal_to_attention_with_a_mask(window, key_heads):
    mask, visible = masks(window)
    inputs, gradient = tensors(torch.float32, key_heads)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    assert error(by_documents(inputs, gradient, visible), exact) < 1e-5


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize(("num_bytes", "turns"), [(1, [1, 1, 1, 1]), (3 * HEADS * 188 * 700 * 4, [3, 1]), (2**30, [4])])
def test_rows_with_equal_documents_are_computed_together(key_heads, num_bytes, turns, monkeypatch):
    """Four of one document, thus of three blocks, behind a row of four blocks."""
    (query, key, value), gradient = tensors(torch.float32, key_heads)
    inputs = [torch.cat([x, x[:1].flip(2) * 0.5]) for x in (query, key, value)]
    gradient, first = torch.cat([gradient, -gradient[:1]]), torch.zeros(ROWS + 1, 1, LENGTH, 1, dtype=torch.long)
    first[0, 0, 400:] = 400
    rows = [slice(i, i + 1) for i in range(ROWS + 1)]
    apart = [by_documents([x[row] for x in inputs], gradient[row], varlen.VarlenMask(first[row], None)) for row in rows]
    numbers, whole = [], block_causal._Block.gradients
    monkeypatch.setattr(block_causal._Block, "gradients", lambda *args: numbers.append(len(args[1])) or whole(*args))
    monkeypatch.setattr(block_causal, "SCORES_BYTES", num_bytes)
    together = by_documents(inputs, gradient, varlen.VarlenMask(first, None))
    assert numbers == [1] * 4 + [number for number in turns for _ in range(3)]
    assert error(together, [torch.cat(parts).detach() for parts in zip(*apart, strict=True)]) < 1e-6


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_in_bf16_hardly_further_off_than_with_a_mask(key_heads):
    """Sums over several blocks are of rounded parts."""
    mask, visible = masks()
    inputs, gradient = tensors(torch.bfloat16, key_heads)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    for found, eager, wanted in zip(
        by_documents(inputs, gradient, visible), masked(inputs, gradient, mask), exact, strict=True
    ):
        assert relative_l2(found, wanted) < 1.06 * relative_l2(eager, wanted)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_first_keys_are_those_of_the_mask(window):
    mask, visible = masks(window)
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    assert torch.equal((keys >= visible.first) & (keys <= queries), mask.expand(ROWS, 1, LENGTH, LENGTH))


def test_padding_is_not_seen_by_what_is_not_padding():
    exists = padding()
    mask, visible = masks(attention_mask=exists)
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    found = (keys >= visible.first) & (keys <= queries)
    assert torch.equal(found[exists[:, None, :] > 0], mask[exists[:, None, :] > 0])


def test_what_is_kept_does_not_grow_with_the_square_of_the_sequence():
    _, visible = masks()
    (query, key, value), _ = tensors(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        varlen.attention(torch.nn.Module(), query, key, value, visible)
    assert sum(x.numel() for x in kept) == query.numel() + key.numel() + value.numel() + visible.first.numel()


def test_what_is_kept_of_masks_does_not_depend_on_the_keys():
    """Of 600 tokens blocks of 256, 256 and 88 queries see 256, 512 and 600 keys: squares of two sizes."""
    block_causal._causal.cache_clear()
    query, first = torch.randn(1, 2, 600, 8), torch.zeros(1, 1, 600, 1, dtype=torch.long)
    block_causal.attend(query, query, query, first, 1.0)
    assert block_causal._causal.cache_info().currsize == 2


def test_as_an_operator_of_torch():
    """Compiled, with fake tensors, and with gradients that autograd registers."""
    first = masks()[1].first[:2, :, :40]
    inputs = [x[:2, :, :40].detach().requires_grad_() for x in tensors(torch.float32)[0]]
    torch.library.opcheck(block_causal.OPERATOR, (*inputs, first, 0.25))


def test_flops_are_counted_like_those_of_torchs_attention():
    counts = []
    inputs, gradient = tensors(torch.float32)
    for run in (torch.nn.functional.scaled_dot_product_attention, None):
        with FlopCounterMode(display=False) as counter:
            if run is None:
                by_documents(inputs, gradient, masks()[1])
            else:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    run(*inputs).transpose(1, 2).backward(gradient)
        counts.append(counter.get_total_flops())
    forward = 4 * ROWS * HEADS * LENGTH**2 * WIDTH
    assert counts == [3 * forward, 3.5 * forward]  # the scores are computed twice, as in flash attention


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"dropout": 0.1}, "does not support dropout"),
        ({"softcap": 30.0}, "does not support softcap"),
        ({"s_aux": torch.zeros(4)}, "does not support s_aux"),
    ],
)
def test_what_it_does_not_know_is_refused(more, text):
    with pytest.raises(ValueError, match=text):
        varlen.attention(torch.nn.Module(), *tensors(torch.float32)[0], masks()[1], **more)


def test_both_directions_and_caches_are_refused():
    encoder = torch.nn.Module()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="does not support bidirectional attention"):
        varlen.attention(encoder, *tensors(torch.float32)[0], masks()[1])
    with pytest.raises(ValueError, match="without a cache of keys"):
        varlen.visible_keys(1, q_length=1, kv_length=8, q_offset=7)


def documents(query, key, value, starts, scale, window):
    """(where, its queries, keys, values, probabilities) of each document of (tokens, heads, width)."""
    groups = query.shape[1] // key.shape[1]
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        places = torch.arange(end - begin)
        distance = places[:, None] - places
        hidden = (distance < 0) | ((distance > window[0]) & (window[0] != -1))
        yield slice(begin, end), q, k, v, torch.softmax((q @ k.mT * scale).masked_fill(hidden, float("-inf")), -1)


def kernel(query, key, value, starts, _, longest, __, causal, scale, window, shares_heads=False, *more):
    """What stands behind torch's varlen_attn, which only GPUs have, as it is written in books."""
    assert starts.dtype == torch.int32 and longest >= max(starts.diff().tolist())
    assert (shares_heads or query.shape == key.shape) and causal == (window == [-1, 0])
    output = torch.empty_like(query)
    for at, _, _, v, probabilities in documents(query, key, value, starts, scale, window):
        output[at] = (probabilities @ v).transpose(0, 1)
    return output, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward_kernel(gradient, query, key, value, output, _, starts, *more):
    scale, window = more[5:]
    found = [torch.empty_like(x) for x in (query, key, value)]
    for at, q, k, v, probabilities in documents(query, key, value, starts, scale, window):
        given, result = gradient[at].transpose(0, 1), output[at].transpose(0, 1)
        of_scores = probabilities * (given @ v.mT - (given * result).sum(-1, keepdim=True)) * scale
        for whole, part in zip(found, (of_scores @ k, of_scores.mT @ q, probabilities.mT @ given), strict=True):
            whole[at] = part.unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(found)


@pytest.fixture(scope="module")
def kernels():
    """So that all of torch's varlen_attn but its kernels runs here."""
    torch_varlen._varlen_attn.register_kernel("cpu", kernel)
    torch_varlen._varlen_attn_backward.register_kernel("cpu", backward_kernel)


@pytest.fixture
def as_on_a_gpu(kernels, monkeypatch):
    monkeypatch.setattr(varlen, "_on_gpu", lambda device: True)


@pytest.mark.parametrize("shares_heads", {False, varlen._SHARES_HEADS})
@pytest.mark.parametrize("window", [None, 1, 100, 690])
def test_what_a_gpu_is_given_is_the_same_attention(window, shares_heads, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(varlen, "_SHARES_HEADS", shares_heads)
    mask, visible = masks(window)
    inputs, gradient = tensors(torch.float32, key_heads=2)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    assert error(by_documents(inputs, gradient, visible), exact) < 1e-5


def test_the_documents_of_a_gpu_by_hand(as_on_a_gpu):
    documents = masks(window=100)[1].documents
    ends = [700, 701, 1000, 1400, 1464, 1484, 1514, 1519, 1600, 1856, 2100, 2790, 2800]
    assert (documents.starts.tolist(), documents.longest, documents.window) == ([0, *ends], 700, 99)


def test_padding_is_no_document_of_its_own(as_on_a_gpu):
    """Or its tokens would be thousands of them."""
    starts = masks(attention_mask=padding())[1].documents.starts
    assert starts.tolist() == [0, 700, 730, 1400, 2100, 2800]


def padding() -> torch.Tensor:
    exists = torch.ones(ROWS, LENGTH, dtype=torch.long)
    exists[0, 650:], exists[1, :30] = 0, 0
    return exists


def loaded(attention_mask: torch.Tensor | None) -> MaskFacts:
    """What the data loader finds out about the rows of `masks`."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    more = {"position_ids": positions()} if attention_mask is None else {"attention_mask": attention_mask}
    facts = BatchFacts.of(MicroBatch({"input_ids": ids, **more}, {"labels": ids}), lambda labels: 0)
    assert facts.documents is not None
    return MaskFacts(facts.packed, facts.padded, *facts.documents)


@pytest.mark.parametrize("attention_mask", [None, padding()], ids=["packed", "padded"])
@pytest.mark.parametrize("window", [None, 2, 100, 690])
def test_the_loaders_documents_are_those_that_a_gpu_would_find(window, attention_mask, as_on_a_gpu):
    found = masks(window, attention_mask)[1].documents
    facts = loaded(attention_mask)
    with masks_from(facts), Reads() as reads:
        mask = masks(window, attention_mask)[1]
    assert mask.first is None and mask.documents.starts.equal(found.starts)
    assert (mask.documents.longest, mask.documents.window) == (1024, found.window)
    assert not [stack for _, _, stack in reads.found if "varlen.py" in stack]


def test_attention_with_the_loaders_documents_is_the_same(as_on_a_gpu):
    inputs, gradient = tensors(torch.float32, key_heads=2)
    mask = masks(100)[0]
    with masks_from(loaded(None)):
        visible = masks(100)[1]
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    with Reads() as reads:
        found = by_documents(inputs, gradient, visible)
    assert error(found, exact) < 1e-5
    # what stands for the kernel reads the documents itself
    assert not [stack for _, _, stack in reads.found if "in kernel" not in stack and "in backward_kernel" not in stack]


@pytest.mark.parametrize("more", [{"local_size": 64}, {"use_vmap": True}], ids=["chunks", "own mask function"])
def test_documents_that_cannot_express_a_mask_are_not_taken(more, as_on_a_gpu):
    with masks_from(loaded(None)):
        mask = varlen.visible_keys(ROWS, LENGTH, LENGTH, config=AutoConfig.for_model("llama"), **more)
    assert mask.first is not None


def test_other_documents_do_not_compile_a_layer_again(kernels):
    """A8 of docs/gpu.md: the lengths of documents are other ones in each micro-batch."""
    torch._dynamo.reset()
    backend = CompileCounter()
    layer = torch.compile(partial(varlen.attention, torch.nn.Module()), backend=backend)
    query = torch.randn(1, HEADS, LENGTH, WIDTH)
    for lengths in ((700,), (300, 400), (1, 299, 400), (9,) * 70 + (70,), (690, 10), (5,) * 140, (100, 600)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        longest = 1 << (max(lengths) - 1).bit_length()
        documents = varlen.PackedDocuments.of(starts, longest, None)
        layer(query, query, query, varlen.VarlenMask(None, documents))
    assert backend.frame_count == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_of_a_gpu(window, key_heads):
    """No further off than three times what eager attention in bf16 is."""
    mask, visible = masks(window)
    inputs, gradient = tensors(torch.bfloat16, key_heads)
    exact = masked([x.double() for x in inputs], gradient.double(), mask)
    allowed = error(masked(inputs, gradient, mask), exact)
    there = varlen.VarlenMask(visible.first.cuda(), varlen._documents(visible.first[:, 0, :, 0].cuda()))
    found = by_documents([x.detach().cuda() for x in inputs], gradient.cuda(), there)
    assert error([x.cpu() for x in found], exact) <= 3 * allowed


def recipe(attention: str, precision: str = "bf16") -> SimpleNamespace:
    data = SimpleNamespace(packing=True)
    return SimpleNamespace(model=SimpleNamespace(attention=attention), precision=precision, task="pretrain", data=data)


def choose_attention(made: SimpleNamespace, config) -> str:
    return choice.choose_attention(made, config, find_class(CAUSAL, config))


def test_auto_is_by_documents_where_that_is_a_gain(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    llama = AutoConfig.for_model("llama")
    assert choose_attention(recipe("auto"), llama) == "varlen"
    assert choose_attention(recipe("auto", "fp32"), llama) == "sdpa"
    assert choose_attention(recipe("varlen", "fp32"), llama) == "varlen"
    assert choose_attention(recipe("eager"), llama) == "eager"
    assert choose_attention(recipe("auto"), AutoConfig.for_model("bloom")) == "eager"
    assert choose_attention(recipe("auto"), AutoConfig.for_model("gpt2")) == "sdpa"
    assert choose_attention(recipe("auto"), AutoConfig.for_model("gpt2", attn_pdrop=0.0)) == "varlen"
    with pytest.raises(ConfigurationError, match="model.attention: found varlen, but attn_pdrop is 0.1, and it has no"):
        choose_attention(recipe("varlen"), AutoConfig.for_model("gpt2"))
    with pytest.raises(ConfigurationError, match="a gemma2 computes attention in its own way; use auto"):
        choose_attention(recipe("varlen"), AutoConfig.for_model("gemma2"))


def test_the_header_says_how_auto_chose(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    asked, gpu = recipe("auto"), torch.device("cuda")
    assert choice.describe_choice(asked, gpu) == ""  # one long text needs no mask
    asked.task = "sft"
    assert choice.describe_choice(asked, gpu) == "auto: nothing measured on this GPU yet, see docs/gpu.md"
    assert choice.describe_choice(asked, torch.device("cpu")) == choice.describe_choice(recipe("sdpa"), gpu) == ""
    path = tmp_path / "choice.json"
    row = {"attention": "varlen", "tokens_per_second": {"sdpa": 9e3, "varlen": 12e3}, "date": "2027-01-02T03:04:05"}
    path.write_text(json.dumps({"H100": row}))
    assert choice.describe_choice(asked, gpu, path) == "auto: measured 2027-01-02, tokens/s: sdpa 9,000, varlen 12,000"


def test_on_a_gpu_only_where_it_was_asked_for_or_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    llama = AutoConfig.for_model("llama")
    assert choose_attention(recipe("auto"), llama) == "sdpa"
    assert choose_attention(recipe("varlen"), llama) == "varlen"
    assert choose_attention(recipe("varlen", "fp16"), llama) == "varlen"

    packed = recipe("auto")
    packed.task = "sft"
    assert choose_attention(packed, llama) == "sdpa"  # nothing has been measured

    path = tmp_path / "choice.json"
    rates = {"sdpa": 9000.0, "varlen": 12_000.0}
    path.write_text(json.dumps({"Tesla T4": {"attention": "varlen", "tokens_per_second": rates, "date": "2027-01-02"}}))
    monkeypatch.setattr(choice.measured_fastest, "__defaults__", (path,))
    assert choose_attention(packed, llama) == "varlen"
    assert choose_attention(packed, AutoConfig.for_model("gpt2")) == "sdpa"  # it has dropout
    packed.precision = "fp16"
    assert choose_attention(packed, llama) == "sdpa"
    packed.precision, packed.task = "bf16", "pretrain"
    assert choose_attention(packed, llama) == "sdpa"

    def refused(text: str, config=llama, precision: str = "bf16") -> None:
        with pytest.raises(ConfigurationError, match=text):
            choose_attention(recipe("varlen", precision), config)

    refused("found varlen, but a GPU computes it in bf16 and fp16 only; use auto", precision="fp32")
    refused(
        "head_dim is 4, and a GPU computes it for multiples of 8 up to 256", AutoConfig.for_model("llama", head_dim=4)
    )
    wide = AutoConfig.for_model("gpt2", n_embd=1024, n_head=2, attn_pdrop=0.0)
    refused("hidden_size / num_attention_heads is 512, and a GPU computes it", wide)
    refused("head_dim is 512, and a GPU computes it", AutoConfig.for_model("gemma4_text"))  # of some of its layers
    refused("kv_channels is 12, and a GPU computes it", AutoConfig.for_model("jetmoe", kv_channels=12))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    refused("Tesla T4 is too old for it")


@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {"is_causal": False}), ("gemma3_text", {"use_bidirectional_attention": True})]
)
def test_a_decoder_that_looks_ahead_has_neither_varlen_nor_context_parallelism(family, fields):
    config = tiny_config(family, attn_implementation="sdpa", **fields)
    assert "and it is causal" in (without_varlen(config.to_dict()) or "")
    dims = ParallelDims(cp=2)
    strategy = SimpleNamespace(dims=dims, path="s.yaml", context_key="cp_size", context_parallel="allgather")
    with pytest.raises(ConfigurationError, match="and context parallelism computes causal attention; use another"):
        context_parallel.check(SimpleNamespace(config=config), Recipe.model_construct(), strategy)
