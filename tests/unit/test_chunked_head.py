"""The chunked output head against the plain one: the same loss, gradients and statistics, with less memory."""

from types import SimpleNamespace

import pytest
import torch
from tiny_families import gradients
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from samecurve.engines.loss_implementation import head_implementation, is_chunkable
from samecurve.errors import ConfigurationError
from samecurve.losses import chunked_cross_entropy
from samecurve.losses.chunked_cross_entropy import TokenSums, chunked_sums, install_chunked_head, trained_positions
from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum, token_loss_sum_and_gradient
from samecurve.specs import loss_chunks

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SIZES |= {"max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss_chunks, "SMALLEST", 7)
    monkeypatch.setattr(loss_chunks, "CPU_BYTES", 1)
    chunked_cross_entropy.chunk_size.cache_clear()
    yield
    chunked_cross_entropy.chunk_size.cache_clear()


def tiny(model_type="llama", auto=AutoModelForCausalLM, **fields):
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(model_type, **SIZES, **fields)).eval()


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config)


def batch(trained="some"):
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 512, (2, 3, 16), generator=generator)
    if trained == "some":
        labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.6, IGNORE_INDEX)
    return ids, torch.full_like(labels, IGNORE_INDEX) if trained == "none" else labels


def chunked_loss(model, measure, ids, labels, compiles=False):
    """By a second installation in the place of the first, where there is one."""
    vars(model).pop("forward", None)
    vars(model.get_output_embeddings()).pop("forward", None)
    assert head_implementation(model, on_meta(model), "chunked") == "chunked"
    install_chunked_head(model, "chunked", compiles)
    return model(input_ids=ids, sums=TokenSums(measure, {"labels": labels}, trained_positions(labels)))


def both(model, labels, ids, dtype, compiles=False):
    """(loss, gradients) of the plain way and of the chunked one, each scaled as an engine does."""
    results = []
    for chunked in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            if chunked:
                loss = chunked_loss(model, token_loss_sum, ids, labels, compiles)
            else:
                loss = token_loss_sum(model(input_ids=ids).logits, labels)
        (loss * 0.01).backward()
        results.append((loss.detach(), gradients(model)))
    return results


@pytest.mark.parametrize("trained", ["all", "some", "none"])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_full_logits(trained, tied):
    ids, labels = batch(trained)
    (loss, expected), (chunked, found) = both(tiny(tie_word_embeddings=tied), labels, ids, torch.float32)
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert (loss == 0) == (trained == "none")


def test_a_compiled_loss_is_the_same():
    """A whole chunk, one of another length, and none."""
    model = tiny()
    plain = [both(model, *batch(trained)[::-1], torch.bfloat16)[1] for trained in ("all", "none")]
    before = counters["stats"]["unique_graphs"]
    compiled = [both(model, *batch(trained)[::-1], torch.bfloat16, compiles=True)[1] for trained in ("all", "none")]
    assert 1 <= counters["stats"]["unique_graphs"] - before <= 2
    for (loss, expected), (found, gradient) in zip(plain, compiled, strict=True):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        assert gradient.keys() == expected.keys()
        assert all((gradient[name] - expected[name]).norm() <= 2e-3 * expected[name].norm() for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_and_gradient_are_those_of_autograd(dtype, weighted):
    """Of a label that is all but certain the gradient is a difference of nearly equal numbers: not rounded before."""
    torch.manual_seed(0)
    logits, labels = (torch.randn(9, 40) * 4).to(dtype), torch.randint(0, 40, (9,))
    labels[3], logits[5, labels[5]] = IGNORE_INDEX, 14
    targets = {"labels": labels, **({"weights": torch.rand(9)} if weighted else {})}
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none") * targets.get("weights", torch.ones(9))
    losses.sum().backward()
    for found in (
        token_loss_sum_and_gradient(logits, **targets),
        torch.compile(token_loss_sum_and_gradient)(logits, **targets),
    ):
        torch.testing.assert_close(found[0].double(), losses.sum().detach(), rtol=1e-6, atol=0)
        assert found[1].dtype == dtype and not found[1][3].any()
        torch.testing.assert_close(
            found[1].double(), exact.grad, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-7
        )


@pytest.mark.parametrize("label", [40, -1])
def test_a_label_beyond_the_vocabulary_is_refused(label):
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_loss_sum_and_gradient(torch.zeros(1, 40), torch.tensor([label]))


def test_in_bf16_its_gradients_are_at_least_as_near_to_those_in_fp32():
    ids, labels = batch()
    model = tiny()
    exact = both(model, labels, ids, torch.float32)[0][1]["model.embed_tokens.weight"]
    (_, plain), (_, chunked) = both(model, labels, ids, torch.bfloat16)
    errors = [(found["model.embed_tokens.weight"] - exact).norm() for found in (plain, chunked)]
    assert errors[1] <= errors[0] * 1.05


def test_a_bias_is_trained_and_a_frozen_weight_is_not():
    ids, labels = batch()
    model = tiny("bert", AutoModelForMaskedLM)
    assert is_chunkable(on_meta(model))
    (_, expected), (_, found) = both(model, labels, ids, torch.float32)
    assert found["cls.predictions.bias"].norm() > 0
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    model.requires_grad_(False)
    model.cls.predictions.transform.dense.weight.requires_grad_(True)
    _, (_, only) = both(model, labels, ids, torch.float32)
    assert only.keys() == {"cls.predictions.transform.dense.weight"}
    torch.testing.assert_close(
        *(g["cls.predictions.transform.dense.weight"] for g in (only, expected)), rtol=1e-4, atol=1e-6
    )


def test_without_gradients_any_sums_are_taken():
    ids, labels = batch()
    model = tiny()

    def measure(logits, labels):
        right = ((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum()
        return torch.stack([token_loss_sum(logits, labels).double(), right.double()])

    with torch.no_grad():
        expected = measure(model(input_ids=ids).logits, labels)
        found = chunked_loss(model, measure, ids, labels)
        torch.testing.assert_close(found, expected)
        assert model(input_ids=ids).logits.shape == (3, 16, 512)  # and outside it is as ever


def test_no_tensor_is_as_large_as_the_logits_and_prompts_cost_nothing():
    """Worked out by hand: 3 x 16 tokens, of which 10 are trained, in chunks of 7: 2 chunks, of 7 x 512 and 3 x 512."""
    ids, labels = batch("none")
    labels[0, :10] = 5
    model, seen = tiny(), []

    def measure(logits, labels):
        seen.append(tuple(logits.shape))
        return token_loss_sum(logits, labels)

    chunked_loss(model, measure, ids, labels).backward()
    assert seen == [(7, 512), (3, 512)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "phi3", "olmo2"])
def test_families_whose_logits_are_the_heads_outputs(family):
    assert is_chunkable(on_meta(tiny(family)))


@pytest.mark.parametrize(
    ("family", "fields"), [("gemma2", {"final_logit_softcapping": 30.0}), ("granite", {"logits_scaling": 8.0})]
)
def test_families_that_change_the_heads_outputs_are_left_alone(family, fields):
    model = tiny(family, **fields)
    assert head_implementation(model, on_meta(model), wanted="auto") is None
    with pytest.raises(ConfigurationError, match=f"loss.implementation: found chunked, but {family} changes"):
        head_implementation(model, on_meta(model), wanted="chunked")


def test_a_family_that_reads_the_heads_dtype_and_upcasts_its_logits():
    """Mamba: `lm_head(hidden.to(lm_head.weight.dtype)).float()`."""
    model = tiny("mamba", state_size=4)
    ids, labels = batch()
    assert is_chunkable(on_meta(model))
    (loss, expected), (chunked, found) = both(model, labels, ids, torch.float32)
    torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_logits_that_are_changed_in_place_are_left_alone():
    model = on_meta(tiny())
    plain = model.forward

    def scaled(*args, **inputs):
        found = plain(*args, **inputs)
        found.logits.mul_(2)
        return found

    model.forward = scaled
    assert not is_chunkable(model)


def test_an_adapter_around_the_head_is_left_alone():
    model = on_meta(tiny())
    model.lm_head = nn.Sequential(model.lm_head)
    assert not is_chunkable(model)


def test_the_loss_of_one_token_by_hand():
    head = nn.Linear(2, 3, bias=False)
    head.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    states = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    labels = torch.tensor([[1]])
    loss = chunked_sums(states, head, TokenSums(token_loss_sum, {"labels": labels}))
    loss.backward()
    p = F.softmax(torch.tensor([2.0, 0.0, 0.0]), dim=0)
    torch.testing.assert_close(loss, -p[1].log())
    torch.testing.assert_close(head.weight.grad[:, 0], 2 * (p - torch.tensor([0.0, 1.0, 0.0])))
    torch.testing.assert_close(states.grad[0, 0], torch.stack([p[0], p[1] - 1]))


@pytest.mark.parametrize(
    ("vocabulary_size", "memory_gb", "expected"),
    [(128_256, 150, 4096), (128_256, 85, 2048), (128_256, 25, 512), (2_000_000, 25, 256), (8192, None, 1024)],
)
def test_a_chunk_is_a_small_part_of_a_gpus_memory_and_even(vocabulary_size, memory_gb, expected, monkeypatch):
    """By hand: 150 GB / 64 are the fp32 logits of 4,569 tokens. Without a GPU, 32 MiB are those of 1,024."""
    found = SimpleNamespace(total_memory=int((memory_gb or 0) * 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(loss_chunks, "SMALLEST", 256)  # as they are outside of these tests
    monkeypatch.setattr(loss_chunks, "CPU_BYTES", 2**25)
    chunked_cross_entropy.chunk_size.cache_clear()
    device = torch.device("cpu" if memory_gb is None else "cuda:0")
    assert chunked_cross_entropy.chunk_size(vocabulary_size, device) == expected
