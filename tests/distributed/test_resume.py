"""A run stops anywhere and goes on: bit for bit under the same strategy, on the same curve under any other.

The runs that stop are those of test_equal_curves.py, which save every 5 steps; 20 steps follow the first save.
"""

from __future__ import annotations

import json

import pytest
import torch
from harness import STEPS, Run, largest_relative_difference, launch_command, long, rank_hashes, relative_l2
from safetensors.torch import load_file
from test_equal_curves import (
    CONTEXT,
    ENGINES,
    SCHEDULES,
    Case,
    accumulations,
    assert_what_ran,
    libaio_is_installed,
    run_case,
    worlds,
)

STOP = 5
LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4
CASES = {
    name: Case(name, worlds(name)[-1] if name != "pipeline" else 2, max(accumulations(name)[0], 2)) for name in ENGINES
}
# other placements of what zero1, zero3, fsdp and tp do, or the same as fsdp's
RARE = ("hsdp", "zero2_offload", "zero3_nvme", "zero3_hpz", "fsdp_tp_cp", "zero2", "zero3_offload", "fsdp_tp")
RARE += (*CONTEXT, *(name for name in SCHEDULES if name != "pipeline_1f1b"))
EVERY_DAY = [name for name in CASES if name not in RARE]
# each goes on from the previous one's checkpoint, so every strategy writes one for another and reads one of another
RING = {name: names[index - 1] for names in (EVERY_DAY, RARE) for index, name in enumerate(names)}


def finished(name: str, workspace) -> Run:
    if name == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    run = run_case(workspace, CASES[name])
    assert run.returncode == 0, run.output
    return run


def going_on(source: Run, name: str, workspace, *overrides: str, step: int = STOP) -> Run:
    case = CASES[name]
    strategy = None if name == "single" else name
    run = workspace.resume(source, step, strategy, case.world, case.micro_batch, *overrides)
    assert run.returncode == 0, run.output
    assert_what_ran(run, case)
    return run


@pytest.mark.parametrize(
    "name", ["single", "fsdp", "pipeline", "zero3", *long("ddp", "tp", "pipeline_1f1b", "zero1", *RARE)]
)
def test_the_same_strategy_goes_on_bit_for_bit(name, workspace):
    golden = finished(name, workspace)
    run = going_on(golden, name, workspace)
    assert run.column("step") == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "learning_rate", "tokens", "samples"):
        assert run.column(key) == golden.column(key), key
    # weights, moments and random numbers of every rank
    assert rank_hashes(run.checkpoint(STEPS)) == rank_hashes(golden.checkpoint(STEPS))


@pytest.mark.parametrize("name", [*EVERY_DAY, *long(*RARE)])
def test_every_value_is_read_and_written(name, workspace, tmp_path):
    """Load another strategy's checkpoint and save it at once: every weight and moment comes back as it was."""
    source = finished(RING[name], workspace)
    case, path = CASES[name], None if name == "single" else workspace.strategy(name)
    script = __file__.replace("test_resume.py", "checkpoint_probe.py")
    command = launch_command("fork", path, case.world, tmp_path, script)
    command += [str(source.checkpoint(STOP)), str(workspace.recipe), f"output_dir={tmp_path / 'run'}"]
    command += [case.micro_batch, *(["--strategy", str(path)] if path else [])]
    run = workspace.execute(command, tmp_path / "run")
    assert run.returncode == 0, run.output
    assert f"ENGINE {ENGINES[name]}" in run.output
    assert_equal(whole(run.checkpoint(STOP)), whole(source.checkpoint(STOP)))


def test_another_number_of_loader_workers_goes_on_bit_for_bit(reference, workspace):
    run = workspace.resume(reference, STOP, None, 1, "batch.micro_batch_size=8", "data.num_workers=2")
    assert run.returncode == 0, run.output
    for key in ("loss", "grad_norm", "tokens", "samples"):
        assert run.column(key) == reference.column(key), key
    assert rank_hashes(run.checkpoint(STEPS)) == rank_hashes(reference.checkpoint(STEPS))
    assert run.facts["recipe"]["data"]["num_workers"] == 2 and "data.num_workers: 0" not in run.output


PAIRS = [*RING.items()]
# what is read and written is shown for all by the test above; here the losses after it, once for sharded weights and
# once for stages; test_all_pairs.py has all pairs
EVERY_DAY_PAIRS = [pair for pair in PAIRS if pair[0] in ("fsdp", "pipeline")]


@pytest.mark.parametrize(
    ("name", "origin"),
    [*EVERY_DAY_PAIRS, *long(*(pair for pair in PAIRS if pair not in EVERY_DAY_PAIRS))],
)
def test_another_strategy_goes_on_on_the_same_curve(name, origin, workspace):
    golden = finished(origin, workspace)
    run = going_on(golden, name, workspace)
    assert run.column("step") == list(range(1, STEPS + 1))
    for key in ("learning_rate", "tokens", "samples"):
        assert run.column(key) == golden.column(key), key
    assert largest_relative_difference(run.column("loss")[STOP:], golden.column("loss")[STOP:]) < LOSS
    assert largest_relative_difference(run.column("grad_norm")[STOP:], golden.column("grad_norm")[STOP:]) < NORM
    assert f"strategy: {origin} -> {name}" in run.output


WAY = (Case("zero3", 2, 2), Case("pp_fsdp_tp", 8, 2), Case("fsdp_ulysses", 4, 2), Case("single", 1, 1))


@pytest.mark.full
def test_a_run_that_changes_devices_three_times_ends_on_the_same_curve(workspace, reference):
    """Five steps each on 2, 8 and 4 processes, and the last ten in one."""
    run = run_case(workspace, WAY[0])
    for count, case in enumerate(WAY[1:], start=1):
        strategy = None if case.strategy == "single" else case.strategy
        run = workspace.resume(run, count * STOP, strategy, case.world, case.micro_batch)
        assert run.returncode == 0, run.output
        assert_what_ran(run, case)
        assert f"strategy: {WAY[count - 1].strategy} -> {case.strategy}" in run.output
    assert run.column("step") == list(range(1, STEPS + 1))
    for key in ("learning_rate", "tokens"):
        assert run.column(key) == reference.column(key), key
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < NORM
    assert relative_l2(run.weights, reference.weights) < WEIGHTS
    assert abs(run.metrics[-1]["eval_loss"] / reference.metrics[-1]["eval_loss"] - 1) < LOSS


GPT2 = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 32, resid_pdrop: 0.1, embd_pdrop: 0.1}"
# of 267 rows: an epoch ends with a step (the 15th); an epoch ends within one (the 4th)
AT_ITS_END, WITHIN_A_STEP = (
    ("batch.global_batch_size=89", "batch.micro_batch_size=89"),
    (
        "batch.global_batch_size=80",
        "batch.micro_batch_size=20",
    ),
)


@pytest.mark.parametrize(
    ("strategy", "world", "step", "overrides"),
    [
        (None, 1, 15, AT_ITS_END),
        ("ddp", 2, 5, WITHIN_A_STEP),
        ("ddp", 2, 10, (f"model.config={GPT2}", "batch.micro_batch_size=2")),
        *long(("fsdp", 2, 10, (f"model.config={GPT2}", "batch.micro_batch_size=2"))),
        *long(("zero3", 2, 10, (f"model.config={GPT2}", "batch.micro_batch_size=2"))),
        *long(("pipeline", 2, 10, (f"model.config={GPT2}", "batch.micro_batch_size=2"))),
        *long(("ddp", 2, 10, ("precision=fp16", "batch.micro_batch_size=2"))),
        *long(*((name, 2, 10, ("precision=bf16", "batch.micro_batch_size=2")) for name in ("fsdp", "zero1", "zero3"))),
    ],
    ids=lambda value: "-".join(text.split(":")[-1] for text in value) if isinstance(value, tuple) else None,
)
def test_nothing_is_forgotten(strategy, world, step, overrides, workspace):
    """Rows at the end of an epoch and beyond, dropout's random numbers, fp16's loss scale."""
    golden = workspace.run(strategy, world, *overrides)
    assert golden.returncode == 0, golden.output
    run = workspace.resume(golden, step, strategy, world, *overrides)
    assert run.returncode == 0, run.output
    assert run.column("loss") == golden.column("loss")
    assert rank_hashes(run.checkpoint(STEPS)) == rank_hashes(golden.checkpoint(STEPS))


def whole(folder) -> dict[str, torch.Tensor]:
    """Every weight and what its optimizer keeps, put together from all files with safetensors' own reader."""
    files = [load_file(path) for path in sorted(folder.glob("rank_*.safetensors"))]
    kinds: dict[str, set[str]] = {}
    for kind, _, name in (key.partition("/") for file in files for key in file):
        kinds.setdefault(name, set()).add(kind)
    found = {}
    for name, item in json.loads((folder / "index.json").read_text()).items():
        for kind in kinds[name]:
            full = torch.full((torch.Size(item["shape"]).numel(),), torch.nan)
            for rank, start, stop, *columns in item["ranges"]:
                part = files[rank][f"{kind}/{name}"]
                if columns:  # `count` runs, `stride` apart; the third number is then their length
                    count, stride = columns
                    full.as_strided((count, stop), (stride, 1), start).copy_(part.view(count, stop))
                else:
                    full[start:stop] = part
            found[f"{kind}/{name}"] = full
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 100
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different
