"""The search of `plan`: what is compared, what fits, what is a tie, and how long it takes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_planner_anatomy import a_job, strategy

from samecurve.bench.step import write_changed
from samecurve.cli.commands import main
from samecurve.planner import inputs, memory, plan_text, remedies, search, step_time
from samecurve.planner.answers import Prediction
from samecurve.planner.cluster import read_cluster
from samecurve.planner.search import COMPARED, Choice
from samecurve.planner.strategies import read, shipped
from samecurve.specs.gpus import GIB

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B = {"model_type": "llama", "intermediate_size": 14336, "vocab_size": 128256, **SIZES}
OFFLOADING = ("zero3_offload", "zero3_nvme")


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


@pytest.fixture
def wanted(config):
    return inputs.read(config, [])


def test_a_thousand_gpus_take_less_than_two_seconds(tmp_path):
    """The whole command, interpreter included, in seconds of a CPU that has nothing else to do; no torch.

    The first run compiles the modules, as a user's first one does. Of the others the quicker counts: other processes
    on this machine cost this one time, too.
    """
    call = "import sys; from samecurve.cli.commands import main; code = main(sys.argv[1:]); "
    call += "assert 'torch' not in sys.modules; sys.exit(code)"
    model = ["benchmarks/planner/llama_8b.json", "batch.global_batch_size=2048"]
    command = [sys.executable, "-c", call, "plan", *model, "--cluster", "h100x8", "--gpus", "1024"]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True}
    seconds = []
    for _ in range(3):
        before = _child_seconds()
        assert "on 1024 x H100-80GB" in subprocess.run(command, **options).stdout
        seconds.append(_child_seconds() - before)
    assert min(seconds[1:]) < 2, seconds


@pytest.mark.parametrize(
    ("model", "gpus", "rows", "length", "code", "most"),
    [
        ("8b", 1024, 2048, 4096, 0, (450, 300)),
        ("8b", 512, 2048, 8192, 0, (1800, 1200)),
        ("70b", 64, 2048, 8192, 0, (900, 300)),
        pytest.param("8b", 8, 8, 1048576, 6, (4000, 100), marks=pytest.mark.full),
    ],
)
def test_a_search_predicts_few_shapes(model, gpus, rows, length, code, most, monkeypatch, capsys):
    """On which its time depends: memory of each, and the step time of what fits. The last looks for other GPUs, too."""
    counts = {"anatomy": 0, "breakdown": 0}

    def counted(module, name):
        original = getattr(module, name)

        def count(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, count)

    counted(memory, "anatomy")
    counted(step_time, "breakdown")
    job = [f"batch.global_batch_size={rows}", f"batch.sequence_length={length}"]
    config = f"benchmarks/planner/llama_{model}.json"
    assert main(["plan", config, "--cluster", "h100x8", "--gpus", str(gpus), *job]) == code
    assert 0 < counts["anatomy"] < most[0] and 0 < counts["breakdown"] < most[1], counts


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_axes_follow_from_the_strategy_files():
    axes = {each.name: tuple(each.places) for each in shipped()}
    assert axes["pipeline"] == ("pp",) and axes["hsdp"] == ("dp_replicate",) and axes["fsdp"] == ()


def test_expert_parallelism_is_for_models_with_experts(wanted, tmp_path):
    machines, templates = read_cluster("h100x8").scaled(16), [read("configs/fsdp_ep.yaml")]
    (refused,) = search.search(wanted, machines, templates)
    assert refused.verdict == "cannot run" and "parallelism_config_ep_size: found 2" in refused.reason
    assert "no experts" in refused.reason
    path = tmp_path / "mixture.json"
    mixture = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps(mixture | {"num_hidden_layers": 8, "vocab_size": 8192}))
    kept = ["memory.activation_checkpointing=none"]
    found = search.search(inputs.read(str(path), kept), machines, templates)
    held = {each.job.dims.ep: each.prediction.memory_gib for each in found if each.job and each.prediction}
    assert held.keys() == {2, 4, 8} and held[8] < held[4] < held[2]  # of gathered layers fewer experts


def test_sizes_of_a_file_are_searched_and_judged_by_its_own_check(wanted):
    machines = read_cluster("h100x8").scaled(16)
    found = search.search(wanted, machines, shipped())
    stages = {each.job.dims.pp for each in found if each.name == "pipeline" and each.job}
    assert stages == {2, 4, 8}  # 16 parts by parameters leave the first, an embedding, without a decoder layer
    replicas = {each.job.dims.dp // each.job.shard for each in found if each.name == "hsdp" and each.job}
    assert replicas == {2, 4, 8}  # 16 replicas would have one shard each
    (single,) = (each for each in found if each.name == "single")
    assert single.verdict == "cannot run" and "which is one process" in single.reason


def test_switches_and_second_copies_are_searched(wanted):
    """Tensor parallelism with and without its sequence parallelism, and second copies of weights over 2, 4, 8 ranks."""
    machines = read_cluster("h100x8").scaled(16)
    found = search.search(wanted, machines, [read("configs/fsdp_tp.yaml"), read("configs/zero3_hpz.yaml")])
    jobs = [each.job for each in found if each.job]
    copies = {each.strategy.secondary_partition for each in jobs if each.dims.tp == 1}
    assert copies == {2, 4, 8}
    switched = {(each.dims.tp, each.strategy.tp_sequence_parallel) for each in jobs if each.dims.tp > 1}
    assert switched == {(size, on) for size in (2, 4, 8) for on in (False, True)}
    named = {plan_text.sizes(each) for each in jobs}
    assert {"dp 2, tp 8", "dp 2, tp 8 (sequence)", "dp 2 x 8"} <= named
    exact = replace(wanted, fixed=frozenset(("micro_batch", "checkpointing")))
    plain, cut = (
        search.sized(exact, machines, read("configs/fsdp_tp.yaml"), {"tp": 8, "tp_sequence": on})
        for on in (False, True)
    )
    assert plain.prediction and cut.prediction and cut.prediction.memory_gib < plain.prediction.memory_gib


def test_a_switch_that_a_file_sets_is_evaluated_as_it_stands(wanted, tmp_path):
    switch = "parallelism_config.parallelism_config_tp_sequence_parallel=true"
    path = write_changed(Path("configs/fsdp_tp.yaml"), [switch], tmp_path)
    machines = read_cluster("h100x8")
    for name, expected in (("configs/fsdp_tp.yaml", False), (str(path), True)):
        (choice,) = search.evaluate(wanted, machines, [read(name)])
        assert choice.job and choice.job.strategy.tp_sequence_parallel is expected


def test_a_host_without_the_memory_cannot_offload(wanted):
    """8.03e9 parameters, 22 bytes each, are 164.5 GiB on a node."""
    machines, templates = read_cluster("h100x8"), [read("configs/zero3_offload.yaml")]
    small = replace(machines, host=replace(machines.host, memory_gib=164))
    assert search.evaluate(wanted, machines, templates)[0].prediction
    assert search.evaluate(wanted, small, templates)[0].reason.startswith(
        "offloading needs 165 GiB of host memory per node, which has 164"
    )


def test_a_cpu_has_no_memory_beside_its_own_to_offload_to(wanted):
    """Of 64 GiB, half of 164.5 and, with states on a disk, sums of 4 bytes and buffers of 1e9 x 4 x 4 + 5e8 x 2."""
    choices = search.evaluate(wanted, read_cluster("cpux2"), [read(f"configs/{name}.yaml") for name in OFFLOADING])
    held = {}
    for each in choices:
        assert each.job
        (only,) = memory.anatomy(each.job)
        held[each.name] = sum(line.backward for line in only.lines if line.name == "offloaded states") / GIB
    assert held == {"zero3_offload": pytest.approx(82.3, abs=0.1), "zero3_nvme": pytest.approx(14.96 + 15.83, abs=0.01)}
    assert choices[0].verdict == "too large"
    (on_gpu,) = search.evaluate(wanted, read_cluster("h100x8"), [read("configs/zero3_offload.yaml")])
    assert on_gpu.job and "offloaded states" not in [line.name for line in memory.anatomy(on_gpu.job)[0].lines]


def test_gpipe_needs_less_memory_with_larger_micro_batches(wanted):
    """Each of a step's micro-batches keeps the gradient of the whole head: 1.96 GiB, of 32 rows 63 GiB, of 16 half."""
    machines, template = read_cluster("h100x8").scaled(64), read("configs/pipeline_gpipe.yaml")
    fixed = replace(wanted, fixed=frozenset(("micro_batch", "checkpointing")))
    least, larger = (
        search.sized(fixed.with_memory(rows, "full"), machines, template, {"pp": 8}).verdict for rows in (1, 2)
    )
    assert (least, larger) == ("too large", "tight")
    found = search.sized(wanted, machines, template, {"pp": 8})
    assert found.verdict in ("fits", "tight") and found.job and found.job.micro_batch > 1


def test_slow_choices_have_a_speed():
    assert [plan_text.rate(each) for each in (60519.4, 12.4, 0.2998)] == ["60,519", "12", "0.3"]


def test_a_fixed_setting_is_not_searched(config):
    fixed = inputs.read(config, ["batch.micro_batch_size=2", "memory.activation_checkpointing=full"])
    assert search.micro_batches(fixed, 4) == [2] and search.checkpointings(fixed) == ["full"]
    free = inputs.read(config, ["batch.global_batch_size=24"])
    assert search.micro_batches(free, 4) == [1, 2, 4, 6] and search.checkpointings(free) == [
        "none",
        "selective",
        "full",
    ]


def choice(wanted, name: str, seconds: float, gib: float = 40.0, high: float = 45.0, stack: str = "fsdp2") -> Choice:
    job = a_job(strategy=strategy(8, zero=3, shard=8), stack=stack)
    found = Prediction(gib, (gib, high), gib, gib <= 79.1, "weights", seconds, (0.9 * seconds, 1.4 * seconds))
    return Choice(name, job=job, prediction=found, tokens=256 * 4096)


def test_ties_are_ordered_by_simplicity_then_headroom(wanted):
    """Within 7 % of the fastest of its stack: a tie. Beyond that a choice of the same stack is slower."""
    fast = choice(wanted, "hsdp", 1.0)
    simple, large = choice(wanted, "ddp", 1.06), choice(wanted, "fsdp", 1.04, gib=50)
    small, slow = choice(wanted, "fsdp", 1.04, gib=30), choice(wanted, "ddp", 1.25)
    found = search.ranked([slow, fast, large, small, simple])
    assert [(each.name, each.prediction.seconds, each.tie) for each in found if each.prediction] == [
        ("ddp", 1.06, True), ("fsdp", 1.04, True), ("fsdp", 1.04, True), ("hsdp", 1.0, True), ("ddp", 1.25, False),
    ]  # fmt: skip
    assert found[1].prediction == small.prediction
    assert 1.05 < 2.71828**COMPARED < 1.1


def test_of_equally_simple_ties_the_one_with_smaller_groups_comes_first(wanted):
    """Tensor parallelism of 2 before 8, although 8 need less memory."""
    pair, eight = (
        replace(choice(wanted, "fsdp_tp", 1.0, gib), job=a_job(strategy=strategy(8 // size, size), stack="fsdp2"))
        for gib, size in ((50, 2), (20, 8))
    )
    assert [each.prediction for each in search.ranked([eight, pair])] == [pair.prediction, eight.prediction]


def test_ranks_without_a_row_come_last_and_are_counted(wanted):
    """256 rows of a step on 8 ranks, and on 300, of which 44 get none; neither is a tie of the other."""
    fed, twin = choice(wanted, "fsdp", 2.0), choice(wanted, "hsdp", 2.0)
    assert fed.job and fed.idle_ranks == 0
    job = replace(fed.job, strategy=strategy(300, zero=3, shard=300))
    idle = replace(fed, name="ddp", job=job, prediction=choice(wanted, "", 1.0).prediction)
    found = search.ranked([idle, replace(idle, name="zero1"), fed, twin])
    assert [(each.name, each.tie) for each in found] == [
        ("fsdp", True), ("hsdp", True), ("ddp", False), ("zero1", False),
    ]  # fmt: skip
    assert idle.idle_ranks == 44
    assert "; 44 of 300 data-parallel ranks get no row)" in plan_text.answer(idle, 0)
    assert "get no row" not in plan_text.answer(fed, 0)


def with_interval(each: Choice, low: float, high: float) -> Choice:
    assert each.prediction
    ends = each.prediction.seconds * low, each.prediction.seconds * high
    return replace(each, prediction=replace(each.prediction, seconds_interval=ends))


def test_another_stack_is_a_tie_within_the_interval_of_a_less_certain_one(wanted):
    fast = with_interval(choice(wanted, "fsdp", 1.0), 0.8, 1.4)
    other, slower = (choice(wanted, "zero1", seconds, stack="deepspeed") for seconds in (1.35, 1.45))
    other, slower = (with_interval(each, 0.9, 1.2) for each in (other, slower))
    assert [(each.name, each.tie) for each in search.ranked([fast, other])] == [("zero1", True), ("fsdp", True)]
    assert [each.tie for each in search.ranked([fast, slower])] == [False, False]


def test_a_simple_choice_does_not_win_by_being_uncertain(wanted):
    """Mixtral on 64 GPUs: ZeRO-3 is simpler than FSDP with experts on ranks, slower by 31 %, and less certain."""
    fast = with_interval(choice(wanted, "fsdp_ep", 1.0), 0.88, 1.53)
    simple = with_interval(choice(wanted, "zero3", 1.31, stack="deepspeed"), 0.55, 1.95)
    assert [(each.name, each.tie) for each in search.ranked([simple, fast])] == [("fsdp_ep", False), ("zero3", False)]
    near = with_interval(choice(wanted, "zero3", 1.05, stack="deepspeed"), 0.55, 1.95)
    assert [(each.name, each.tie) for each in search.ranked([near, fast])] == [("zero3", True), ("fsdp_ep", True)]


def test_a_less_certain_choice_of_its_library_does_not_displace_one(wanted):
    """8 billion parameters on 8 GPUs: context parallelism, which no public run has, is faster than FSDP by 7.6 %."""
    plain = with_interval(choice(wanted, "fsdp", 1.076, stack="fsdp2"), 0.99, 1.4)
    cut = with_interval(choice(wanted, "fsdp_cp", 1.0, stack="fsdp2"), 0.88, 1.53)
    assert [(each.name, each.tie) for each in search.ranked([cut, plain])] == [("fsdp", True), ("fsdp_cp", True)]
    slow = with_interval(choice(wanted, "fsdp", 1.6, stack="fsdp2"), 1.5, 2.0)  # below the other's interval
    assert [(each.name, each.tie) for each in search.ranked([cut, slow])] == [("fsdp_cp", False), ("fsdp", False)]
    certain = with_interval(cut, 0.92, 1.3)
    assert [each.name for each in search.ranked([certain, plain])] == ["fsdp_cp", "fsdp"]


def test_what_is_faster_than_the_answer_is_a_tie(wanted):
    """Slower by 9 % than the best of its own stack, which is less certain than the answer."""
    answer = choice(wanted, "fsdp", 1.0)
    best, worse, slow = (
        with_interval(choice(wanted, "pipeline", seconds, stack="deepspeed"), 0.69, 1.52)
        for seconds in (0.91, 0.995, 1.2)
    )
    found = search.ranked([slow, worse, answer, best])
    assert [(each.prediction, each.tie) for each in found] == [
        (answer.prediction, True), (best.prediction, True), (worse.prediction, True), (slow.prediction, False),
    ]  # fmt: skip


def test_fits_is_judged_by_the_upper_end_of_the_interval(wanted):
    verdicts = [choice(wanted, "fsdp", 1.0, gib, high).verdict for gib, high in ((70, 79), (70, 80), (80, 81))]
    assert verdicts == ["fits", "tight", "too large"]
    tight, fits = choice(wanted, "ddp", 1.0, 70, 80), choice(wanted, "fsdp", 2.0)
    assert [each.verdict for each in search.ranked([tight, fits])] == ["fits", "tight"]


def test_the_fewest_gpus_are_the_fewest(wanted):
    whole, templates = read_cluster("a100_40gbx8"), [read("configs/fsdp.yaml")]
    found = remedies.more_gpus(wanted, whole, templates, 0)
    fitting = [
        gpus
        for gpus in (*range(1, 8), 8, 16, 24)
        if any(each.verdict == "fits" for each in search.search(wanted, whole.scaled(gpus), templates))
    ]
    assert found and found.job and found.job.dims.world_size == fitting[0] > 1


@pytest.mark.parametrize(
    ("rows", "changed"),
    [(48, ""), (32, ", with batch.global_batch_size=48 for a row per rank, which changes what is trained")],
)
def test_more_gpus_than_rows_are_proposed_with_more_rows(rows, changed):
    """2 replicas of 70 billion parameters fit on 48 GPUs, of which 16 would get none of 32 rows."""
    wanted = inputs.read("benchmarks/planner/llama_70b.json", [f"batch.global_batch_size={rows}"])
    whole, templates = read_cluster("h100x8"), [read("configs/hsdp.yaml")]
    found = remedies.more_gpus(wanted, whole, templates, 16)
    assert found and found.job and (found.job.dims.dp, found.idle_ranks) == (48, 48 - rows)
    (line,) = remedies.rejected(search.search(wanted, whole.scaled(16), templates), wanted, whole, False)
    assert line.endswith(f"; it fits on 48 GPUs{changed}")


def test_what_is_tight_is_not_said_to_fit(wanted):
    """FSDP on GPUs of every size: where a hint says that it fits, or is tight, the plan says so, too."""
    templates, seen = [read("configs/fsdp.yaml")], set()
    for gb in (11, 12, 14, 18, 24):
        machines = read_cluster(f"h100-{gb}gbx8")
        found = remedies.more_gpus(wanted, machines, templates, 4)
        if found and found.job:
            gpus = found.job.dims.world_size
            (planned,) = search.search(wanted, machines.scaled(gpus), templates)
            assert found.verdict == planned.verdict
            assert remedies.elsewhere(found).startswith(
                f"{'fits' if planned.verdict == 'fits' else 'is tight'} on {gpus} GPUs"
            )
            seen.add(planned.verdict)
    assert seen == {"fits", "tight"}


def test_a_strategy_with_rows_for_all_ranks_is_proposed_first():
    wanted = inputs.read("benchmarks/planner/llama_70b.json", ["batch.global_batch_size=32"])
    whole = read_cluster("h100x8")
    both = [read("configs/hsdp.yaml"), read("configs/zero3.yaml")]
    found = remedies.more_gpus(wanted, whole, both, 16)
    assert found and (found.name, found.idle_ranks) == ("zero3", 0)


@pytest.mark.parametrize(
    ("family", "strategy", "axis"),
    [
        ("mixtral", "pp_fsdp_tp", "pp"),
        ("mixtral", "fsdp_tp", "tp"),
        ("mixtral", "fsdp_cp", "cp"),
        ("phi3", "pipeline_1f1b", "pp"),
    ],
)
def test_a_family_that_an_engine_does_not_take_is_not_planned(family, strategy, axis, tmp_path):
    """A run would find it out when all ranks have started."""
    fields = json.loads(Path("benchmarks/planner/llama_8b.json").read_text()) | {"model_type": family}
    fields |= {"num_local_experts": 8, "num_experts_per_tok": 2} if family == "mixtral" else {}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for tried in (False, True):
        wanted = inputs.read(str(tmp_path / "config.json"), [f"model.unproven={tried}"])
        (choice,) = search.evaluate(wanted, read_cluster("h100x8").scaled(64), [read(f"configs/{strategy}.yaml")])
        if tried and axis != "pp":  # as the engines do
            assert "is not among the families" not in choice.reason
            continue
        assert not choice.prediction and f"{axis}_size: found" in choice.reason
        assert f"a {family} is not among the families" in choice.reason
        assert axis == "pp" or "try it with model.unproven: true" in choice.reason


def test_a_published_config_is_emitted_as_it_is(tmp_path):
    fields = json.loads(Path("benchmarks/planner/llama_8b.json").read_text())
    extra = {"torch_dtype": "bfloat16", "experts_per_token": 4, "initial_context_length": 4096}
    (tmp_path / "config.json").write_text(json.dumps(fields | extra))
    command = ["plan", str(tmp_path / "config.json"), "--cluster", "h100x8", "--output", str(tmp_path / "plan")]
    assert main([*command, "--launcher", "slurm"]) == 0
    emitted = yaml.safe_load((tmp_path / "plan" / "recipe.yaml").read_text())["model"]["config"]
    assert (fields | extra).items() <= emitted.items()
