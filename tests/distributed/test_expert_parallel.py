"""Expert parallelism against one process, between strategies and in what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Run, largest_relative_difference, long, rank_hashes, relative_l2
from test_equal_curves import LOSS, NORM, WEIGHTS
from test_tensor_parallel import assert_equal

COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"num_experts_per_tok": 2, "router_aux_loss_coef": 1.0}  # so large that the norm shows the router loss
CONFIGS = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "intermediate_size": 48},
    "olmoe": {"intermediate_size": 24, "num_experts": 4},
    # with biases
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "sliding_window": 9, "head_dim": 8},
}
PACKED = "data.packing=true"
ROWS = "data.group_by_length=true"


def config_of(family: str, **changes) -> str:
    return f"model.config={json.dumps({'model_type': family, **COMMON, **CONFIGS[family], **changes})}"


def run_of(workspace, strategy: str | Path | None, world: int, micro_batch: int, *overrides: str) -> Run:
    settings = "steps=6", "checkpoint.every_steps=3", f"batch.micro_batch_size={micro_batch}"
    run = workspace.run(strategy, world, *settings, *overrides)
    assert run.returncode == 0, run.output
    return run


def spread_run(workspace, world: int, micro_batch: int, *overrides: str, strategy: str | Path = "fsdp_ep") -> Run:
    run = run_of(workspace, strategy, world, micro_batch, *overrides)
    assert run.facts["expert_parallel_size"] == 2 and run.facts["engine"].startswith("FSDP")
    cut = 2 if strategy == "fsdp_ep_tp" else 1
    assert run.facts["tensor_parallel_size"] == cut
    tensor_parallel = f", {cut} tensor-parallel" if cut > 1 else ""
    assert f"{world // cut} data-parallel{tensor_parallel}, 2 expert-parallel" in run.output
    return run


def assert_same_routing(run: Run, expected: Run) -> None:
    assert largest_relative_difference(run.column("router_loss"), expected.column("router_loss")) < 1e-5
    for found, wanted in zip(run.column("expert_share"), expected.column("expert_share"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "world", "accumulation", "router_loss"),
    [
        ("mixtral", 2, 2, "sequence"),
        *long(
            ("mixtral", 2, 1, "sequence"),
            ("mixtral", 2, 2, "batch"),
            ("mixtral", 2, 2, "off"),
            ("mixtral", 4, 1, "batch"),
        ),
        *long(
            *(
                (family, world, 2, "sequence")
                for family in CONFIGS
                for world in (2, 4)
                if (family, world) != ("mixtral", 2)
            )
        ),
    ],
)
def test_families_follow_one_process(family, world, accumulation, router_loss, workspace):
    arguments = config_of(family), PACKED if family == "mixtral" else ROWS, f"model.router_loss={router_loss}"
    expected = run_of(workspace, None, 1, 8, *arguments)
    run = spread_run(workspace, world, 8 // world // accumulation, *arguments)
    assert run.facts["gradient_accumulation_steps"] == accumulation
    assert_equal(run, expected)
    if router_loss != "off":
        assert_same_routing(run, expected)
    found, wanted = run.metrics[-1], expected.metrics[-1]
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "world", "overrides"),
    long(
        ("mixtral", 4, ()),
        ("mixtral", 4, ("model.router_loss=batch", "memory.activation_checkpointing=full")),
        ("mixtral", 4, ("optimizer.name=lion", "optimizer.learning_rate=1e-4")),
        ("mixtral", 4, ("loss.implementation=full",)),
        ("mixtral tied", 4, ()),
        ("mixtral drops", 4, ()),
        ("mixtral", 8, ()),
        ("qwen3_moe", 4, ()),
        ("olmoe", 4, ()),
    ),
)
def test_with_tensor_parallelism(family, world, overrides, workspace):
    """Attention and vocabulary are cut over two ranks, which compute the same experts; on 8 two share each expert."""
    family, _, kind = family.partition(" ")
    changes = {"tied": {"tie_word_embeddings": True}, "drops": {"attention_dropout": 0.1, "router_jitter_noise": 0.1}}
    arguments = config_of(family, **changes.get(kind, {})), PACKED if family == "mixtral" else ROWS, *overrides
    expected = run_of(workspace, None, 1, 8, *arguments)
    run = spread_run(workspace, world, 8 // world, *arguments, strategy="fsdp_ep_tp")
    assert run.facts["gradient_accumulation_steps"] == 2
    assert_equal(run, expected)
    assert_same_routing(run, expected)
    assert run.metrics[-1]["eval_loss"] == pytest.approx(expected.metrics[-1]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("world", long(2, 4))
def test_bf16_follows_the_fp32_curve(world, workspace):
    """In bf16 a token near the border of two experts may go to the other one, as in every engine that rounds."""
    arguments = config_of("mixtral"), PACKED
    expected = run_of(workspace, None, 1, 8, *arguments)
    run = spread_run(workspace, world, 4 // world, *arguments, "precision=bf16")
    for key, limits in (("loss", LOSS), ("grad_norm", NORM)):
        assert largest_relative_difference(run.column(key), expected.column(key)) < limits["bf16"], key
    assert relative_l2(run.weights, expected.weights) < WEIGHTS["bf16"]


@pytest.mark.parametrize(
    "overrides",
    long(
        (("memory.activation_checkpointing=full",),),
        (("memory.activation_checkpointing=selective", "model.router_loss=batch"),),
        (("optimizer.name=lion", "optimizer.learning_rate=1e-4"),),
        (("optimizer.name=sgd", "loss.implementation=full"),),
        ((config_of("mixtral", tie_word_embeddings=True),),),
        ((config_of("mixtral", router_jitter_noise=0.1, attention_dropout=0.1),),),
    ),
)
def test_options(overrides, workspace):
    model = () if overrides[0].startswith("model.config") else (config_of("mixtral"),)
    expected = run_of(workspace, None, 1, 8, *model, PACKED, *overrides)
    assert_equal(spread_run(workspace, 2, 2, *model, PACKED, *overrides), expected)


@pytest.mark.parametrize("experts", long(2, 8))
def test_experts_that_are_fewer_than_ranks_are_sharded_within(experts, workspace):
    """On 4 processes two share each expert: half of the experts of one, or half of each expert where it is alone."""
    arguments = config_of("mixtral", num_local_experts=experts), PACKED
    expected = run_of(workspace, None, 1, 8, *arguments)
    assert_equal(spread_run(workspace, 4, 1, *arguments), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "world", "changes"),
    [*((family, 4, {}) for family in CONFIGS), ("mixtral", 4, {"num_local_experts": 8}), ("mixtral", 8, {})],
)
def test_experts_in_four_parts(family, world, changes, workspace):
    """One expert of each layer on a rank, or two; on 8 processes two share each expert."""
    arguments = config_of(family, **changes), PACKED if family == "mixtral" else ROWS
    expected = run_of(workspace, None, 1, 8, *arguments)
    run = run_of(workspace, workspace.parallel("fsdp_ep", ep_size=4), world, 1, *arguments)
    facts = run.facts
    assert (facts["expert_parallel_size"], facts["data_parallel_size"], facts["sharded"]) == (4, world, True)
    assert facts["engine"].startswith("FSDP") and facts["gradient_accumulation_steps"] == 8 // world
    assert f"{world} data-parallel, 4 expert-parallel" in run.output
    assert_equal(run, expected)
    assert_same_routing(run, expected)
    assert run.metrics[-1]["eval_loss"] == pytest.approx(expected.metrics[-1]["eval_loss"], rel=1e-5)


WORLDS = {None: 1, "fsdp": 2, "zero3": 2, "fsdp_ep": 2, "fsdp_ep on 4": 4, "hsdp": 4, "zero1": 2, "zero2": 2, "ddp": 2}
WORLDS |= {"fsdp_ep_tp": 4}


@pytest.mark.parametrize(
    "ways",
    [
        ("fsdp_ep", None, "fsdp_ep"),
        *long(
            (("zero3", "fsdp_ep", "fsdp_ep on 4"),),
            (("fsdp_ep on 4", "fsdp", "fsdp_ep"),),
            ((None, "fsdp_ep on 4", "zero3"),),
            (("zero1", "fsdp_ep", "hsdp"),),
            (("fsdp_ep_tp", "fsdp_ep", "fsdp_ep_tp"),),
            (("zero3", "fsdp_ep_tp", None),),
            (("ddp", "fsdp_ep", "zero2"),),
            (("zero2", "fsdp_ep_tp", "ddp"),),
        ),
    ],
)
def test_a_run_goes_on_under_other_strategies(ways, workspace):
    """Two steps under each: experts are saved by the ranks that hold them and read by others."""
    model = config_of("mixtral", num_local_experts=2 if "fsdp_ep on 4" in ways else 4), PACKED
    settings = *model, "steps=6", "checkpoint.every_steps=2", "checkpoint.keep=3"
    golden = workspace.run(None, 1, *settings, "batch.micro_batch_size=8")
    runs: list[Run] = []
    for way in ways:
        world, strategy = WORLDS[way], way and way.partition(" ")[0]
        arguments = strategy, world, *settings, f"batch.micro_batch_size={4 // world or 1}"
        run = workspace.resume(runs[-1], 2 * len(runs), *arguments) if runs else workspace.run(*arguments)
        assert run.returncode == 0, run.output
        assert run.facts["expert_parallel_size"] == (2 if strategy in ("fsdp_ep", "fsdp_ep_tp") else 1)
        runs.append(run)
    assert_goes_on(runs[-1], golden)


def assert_goes_on(run: Run, golden: Run) -> None:
    """Of six steps."""
    assert golden.returncode == 0 and run.column("step") == list(range(1, 7))
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < LOSS["fp32"]
    assert largest_relative_difference(run.column("grad_norm"), golden.column("grad_norm")) < NORM["fp32"]
    assert relative_l2(run.weights, golden.weights) < WEIGHTS["fp32"]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 4, 1), (1, 4, 2)], ids=str)
def test_a_run_goes_on_with_other_sizes(sizes, workspace):
    """Two steps with each size, on 4 processes; fsdp_ep.yaml is not for size 1."""
    settings = config_of("mixtral"), PACKED, "steps=6", "checkpoint.every_steps=2", "checkpoint.keep=3"
    golden = workspace.run(None, 1, *settings, "batch.micro_batch_size=8")
    runs: list[Run] = []
    for size in sizes:
        strategy = workspace.parallel("fsdp_ep", ep_size=size) if size > 1 else "fsdp"
        arguments = strategy, 4, *settings, "batch.micro_batch_size=1"
        run = workspace.resume(runs[-1], 2 * len(runs), *arguments) if runs else workspace.run(*arguments)
        assert run.returncode == 0, run.output
        assert (run.facts["expert_parallel_size"], run.facts["data_parallel_size"]) == (size, 4)
        runs.append(run)
    assert_goes_on(runs[-1], golden)


@pytest.mark.parametrize("world", long(2, 4))
def test_it_goes_on_bit_for_bit(world, workspace):
    settings = config_of("mixtral"), PACKED, "steps=6", "checkpoint.every_steps=3", "batch.micro_batch_size=1"
    golden = workspace.run("fsdp_ep", world, *settings)
    run = workspace.resume(golden, 3, "fsdp_ep", world, *settings)
    assert golden.returncode == run.returncode == 0, golden.output + run.output
    assert run.column("loss") == golden.column("loss") and run.column("grad_norm") == golden.column("grad_norm")
    assert rank_hashes(run.checkpoint(6)) == rank_hashes(golden.checkpoint(6))


@pytest.mark.parametrize("task", long("sft", "continue_pretrain"))
def test_a_pretrained_mixture_goes_on(task, workspace, tmp_path):
    """Weights come from a Hugging Face folder, expert by expert, and go into another one."""
    base = run_of(workspace, None, 1, 8, config_of("mixtral"), PACKED).directory / "model"
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"what is {n}? ", "completion": f"{n} is {n * n} / {n}"} for n in range(40)]
    if task == "continue_pretrain":
        lines = [{"text": line["prompt"] + line["completion"]} for line in lines]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given = f"model={{path: {base}}}", f"tokenizer={{path: {base}}}", f"data.path={rows}", f"task={task}"
    given += ("data.chat=false",) if task == "sft" else ()
    expected = run_of(workspace, None, 1, 8, *given)
    assert_equal(spread_run(workspace, 2, 2, *given), expected)


@pytest.mark.full
def test_accelerate_starts_it(workspace):
    """By a file with a key that Accelerate does not know."""
    settings = config_of("mixtral"), PACKED, "steps=6", "checkpoint.every_steps=0", "batch.micro_batch_size=2"
    expected, found = (workspace.run("fsdp_ep", 2, *settings, launcher=launcher) for launcher in ("fork", "accelerate"))
    assert expected.returncode == found.returncode == 0, expected.output + found.output
    assert found.facts["launcher"] == "accelerate" and found.facts["expert_parallel_size"] == 2
    assert found.column("loss") == expected.column("loss") and found.column("grad_norm") == expected.column("grad_norm")
