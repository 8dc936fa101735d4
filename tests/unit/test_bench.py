"""The benchmarks: their arithmetic by hand, that each runs at a tiny size, and what it prints. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from samecurve.bench import collectives, dataloader, matmul, options, printing, step, timing
from samecurve.bench.options import UNCHANGED, MeasuredRun, Variant
from samecurve.cli import commands
from samecurve.cli.bench import collectives as command
from samecurve.config import loader as recipe
from samecurve.config.schema import Adapter
from samecurve.data import batches
from samecurve.errors import ConfigurationError
from samecurve.models import lora, matmul_speed
from samecurve.specs.precision import MATMUL_PRECISIONS
from samecurve.strategy.resolve import read_files

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RATIO = "0.00"


@pytest.fixture
def recipe_file(tmp_path) -> str:
    (tmp_path / "texts").mkdir()
    for nth in range(12):
        (tmp_path / "texts" / f"{nth}.txt").write_text(f"{nth} words of some length and more of them " * 20)
    file = tmp_path / "tiny.yaml"
    file.write_text(f"""
output_dir: {tmp_path}/run
steps: 100
precision: fp32
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
tokenizer: {{vocabulary_size: 300}}
data: {{path: {tmp_path}/texts, cache_dir: {tmp_path}/cache}}
batch: {{global_batch_size: 4, micro_batch_size: 2, sequence_length: 16}}
optimizer: {{learning_rate: 1e-3}}
""")
    return str(file)


# the front door


def test_commands_of_a_command_are_listed():
    code = (
        "import sys\nfrom samecurve.cli import commands as cli\n"
        "assert cli.main(['bench', 'step', 'no.yaml']) == 2\n"
        "assert not {'torch', 'transformers', 'accelerate'} & sys.modules.keys()\n"
        "cli.main(['bench', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    from samecurve.cli.commands import BENCH_COMMANDS

    assert set(BENCH_COMMANDS) == {"matmul", "collectives", "memory", "dataloader", "step"}
    assert all(f"\n  {name} " in done.stdout for name in BENCH_COMMANDS)
    assert "no.yaml: cannot be read" in done.stderr


@pytest.mark.parametrize("given", ["1,x", "-1"])
def test_lists_that_are_none_are_refused(given):
    with pytest.raises(ConfigurationError, match=f"--sizes: found {given}, but it must be whole numbers"):
        printing.parse_integers("--sizes", given)
    with pytest.raises(ConfigurationError, match="found 8,0, but it must be whole numbers of at least 1"):
        printing.parse_integers("--sizes", "8,0", least=1)
    with pytest.raises(ConfigurationError, match="--precisions: found fp12, but the names are fp32, tf32, bf16, fp16"):
        printing.parse_names("--precisions", "fp32,fp12", MATMUL_PRECISIONS, ())


# collectives


@pytest.mark.parametrize(
    ("name", "bus"),
    [
        ("all_reduce", 3.5),  # 2 * 7 / 8
        ("ring_all_reduce", 3.5),
        ("all_gather", 1.75),
        ("reduce_scatter", 1.75),
        ("all_to_all", 1.75),
        ("gather", 1.75),
        ("scatter", 1.75),
        ("broadcast", 2),
        ("reduce", 2),
        ("send_recv", 2),
    ],
)
def test_bandwidth_by_hand(name, bus):
    """10^9 bytes in half a second among 8."""
    assert collectives.bandwidths(name, 10**9, 0.5, 8) == (2, bus)


def test_every_collective_has_its_factor_tested():
    (mark,) = test_bandwidth_by_hand.pytestmark
    assert {name for name, _ in mark.args[1]} == set(collectives.COLLECTIVES)


def test_sizes(monkeypatch):
    monkeypatch.setattr(collectives.jobs, "processes", None)  # none of these starts a process, even if let through
    sizes = [command.parse_size("--largest", text) for text in ("64MiB", "64M", "1 KiB", "7", "3B")]
    assert sizes == [2**26, 2**26, 1024, 7, 3]
    assert command.message_sizes(1024, 2**16, 8) == [1024, 8192, 65536]
    assert [collectives.format_bytes(number) for number in (12, 1536, 2**26)] == ["12 B", "1.5 KiB", "64 MiB"]
    for text in ("64 apples", "", "0", "-1"):
        with pytest.raises(ConfigurationError, match="--largest: found"):
            command.parse_size("--largest", text)
    if not torch.cuda.is_available():
        assert commands.main(["bench", "collectives", "--backend", "nccl"]) == ConfigurationError.exit_code
    for processes in ("1", "1000000"):
        assert commands.main(["bench", "collectives", "--num_processes", processes]) == ConfigurationError.exit_code
    assert commands.main(["bench", "matmul", "--sizes", "0"]) == ConfigurationError.exit_code
    with pytest.raises(ConfigurationError, match="no sizes"):
        command.message_sizes(1024, 512, 4)


def test_collectives_at_two_processes(tmp_path):
    """Each gives what it should (the command checks that before it measures), and its row says what JSON does."""
    file = tmp_path / "found.json"
    options = ["--num_processes", "2", "--largest", "4KiB", "--seconds", "0.001", "--json", str(file)]
    arguments = [sys.executable, "-m", "samecurve", "bench", "collectives", "--backend", "gloo", *options]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo, 2 processes on 1 machine, fp32" in done.stdout
    found = json.loads(file.read_text())
    measured = {each["name"] for each in found["timings"]}
    assert measured | found["not_offered"].keys() == set(collectives.COLLECTIVES)
    assert {"all_reduce", "broadcast", "all_gather", "send_recv"} <= measured
    assert f"its time as a multiple of all_reduce's is {RATIO} at 1 KiB, {RATIO} at 4 KiB\n" in re.sub(
        r"\b\d+\.\d\d\b", RATIO, done.stdout
    )
    for name in found["not_offered"]:
        assert f"{name}: not supported by gloo (" in done.stdout
    assert [each["num_bytes"] for each in found["timings"]] == [1024, 4096] * len(measured)
    for each in found["timings"]:
        algorithm, bus = collectives.bandwidths(each["name"], each["num_bytes"], each["seconds"], 2)
        assert (each["algorithm_gb_per_second"], each["bus_gb_per_second"]) == (algorithm, bus)
        size = collectives.format_bytes(each["num_bytes"])
        assert re.search(rf"^{each['name']} +{size} .* {bus:.3g}$", done.stdout, re.MULTILINE)


class World:
    """Two ranks, of which this is the second, without processes."""

    def __init__(self, monkeypatch, **functions):
        monkeypatch.setattr(collectives.dist, "get_rank", lambda: 1)
        monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(collectives, "_slowest", lambda seconds, device: max(seconds, 1e-6))
        for name, function in functions.items():
            monkeypatch.setattr(collectives.dist, name, function)


def test_what_a_backend_lacks_is_told_and_the_rest_measured(monkeypatch):
    def lacking(*_, **__):
        raise RuntimeError("Backend gloo does not support reduce")

    World(monkeypatch, reduce=lacking, broadcast=lambda tensor, src: tensor.fill_(1))
    missing, timed = collectives.measure(["reduce", "broadcast"], [1024], CPU, 0.0)
    assert missing == ("reduce", "Backend gloo does not support reduce")
    assert (timed.name, timed.num_bytes) == ("broadcast", 1024)


def test_other_errors_and_wrong_results_are_errors(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    World(monkeypatch, reduce=broken, broadcast=lambda tensor, src: None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        list(collectives.measure(["reduce"], [1024], CPU, 0.0))
    with pytest.raises(RuntimeError, match="broadcast: rank 1 of 2 got"):
        list(collectives.measure(["broadcast"], [1024], CPU, 0.0))


# matmul


def test_layers_of_a_model():
    sizes = {"num_hidden_layers": 3, "vocab_size": 50, "hidden_size": 8, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=50))
    found = {(layer.num_inputs, layer.num_outputs): (layer.names, layer.count) for layer in matmul.layers(llama)}
    assert found == {
        (8, 8): (("q_proj", "o_proj"), 6),
        (8, 4): (("k_proj", "v_proj"), 6),
        (8, 24): (("gate_proj", "up_proj"), 6),
        (24, 8): (("down_proj",), 3),
        (8, 50): (("lm_head",), 1),
    }
    found = {(layer.num_inputs, layer.num_outputs): layer.count for layer in matmul.layers(gpt2)}
    assert found == {(8, 24): 2, (8, 8): 2, (8, 32): 2, (32, 8): 2, (8, 50): 1}


@pytest.fixture
def adapted() -> LlamaForCausalLM:
    """Matrices of rank 8 between 8 and 24: A of the projections has the shape of their frozen weights."""
    sizes = {"num_hidden_layers": 3, "vocab_size": 50, "hidden_size": 8, "intermediate_size": 24}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        lora.inject(model, Adapter(name="lora", rank=8))
    return model


def test_layers_of_an_adapted_model(adapted):
    found = {(layer.num_inputs, layer.num_outputs, layer.trained): layer for layer in matmul.layers(adapted)}
    assert {key: (layer.names, layer.count) for key, layer in found.items()} == {
        (8, 8, False): (("q_proj", "k_proj", "v_proj", "o_proj"), 12),
        (8, 24, False): (("gate_proj", "up_proj"), 6),
        (24, 8, False): (("down_proj",), 3),
        (8, 50, False): (("lm_head",), 1),
        (8, 8, True): (("lora_A", "lora_B"), 3 * (6 + 5)),
        (24, 8, True): (("lora_A",), 3),
        (8, 24, True): (("lora_B",), 6),
    }


def test_a_frozen_layer_has_no_gradient_of_its_own(monkeypatch):
    """A second for each multiplication of 1,000 tokens by (20, 30): 2 x 1.2e6 FLOPs in 2 seconds."""
    monkeypatch.setattr(matmul, "interleaved", lambda runs, rounds, at_least: dict.fromkeys(runs, 1.0))
    frozen, trained = (matmul.LayerShapes(("q_proj",), 5, 20, 30, trained) for trained in (False, True))
    times = [matmul.layer_time(layer, 1000, "fp32", CPU, 1.0) for layer in (frozen, trained)]
    assert [time.seconds for time in times] == [2, 3]
    assert [time.weight_gradient for time in times] == [None, 1]
    assert [time.tflops for time in times] == pytest.approx([1.2e-6, 1.2e-6])
    assert matmul.tokens_per_second(times, 1000) == pytest.approx(1000 / 25)


@pytest.fixture
def bench_matmul(recipe_file, tmp_path, capsys, monkeypatch):
    """Runs it in some precisions and sizes. Returns what it prints and what it keeps."""
    monkeypatch.setattr("samecurve.bench.matmul.COPY_MIB", {"cpu": 1})
    monkeypatch.setattr(timing, "default_device", lambda: CPU)

    def run(precisions: str, sizes: str) -> tuple[str, dict]:
        file = tmp_path / "matmul.json"
        options = ["--precisions", precisions, "--sizes", sizes, "--seconds", "0.001", "--json", str(file)]
        assert commands.main(["bench", "matmul", recipe_file, *options]) == 0
        return capsys.readouterr().out, json.loads(file.read_text())

    return run


def test_precisions_are_measured_side_by_side():
    assert timing.default_precisions(CPU) == ["fp32", "bf16", "fp16"]
    assert timing.default_precisions(torch.device("cuda")) == ["fp32", "tf32", "bf16", "fp16"]


def test_the_table_says_what_is_frozen(bench_matmul, adapted, monkeypatch):
    monkeypatch.setattr("samecurve.bench.matmul.skeleton_of", lambda *_: adapted)
    told, found = bench_matmul("fp32", "8")
    assert re.search(r"^lm_head +1 +8 -> 50 +\S+ +\S+ +frozen +\S+$", told, re.MULTILINE)
    assert re.search(r"^lora_A, lora_B +33 +8 -> 8( +[\d.e+-]+){4}$", told, re.MULTILINE)
    layers = found["layers"]
    assert [each["weight_gradient"] is None for each in layers] == [not each["layer"]["trained"] for each in layers]


def test_rates_by_hand(monkeypatch):
    """Two seconds for each product of 100 x 100 matrices, and for each copy of a million bytes there and back."""
    monkeypatch.setattr(matmul, "seconds_of", lambda run, at_least: 2.0)
    assert matmul.square(100, "bf16", CPU, 1.0) == pytest.approx(1e-6)
    assert matmul.copies(10**6, CPU, 1.0) == {"on the device": pytest.approx(1e-3)}


def test_the_three_multiplications_are_those_of_autograd():
    runs = matmul_speed.matmul_runs(CPU, torch.float64, matmul_speed.Shape(5, 3, 4))
    cells = dict(zip(runs["forward"].__code__.co_freevars, runs["forward"].__closure__, strict=True))
    inputs, weight = (cells[name].cell_contents.requires_grad_() for name in ("rows", "weight"))
    gradient = runs["input_gradient"].__closure__[0].cell_contents
    runs["forward"]().backward(gradient)
    assert torch.equal(inputs.grad, runs["input_gradient"]())
    assert torch.allclose(weight.grad, runs["weight_gradient"]())


def test_matmul_runs(bench_matmul):
    told, found = bench_matmul("fp32,bf16", "8,16")
    assert re.search(r"^square +fp32 +bf16\n8 x 8 ", told, re.MULTILINE)
    assert re.search(r"^input gradient( +[\d.e+-]+){2}$", told, re.MULTILINE)
    assert found["training_tflops"]["bf16"].keys() == {"forward", "input_gradient", "weight_gradient"}
    assert re.search(r"^q_proj, k_proj, v_proj, o_proj +8 +32 -> 32 ", told, re.MULTILINE)
    assert "layers in fp32, 32 tokens at a time" in told
    assert found["tflops"].keys() == {"fp32", "bf16"} and len(found["layers"]) == 4 and found["versions"]["torch"]


# the loader


def test_how_many_workers_are_enough():
    rates = {0: 100.0, 1: 90.0, 2: 190.0, 4: 200.0}
    assert dataloader.fewest_workers(rates, None) == 2  # 4 gives 5 % more
    assert [dataloader.fewest_workers(rates, needed) for needed in (80, 100, 160, 170)] == [0, 2, 4, None]


def test_what_a_run_needs(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"recipe": {"batch": {"global_batch_size": 32}}, "data_parallel_size": 4})
    )
    steps = [(100.0, 0.0), (2.0, 0.5), (1.5, 0.0), (4.0, 0.75)]  # the first one starts up; then 1, 1.5 and 1 seconds
    lines = [json.dumps({"step": 1, "step_seconds": took, "data_wait_fraction": part}) for took, part in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert dataloader.rows_per_second_of_run(tmp_path) == 8
    with pytest.raises(ConfigurationError, match="--run: .* has no run"):
        dataloader.rows_per_second_of_run(tmp_path / "none")


def test_the_loader_is_measured(recipe_file, tmp_path, capsys):
    file = tmp_path / "found.json"
    options = [
        "--num_workers",
        "0,1",
        "--seconds",
        "0.01",
        "--data_parallel_size",
        "2",
        "--needed",
        "1",
        "--json",
        str(file),
    ]
    assert commands.main(["bench", "dataloader", recipe_file, *options]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"^workers +rows/s\n0 +[\d,]+\n1 +[\d,]+\ndata\.num_workers=0 is enough with 1 process on this host: ",
        told,
        re.MULTILINE,
    )
    assert json.loads(file.read_text())["rows_per_second"].keys() == {"0", "1"}
    for size in ("0", "-1"):
        wrong = ["bench", "dataloader", recipe_file, f"--data_parallel_size={size}"]
        assert commands.main(wrong) == ConfigurationError.exit_code
        assert f"--data_parallel_size: found {size}, but it must be at least 1" in capsys.readouterr().err
    streamed = ["data.streaming=true", f"tokenizer={{path: {tmp_path}}}"]
    assert commands.main(["bench", "dataloader", recipe_file, *streamed]) == ConfigurationError.exit_code
    assert "data.streaming: found true" in capsys.readouterr().err


@pytest.fixture
def host(monkeypatch, tmp_path) -> list[set[int]]:
    """Four physical cores of two threads each, 0 and 4 the first one's. What the process was kept to, one by one."""
    kept = [set(range(8))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: kept[-1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(set(cores)), raising=False)
    monkeypatch.setattr(dataloader, "CORES", tmp_path)
    for core in range(8):
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    return kept


@pytest.mark.parametrize(
    ("processes", "share"), [(1, set(range(8))), (2, {0, 4, 1, 5}), (3, {0, 4}), (4, {0, 4}), (8, {0})]
)
def test_one_process_has_its_share_of_the_cores(host, processes, share):
    with dataloader.bound_to(dataloader.cores_of_one_process(processes)):
        assert host[-1] == share
    assert host[-1] == set(range(8))


def test_a_share_that_cannot_be_given_is_refused(host, recipe_file, capsys, monkeypatch):
    """Before the data are tokenised."""
    monkeypatch.setattr("samecurve.tasks.registry.load_task", None)
    command = ["bench", "dataloader", recipe_file, "--processes_per_node"]
    assert commands.main([*command, "9"]) == ConfigurationError.exit_code
    assert (
        "--processes_per_node: found 9, but this host has 8 cores; give at most one process per core"
        in capsys.readouterr().err
    )
    assert commands.main([*command, "0"]) == ConfigurationError.exit_code
    assert "--processes_per_node: found 0, but it must be at least 1" in capsys.readouterr().err
    monkeypatch.delattr(os, "sched_setaffinity")
    assert commands.main([*command, "2"]) == ConfigurationError.exit_code
    assert "this system cannot bind a process to some of its cores" in capsys.readouterr().err
    with dataloader.bound_to(dataloader.cores_of_one_process(1)):
        assert len(host) == 1


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to some of its cores"
)
def test_workers_have_the_share(recipe_file, monkeypatch, tmp_path, capsys):
    """Of real processes: what a worker may use is what it writes down when it begins."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is one core")
    counted = tmp_path / "cores"

    def init_worker(*_):
        with open(counted, "a") as file:
            file.write(f"{len(os.sched_getaffinity(0))}\n")

    monkeypatch.setattr(batches, "init_worker", init_worker)
    file = tmp_path / "found.json"
    options = ["--seconds", "0.01", "--processes_per_node", str(len(before)), "--json", str(file)]
    assert commands.main(["bench", "dataloader", recipe_file, *options]) == 0
    assert counted.read_text() == "1\n"
    assert os.sched_getaffinity(0) == before
    told = capsys.readouterr().out
    assert f"of one rank that only reads, on 1 of {len(before)} cores" in told
    assert re.search(rf"^data\.num_workers=\d, with {len(before)} processes on this host: more workers", told, re.M)
    found = json.loads(file.read_text())
    assert found["processes_per_node"] == len(before) and found["rows_per_second"].keys() == {"0", "1"}


# the step


def test_step_options_come_from_the_schema(recipe_file):
    found = options.variants(recipe.load_recipe(recipe_file))
    names = [variant.name for variant in found]
    assert names[0] == UNCHANGED and found[0].overrides == ()
    assert {"memory.activation_checkpointing=full", "model.attention=eager", "data.num_workers=1"} <= set(names)
    assert not {"memory.activation_checkpointing=none", "model.attention=auto"} & set(names)  # what the recipe has
    for variant in found[1:]:
        overrides = "precision=bf16", "batch.micro_batch_size=1", *variant.overrides  # some want the one or the other
        assert recipe.read_recipe(recipe_file, overrides).document.problems == [], variant.name


def test_kinds_of_options(monkeypatch, recipe_file):
    from typing import Literal

    from pydantic import create_model

    from samecurve.config.schema import Recipe
    from samecurve.config.section import Section

    compiled = create_model(
        "Compile", __base__=Section, mode=(Literal["off", "full"], "off"), cache=(bool, True), limit=(int, 8)
    )
    fields = {"compile": (compiled, compiled()), "loss": (Literal["plain", "chunked"] | None, None)}
    monkeypatch.setattr(options, "Recipe", create_model("Recipe", __base__=Recipe, **fields))
    now = SimpleNamespace(compile=compiled(), loss=None)
    found = options.variants(now, ("compile", "loss", "absent.key", "steps"))
    assert [variant.name for variant in found[1:]] == [
        "compile.mode=full",
        "compile.cache=false",
        "loss=plain",
        "loss=chunked",
    ]
    # compile.limit and steps are none: numbers without a list of values


def test_verdicts_by_hand():
    base = [MeasuredRun(100.0, 2.0, (4.0, 2.0)), MeasuredRun(50.0, 2.5, (4.0, 2.0))]  # the machine was busy in round 2
    other = [MeasuredRun(150.0, 1.0, (9.0, 9.0)), MeasuredRun(60.0, 1.25, (4.0, 2.5))]
    among = [Variant(UNCHANGED), Variant("x")]
    same, found = options.verdicts({UNCHANGED: base, "x": other}, among)
    assert (same.ratio, same.memory_ratio, same.loss_difference) == (1, 1, 0)
    assert (found.tokens_per_second, found.lowest, found.highest) == (105, 1.2, 1.5)
    assert found.ratio == pytest.approx(1.35) and (found.peak_memory_gib, found.memory_ratio) == (1.25, 0.5)
    assert found.loss_difference == 0.25
    record = {"tokens_per_second": 1.0, "peak_memory_gib": 3.0, "loss": 5.0, "step_seconds": 14.0}
    metrics = [record, {**record, "tokens_per_second": 7.0, "peak_memory_gib": 1.0, "step_seconds": 2.0}]
    assert MeasuredRun.from_metrics(metrics, 1) == MeasuredRun(7.0, 3.0, (5.0, 5.0), 2.0)


@pytest.mark.parametrize(
    ("losses", "expected", "difference"),
    [
        ((4.0, None), (4.0, 2.0), math.inf),
        ((None, None), (4.0, 2.0), math.inf),
        ((4.0,), (4.0, 2.0), math.inf),
        ((4.0, None), (4.0, None), 0),
    ],
)
def test_a_loss_that_one_of_both_lacks_is_a_difference(losses, expected, difference):
    rounds = {UNCHANGED: [MeasuredRun(1.0, 1.0, expected)], "x": [MeasuredRun(1.0, 1.0, losses)]}
    (verdict,) = options.verdicts(rounds, [Variant("x")])
    assert verdict.loss_difference == difference


def test_a_strategys_files_with_other_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    keys = ["zero_optimization.stage3_prefetch_bucket_size=1e4", "communication_data_type=bf16", "num_processes=4"]
    assert all(map(step.is_key, keys))
    recipes_own = ("compile=off", "optimizer.name=sgd", "checkpoint.keep=3", "steps=2", "no_such_key=1")
    assert not any(map(step.is_key, recipes_own))
    path = step.write_changed(Path("configs/zero3.yaml"), keys, tmp_path / "new")
    found, before = read_files(str(path)), read_files("configs/zero3.yaml")
    assert Path(found.deepspeed.name) == tmp_path / "new" / "zero3.json" and path.name == "zero3.yaml"
    zero = before.deepspeed.content["zero_optimization"] | {"stage3_prefetch_bucket_size": 10_000}
    changes = {"zero_optimization": zero, "communication_data_type": "bf16"}
    assert found.deepspeed.content == before.deepspeed.content | changes
    names = {"deepspeed_config_file": found.deepspeed.name}
    block = before.accelerate.content["deepspeed_config"] | names
    assert found.accelerate.content == before.accelerate.content | {"num_processes": 4, "deepspeed_config": block}
    with pytest.raises(ConfigurationError, match="a key of a DeepSpeed JSON, but configs/fsdp.yaml has none"):
        step.write_changed(Path("configs/fsdp.yaml"), keys[:1], tmp_path)
    bench = ["bench", "step", "recipes/quickstart.yaml", "--options", "none", "--variant", keys[0]]
    assert commands.main([*bench, "--output", str(tmp_path / "runs")]) == ConfigurationError.exit_code
