import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from samecurve.models import flops
from samecurve.models.flops import Peak, TokenFlops, device_peak, table_peak, token_flops

# Llama by hand: a layer has q 256 + k 128 + v 128 + o 256 + MLP 3 x 16 x 24 = 1152 + norms 32 = 1952 parameters.
# N = 2 x 1952 + final norm 16 + head 20 x 16 = 4240, tied or not. Attention: 12 x 2 layers x 16 x 8 tokens = 3072.
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 20,
}


def on_meta(model_class, config):
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (0, TokenFlops(6 * 4240 + 3072, 6 * 4240 + 3072, 3072, 6 * 320, 3072)),
        # once more forward through the layers: 2 x (4240 - 320 of the head) + 3072 / 3
        (1, TokenFlops(6 * 4240 + 3072, 6 * 4240 + 3072 + 2 * 3920 + 1024, 3072, 6 * 320, 4096)),
        (0.5, TokenFlops(6 * 4240 + 3072, 6 * 4240 + 3072 + 3920 + 512, 3072, 6 * 320, 3584)),
    ],
)
def test_llama_by_hand(tied, recompute, expected):
    model = on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    assert token_flops(model, sequence_length=8, recompute=recompute) == expected


def test_a_pass_before_the_step_is_one_more_forward():
    model = on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA))
    found = token_flops(model, sequence_length=8, recompute=False, rehearsed=True)
    assert found == TokenFlops(6 * 4240 + 3072, 8 * 4240 + 3072 + 1024, 3072, 6 * 320, 4096)


def test_attention_may_be_all_that_is_repeated():
    model = on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA))
    found = token_flops(model, sequence_length=8, recompute=0, recompute_attention=1)
    assert found.hardware == 6 * 4240 + 3072 + 1024


def test_the_causal_half_is_stated_beside():
    found = token_flops(on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA)), sequence_length=8, recompute=1)
    assert found.causal == 6 * 4240 + 3072 / 2
    stated = flops.stated(found, Peak(2.0, "by hand"))
    assert (stated["model_per_token"], stated["causal_per_token"]) == (28512, 26976)
    assert (stated["hardware_per_token"], stated["peak_tflops"]) == (28512 + 8864, 2.0)
    assert flops.stated(None, None) == {"convention": None, "peak_tflops": None, "peak_source": None}


def test_heads_wider_than_the_hidden_size():
    narrow = on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA))
    wide = on_meta(LlamaForCausalLM, LlamaConfig(**LLAMA, head_dim=32))
    # q and o are 16 x 64 instead of 16 x 16, k and v 16 x 32 instead of 16 x 8, per layer
    more = 6 * 2 * (2 * 16 * 48 + 2 * 16 * 24) + 12 * 2 * 8 * (64 - 16)
    assert token_flops(wide, 8, False).model - token_flops(narrow, 8, False).model == more


def test_position_embeddings_are_looked_up():
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, n_positions=1000)
    # attention 8x24+24 + 8x8+8, MLP 8x32+32 + 32x8+8, two norms and the last one 3 x 16, tied head 80; no 1000 x 8
    parameters = 216 + 72 + 288 + 264 + 48 + 80
    assert token_flops(on_meta(GPT2LMHeadModel, config), 4, False).model == 6 * parameters + 12 * 1 * 8 * 4


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 836),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("AMD Instinct MI300X VF", "bf16", 1307.4),
    ],
)
def test_table(name, precision, tflops):
    assert table_peak(name, precision).tflops == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "GRID A100-1-5C",
        "NVIDIA A1000",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GB200",
        "Quadro P400",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 CNX",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "AMD Instinct MI300X HF",
    ],
)
def test_not_in_the_table(name):
    assert table_peak(name, "bf16") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_is_measured(precision):
    peak = device_peak(torch.device("cpu"), precision)
    assert 0 < peak.tflops < 1000
    assert peak.source.startswith("measured with ") and peak.source.endswith(", the fastest here")


@pytest.mark.parametrize(
    ("precision", "tried", "source"),
    [
        ("bf16", {"bf16", "fp32"}, "measured with bf16 matrix multiplications, the fastest here"),
        ("fp32", {"fp32"}, "measured with fp32 matrix multiplications"),
    ],
)
def test_a_gpu_that_is_not_in_the_table_is_measured(precision, tried, source, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(flops.matmul_speed, "peak", lambda _, given: asked.append({*given}) or (8.0, precision))
    assert device_peak(torch.device("cuda"), precision) == Peak(8.0, source)
    assert asked == [tried]


def test_peak_says_where_it_is_from():
    assert table_peak("NVIDIA H200", "bf16") == Peak(989, "NVIDIA H200 data sheet, SXM")
