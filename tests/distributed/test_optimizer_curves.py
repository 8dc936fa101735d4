"""Each optimizer trains the same curve under every strategy that takes it, and goes on from another strategy's state.

All optimizers of a strategy share one start, see optimizer_probe.py. That their updates are right is shown beside other
implementations in tests/unit/test_optimizers.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from harness import LLAMA, assert_moves, launch_command, long
from optimizer_probe import SAVED, STEPS
from test_equal_curves import ENGINES
from test_resume import whole

from samecurve.specs.optimizers import OPTIMIZERS

RATES = {
    "adamw": 3e-3,
    "lion": 5e-4,
    "sgd": 0.3,
    "adafactor": 3e-2,
    "muon": 3e-3,
    "adamw_8bit": 3e-3,
    "adamw_bf16": 3e-3,
}
ELEMENTWISE = ("adamw", "lion", "sgd")
BY_MATRIX = (*ELEMENTWISE, "adafactor", "muon")
SCHEDULES = ("pipeline_1f1b", "pipeline_interleaved", "pipeline_zbv", "pipeline_fsdp")
TAKEN = dict.fromkeys(["zero1", "zero2", "zero3", "pipeline", "tp", "fsdp_tp", *SCHEDULES], ELEMENTWISE)
TAKEN |= dict.fromkeys(["ddp", "fsdp", "hsdp", "fsdp_ulysses", "fsdp_cp"], BY_MATRIX)
TAKEN["ddp"] = (*TAKEN["ddp"], "adamw_8bit")
CUT_ROWS = (("fsdp_ulysses", 2), ("fsdp_cp", 4))
BF16 = ("adamw_bf16", "adamw_bf16:kahan")
FROZEN, RATED = r"layers\.[01]\.", r"\.mlp\."
GROUPS = "[{pattern: 'layers.[01].*', frozen: true}, {pattern: '*.mlp.*', learning_rate: 6e-3, weight_decay: 0}]"
SIZES = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
WIDE = (f"model.config={json.dumps(SIZES)}", "tokenizer.vocabulary_size=320")
LOSS, NORM, STATE = 1e-5, 1e-4, 1e-4


def start(workspace, strategy: str | None, world: int, names, origin: Path | None = None, *more: str) -> dict:
    """Results by optimizer. names: of RATES, or such a name and `:kahan`."""
    folder = workspace.folder / f"optimizers_{len(list(workspace.folder.iterdir()))}"
    folder.mkdir()
    optimizers = {name: overrides(name) for name in names}
    wanted = {"optimizers": optimizers, "folder": str(folder), "results": str(folder / "results.jsonl")}
    (folder / "wanted.json").write_text(json.dumps(wanted | {"origin": origin and str(origin)}))
    path = workspace.strategy(strategy) if strategy else None
    script = str(Path(__file__).with_name("optimizer_probe.py"))
    command = launch_command("fork", path, world, folder, script)
    command += [str(folder / "wanted.json"), str(workspace.recipe), f"steps={STEPS}", "schedule.warmup_steps=2"]
    command += ["batch.micro_batch_size=2", *more, *(["--strategy", str(path)] if path else [])]
    run = workspace.execute(command, folder)
    assert run.returncode == 0, run.output
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["optimizer"] for line in lines] == list(names)
    return {line["optimizer"]: line | {"folder": folder / line["optimizer"]} for line in lines}


def overrides(name: str) -> list[str]:
    optimizer, _, update = name.partition(":")
    if update == "groups":
        return [*overrides(optimizer), f"optimizer.groups={GROUPS}"]
    found = [f"optimizer.name={optimizer}", f"optimizer.learning_rate={RATES[optimizer]}"]
    return [*found, f"optimizer.bf16_rounding={update}"] if update else found


@pytest.fixture(scope="module")
def single(workspace) -> dict[str, dict]:
    found = start(workspace, None, 1, [name for name in RATES if name != "adamw_bf16"])
    for name, line in found.items():
        losses = [loss for loss, _ in line["results"]]
        assert len(losses) == STEPS and losses[-1] < losses[0] - 0.02, (name, losses)
    return found


def test_all_optimizers_are_covered():
    assert RATES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *(("fsdp", 2), ("zero1", 2)),
        *long(("ddp", 2), ("zero3", 2), ("hsdp", 4), ("zero2", 2), ("pipeline", 2)),
        *long(*((name, 4 if name == "pipeline_fsdp" else 2) for name in SCHEDULES)),
        *long(("tp", 2), ("fsdp_tp", 4), *CUT_ROWS),
    ],
)
def test_the_same_curve_and_state_under_every_strategy(strategy, world, single, workspace):
    names = TAKEN[strategy]
    origin = single["adamw"]["folder"].parent
    for name, line in start(workspace, strategy, world, names, origin).items():
        assert line["engine"] == ENGINES[strategy]
        expected = single[name]["results"]
        assert_close(line["results"], expected, name)
        assert line["unequal"] == []
        assert_close(line["after"], expected[SAVED:], name)
        assert_same_state(line["folder"], single[name]["folder"])


@pytest.mark.parametrize(("strategy", "world"), long(("ddp", 2), ("fsdp", 2), ("hsdp", 4), *CUT_ROWS))
def test_bf16_weights_train_the_curve_of_fp32_ones(strategy, world, single, bf16, workspace):
    """Within what computing in bf16 makes of it, see test_equal_curves.py; what is loaded is loaded exactly."""
    expected = single["adamw"]["results"]
    for name, line in start(workspace, strategy, world, BF16, bf16[BF16[0]]["folder"].parent, "precision=bf16").items():
        one = bf16[name]
        assert line["engine"] == ENGINES[strategy]
        ours, theirs, before = (
            whole(folder / "checkpoints" / f"step_{step:08d}")
            for folder, step in ((line["folder"], STEPS), (one["folder"], STEPS), (one["folder"], SAVED))
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs) and ours.keys() == theirs.keys()
        assert sum(not torch.equal(theirs[key], before[key]) for key in theirs) > 70
        assert sum(key.startswith("compensation/") for key in theirs) == (len(theirs) // 4 if "kahan" in name else 0)
        assert line["dtypes"] == ["bfloat16", "bfloat16" if strategy == "ddp" else "float32"]
        for found in (one["results"], line["results"]):
            assert_close(found, expected, name, 5e-3, 5e-2)
        assert line["unequal"] == []
        assert_close(line["after"], expected[SAVED:], name, 5e-3, 5e-2)


@pytest.fixture(scope="module")
def bf16(workspace) -> dict[str, dict]:
    return start(workspace, None, 1, BF16, None, "precision=bf16")


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), *long(("hsdp", 4), *CUT_ROWS)])
def test_blocks_of_8_bits_are_the_same_in_shards(strategy, world, wide, workspace):
    """A model whose shards are whole blocks: quantized as unsharded, and gone on from the unsharded state."""
    name = "adamw_8bit"
    line = start(workspace, strategy, world, [name], wide["folder"].parent, *WIDE)[name]
    assert line["engine"] == ENGINES[strategy]
    assert_close(line["results"], wide["results"], name)
    assert line["unequal"] == []
    assert_close(line["after"], wide["results"][SAVED:], name)
    assert_same_state(line["folder"], wide["folder"], codes=("state1", "state2"))
    stored = whole(line["folder"] / "checkpoints" / f"step_{SAVED:08d}")
    assert sum(key.startswith("factor/") for key in stored) > 40


@pytest.fixture(scope="module")
def grouped(workspace) -> dict:
    return start(workspace, None, 1, ["adamw:groups"])["adamw:groups"]


def test_groups_differ_from_one_rate(grouped, single):
    """The reference of the next test is itself compared with torch's groups in test_plain_loop.py."""
    pairs = zip(grouped["results"], single["adamw"]["results"], strict=True)
    assert max(abs(ours - theirs) for (ours, _), (theirs, _) in pairs) > 100 * LOSS * 5


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *(("fsdp", 2), ("zero2", 2)),
        *long(("ddp", 2), ("zero1", 2), ("zero3", 2), ("hsdp", 4), ("zero2_offload", 2), ("zero3_offload", 2)),
        *long(("pipeline", 2), *((name, 4 if name == "pipeline_fsdp" else 2) for name in SCHEDULES)),
        *long(("tp", 2), ("fsdp_tp", 4), *CUT_ROWS),
    ],
)
def test_groups_and_frozen_parts_under_every_strategy(strategy, world, grouped, workspace):
    line = start(workspace, strategy, world, ["adamw:groups"], grouped["folder"].parent)["adamw:groups"]
    assert line["engine"] == ENGINES[strategy]
    assert_close(line["results"], grouped["results"], strategy)
    assert line["unequal"] == []
    assert_close(line["after"], grouped["results"][SAVED:], strategy)
    stored = assert_same_state(line["folder"], grouped["folder"])
    assert not [key for key in stored if re.search(FROZEN, key)] and any(re.search(RATED, key) for key in stored)
    moved, gradients, optimizer_bytes = line["kept"]
    assert (moved, gradients) == (0, 0)
    # two moments in fp32, and a master where DeepSpeed has one. Two stages, or the ranks of a tp group, may have all of
    # the embedding. The frozen layers would add two thirds.
    sizes = {key.partition("/")[2]: value.numel() for key, value in stored.items() if key.startswith("weight/")}
    trained = sum(sizes.values()) * {"ddp": world, "hsdp": 2}.get(strategy, 1)
    trained += sizes["model.embed_tokens.weight"] if re.search("pipeline|tp", strategy) else 0
    assert optimizer_bytes < 1.05 * trained * (12 if re.match("zero|pipeline$", strategy) else 8)


@pytest.fixture(scope="module")
def wide(workspace) -> dict:
    return start(workspace, None, 1, ["adamw_8bit"], None, *WIDE)["adamw_8bit"]


def assert_close(found, expected, name: str, loss_tolerance: float = LOSS, norm_tolerance: float = NORM) -> None:
    assert len(found) == len(expected) > 0
    for values in zip(*expected, strict=True):
        assert_moves(values, name)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=loss_tolerance), name
        assert norm == pytest.approx(expected_norm, rel=norm_tolerance), name


def assert_same_state(found: Path, expected: Path, codes: tuple[str, ...] = ()) -> dict:
    """What one strategy saved is what another one did, up to rounding. Returns it."""
    ours, theirs = (whole(folder / "checkpoints" / f"step_{SAVED:08d}") for folder in (found, expected))
    assert ours.keys() == theirs.keys() and len(ours) > 50, ours.keys() ^ theirs.keys()
    for kind in {key.partition("/")[0] for key in ours}:
        pairs = [(ours[key].double(), theirs[key].double()) for key in ours if key.startswith(f"{kind}/")]
        difference = sum((a - b).square().sum() for a, b in pairs)
        if kind in codes:  # one on an edge becomes its neighbour, which near zero is as good as any
            assert sum(int((a != b).sum()) for a, b in pairs) < 0.01 * sum(a.numel() for a, _ in pairs), kind
        else:
            assert (difference / sum(b.square().sum() for _, b in pairs)).sqrt() < STATE, kind
    return ours
