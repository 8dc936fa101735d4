"""What `plan` counts of an adapter's trained weights."""

from __future__ import annotations

import pytest
from test_plan_search import LLAMA_8B

from samecurve.cli.commands import main
from samecurve.config.schema import Adapter
from samecurve.planner import inputs, model_shape, strategies
from samecurve.planner.answers import predict
from samecurve.planner.cluster import read_cluster

ENDS = ("embed_tokens", "lm_head")
END = 128256 * 4096  # elements of an embedding, and of a head


def adapted(fields: dict = LLAMA_8B, **settings) -> tuple[float, float, bool]:
    """Trained elements and frozen bytes of a model, and whether its output head is trained."""
    shape = model_shape.shape(fields, "config.json")
    frozen = model_shape.adapted(shape, Adapter(name="lora", rank=16, **settings), 2)
    return frozen.trained * shape.parameters, frozen.weight_bytes * shape.parameters, frozen.trains_head


def test_embedding_and_head_may_be_trained_in_full():
    trained, frozen, _ = adapted()
    assert adapted(modules_to_save=("score",)) == (trained, frozen, False)
    assert adapted(modules_to_save=ENDS) == (pytest.approx(trained + 2 * END), pytest.approx(frozen - 4 * END), True)
    assert adapted(modules_to_save=("model.embed_tokens",))[0::2] == (pytest.approx(trained + END), False)
    tied = {**LLAMA_8B, "tie_word_embeddings": True}
    assert adapted(tied, modules_to_save=ENDS)[0::2] == (pytest.approx(adapted(tied)[0] + END), True)


def test_experts_may_be_adapted():
    """Each of 8 experts has matrices of its own, for both products: rank x (rows + columns)."""
    mixture = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    gate_up, down = 16 * (2 * 14336 + 4096), 16 * (4096 + 14336)
    experts = ("experts.gate_up_proj", "experts.down_proj")
    given = adapted(mixture, target_modules=(), target_parameters=experts)
    assert given[0] == pytest.approx(32 * 8 * (gate_up + down))
    assert adapted(mixture, target_parameters=experts[:1])[0] == pytest.approx(adapted(mixture)[0] + 32 * 8 * gate_up)


def test_a_plan_counts_them_or_says_that_it_does_not(tmp_path, capsys):
    config = "benchmarks/planner/llama_8b.json"
    machines, template = read_cluster("h100x8"), strategies.read("configs/ddp.yaml")
    given, memory = ["adapter.name=lora", "task=sft"], []
    for more in ([], ["adapter.modules_to_save=[embed_tokens, lm_head]"]):
        request = inputs.read(config, [*given, *more])
        described, _ = strategies.describe(request, template, {}, 8)
        memory.append(predict(strategies.job(request, described, machines)).total_memory_gib)
    assert memory[1] - memory[0] > 2 * END * 14 / 2**30  # fp32 weights, gradients and states in place of 2 bytes
    overrides = [*given, "adapter.modules_to_save=[embed_tokens, score]", "--strategy", "configs/ddp.yaml"]
    main(["plan", config, "--cluster", "h100x8", *overrides])
    assert "Not in these numbers: adapter: trained weights of score are not counted" in capsys.readouterr().out
