"""`python -m samecurve plan`: one job, and a table of published runs."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import statistics
from pathlib import Path

import pytest

from samecurve.cli import plan
from samecurve.cli.commands import main
from samecurve.config.schema import Adapter
from samecurve.planner import inputs, model_shape
from samecurve.planner.answers import NEEDED, answer, job_of_row, read_runs
from samecurve.planner.hardware import gpu

RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "planner" / "runs.csv"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return read_runs(RUNS)


@pytest.fixture(scope="module")
def answers(rows) -> dict[str, dict]:
    return {row["id"]: answer(row) for row in rows}


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def errors(rows, answers, wanted: str, measured: str, predicted: str) -> list[float]:
    return [abs(answers[row["id"]][predicted] / float(row[measured]) - 1) for row in rows if row[wanted] == "1"]


def test_every_public_run_is_answered_well(rows, answers):
    """A bound against regressions. Unseen runs are what counts: scripts/fit_planner.py prints their errors."""
    assert len(rows) > 1900 and not any("unsupported" in each for each in answers.values())
    assert statistics.median(errors(rows, answers, "time_ok", "step_s", "step_seconds")) <= 0.10
    assert statistics.median(errors(rows, answers, "memory_ok", "memory_gib", "peak_memory_gib")) <= 0.06
    for each in answers.values():
        assert each["step_seconds_low"] <= each["step_seconds"] <= each["step_seconds_high"]
        assert each["peak_memory_gib_low"] <= each["peak_memory_gib"] <= each["peak_memory_gib_high"]


def test_runs_out_of_memory_are_found_and_others_are_not(rows, answers):
    evidence = {row["id"]: row["oom_evidence"] for row in rows if row["status"] == "oom"}
    assert sum(found == "states" for found in evidence.values()) > 100
    missed = [each for each, found in evidence.items() if answers[each]["fits"]]
    assert [each for each in missed if evidence[each] == "states"] == []
    assert len(missed) <= 0.03 * len(evidence)
    ran = [row["id"] for row in rows if row["status"] == "ran"]
    assert sum(not answers[each]["fits"] for each in ran) <= 0.03 * len(ran)


def test_answers_depend_on_neither_order_nor_names_nor_results(rows, answers, tmp_path):
    """Rows and columns are shuffled, ids replaced, measured columns left out."""
    chosen = random.Random(0).sample(rows, 50)
    source, target = tmp_path / "runs.csv", tmp_path / "out.json"
    names = random.Random(1).sample(NEEDED, len(NEEDED))
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "id": f"new{index}"} for index, row in enumerate(chosen))
    assert main(["plan", "--runs", str(source), "--json", str(target)]) == 0
    found = json.loads(target.read_text())["runs"]
    assert [{**each, "id": ""} for each in found] == [{**answers[row["id"]], "id": ""} for row in chosen]


def test_an_unknown_stack_gets_a_wider_interval(rows):
    row = next(row for row in rows if row["stack"] == "megatron" and row["time_ok"] == "1")
    known, unknown = (answer({**row, "stack": stack}) for stack in ("megatron", "a new one"))
    widths = [each["step_seconds_high"] / each["step_seconds_low"] for each in (known, unknown)]
    assert widths[0] < widths[1]


@pytest.mark.parametrize("change", [{"gpu": "L40S"}, {"gpu": "MI300X"}, {"precision": "fp32"}, {"gpus": "4096"}])
def test_what_no_public_run_has_gets_a_wider_interval(change, rows):
    row = next(row for row in rows if row["stack"] == "nanotron" and int(row["gpus"]) == 512 and row["time_ok"] == "1")
    multiple = int(change.get("gpus", "512")) // 512
    change = {**change, "dp": str(int(row["dp"]) * multiple), "global_batch": str(int(row["global_batch"]) * multiple)}
    known, new = (answer({**row, **each}) for each in ({}, change))
    widths = [each["step_seconds_high"] / each["step_seconds_low"] for each in (known, new)]
    assert widths[1] > widths[0] ** 1.5


COLUMNS = ",".join(NEEDED)


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (COLUMNS, ["runs.csv: no row below the names of the columns"]),
        (f"{COLUMNS}\na{45 * ','}x,y\nb\n", ["runs.csv:2: cells beyond the last column: 'x', 'y'; quote"]),
        (f"{COLUMNS},seq\n", ["column 'seq' is there twice"]),
        (COLUMNS.replace("seq,", "colour,"), ["column 'seq' is missing", "unknown column 'colour'"]),
        ("\xff\xfe\0", ["runs.csv: not a CSV file in UTF-8"]),
    ],
)
def test_a_table_that_cannot_be_read(content, messages, tmp_path, capsys):
    path = tmp_path / "runs.csv"
    assert len(NEEDED) == 45
    path.write_bytes(content.encode("latin-1"))
    assert main(["plan", "--runs", str(path), "--json", str(tmp_path / "x")]) == 2
    shown = capsys.readouterr().err
    assert all(message in shown for message in messages) and not (tmp_path / "x").exists()


def test_a_row_that_ends_early_is_unsupported(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(",".join(NEEDED) + "\nshort,new\n")
    assert answer(read_runs(path)[0])["unsupported"] == "column hidden: found '', expected a positive number"


def test_what_a_row_leaves_out_follows_from_its_other_cells(rows):
    row = next(row for row in rows if row["tp"] == "4" and row["grad_accum"] == "32")
    row, hidden = {**row, "mlp": "gelu"}, int(row["hidden"])
    usual = {"heads": str(hidden // 128), "kv_heads": "", "ffn": str(4 * hidden), "vocab": "50257"}
    left_out = dict.fromkeys([*usual, "micro_batch", "dp"], "")
    assert answer({**row, **left_out}) == answer({**row, **usual})
    implied = {name: value for name, value in row.items() if name not in ("grad_accum", "dp")}
    assert answer({**implied, "grad_accum": "", "dp": ""}) == answer(row)


STRANGE = {
    "gpu": ["V100-32GB", "L4", "MI300X", "NVIDIA H100 PCIe", "B200", "TPU"], "stack": ["", "fsdp2", "nemo", "new"],
    "precision": ["fp8", "fp32", "mxfp8", ""], "zero": ["", "2", "3"], "pp": ["1", "3", "64"], "tp": ["1", "16"],
    "schedule": ["", "gpipe", "interleaved", "DualPipeV", "new"], "virtual_stages": ["", "4"], "ep": ["", "8"],
    "activation_checkpointing": ["", "full", "selective", "new"], "memory_kind": ["nvidia_smi", "new"],
    "experts": ["0", "64"], "seq": ["512", "1048576"], "layers": ["1", "61"], "hidden": ["64", "25600"],
    "vocab": ["", "262144"], "weight_bytes": ["", "1"], "inter_node_gbit": ["", "0", "25"], "gpus_per_node": ["", "72"],
}  # fmt: skip


def test_strange_rows_are_answered(rows):
    chance = random.Random(0)
    for _ in range(100):
        changed = {name: chance.choice(STRANGE[name]) for name in chance.sample([*STRANGE], 5)}
        row = {**chance.choice(rows), **changed}
        found = answer(row)
        numbers = [value for name, value in found.items() if name.startswith(("step", "peak"))]
        assert len(numbers) == 6 and all(0 < value < math.inf for value in numbers), (row, found)


def test_an_unknown_gpu_gets_a_wider_interval(rows):
    """Its rates are an A100's."""
    row = {**next(row for row in rows if row["gpu"] == "A100-80GB"), "gpu_memory_gib": "24"}
    known, unknown = answer(row), answer({**row, "gpu": "RTX 9999"})
    assert known["step_seconds"] == unknown["step_seconds"]
    for end, factor in (("low", 0.5), ("high", 2)):  # of rates that are an A100's, the true ones may differ as much
        assert unknown[f"step_seconds_{end}"] == pytest.approx(factor * unknown["step_seconds"])
    assert known["step_seconds_high"] / known["step_seconds_low"] < 2
    assert known["peak_memory_gib"] == unknown["peak_memory_gib"]
    assert "column gpu: missing" in answer({**row, "gpu": ""})["unsupported"]


def test_a_row_without_memory_takes_it_from_the_kind(rows):
    row = {**next(row for row in rows if row["gpu"] == "A100-80GB"), "gpu_memory_gib": ""}
    found = [job_of_row({**row, "gpu": kind}).memory_gib for kind in ("V100-16GB", "V100-32GB", "V100")]
    assert found == pytest.approx([15.76, 31.7, 31.7])
    assert job_of_row({**row, "gpu": "V100-16GB", "gpu_memory_gib": "15.5"}).memory_gib == 15.5


def test_a_table_names_the_gpus_whose_rates_are_guessed(rows, tmp_path, capsys):
    source, out = tmp_path / "runs.csv", str(tmp_path / "out.json")
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**rows[0], "gpu": kind} for kind in ("RTX 9999", "H100-80GB", "TPU", "RTX 9999"))
    assert main(["plan", "--runs", str(source), "--json", out]) == 0
    told = capsys.readouterr().out
    assert "unknown GPUs, counted as an A100 (column gpu): RTX 9999, TPU" in told


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"layers": "many"}, "column layers: 'many' is not a number"),
        ({"dp": "-3"}, "column dp: found '-3', expected no negative number; leave the cell empty if it is unknown"),
        ({"seq": "nan"}, "column seq: found 'nan', expected a finite number; leave"),
        ({"seq": "inf"}, "column seq: found 'inf', expected a finite number"),
        ({"flash": "-inf"}, "column flash: found '-inf', expected no negative number"),
    ],
)
def test_an_impossible_cell_is_unsupported_with_its_column_and_the_fix(cells, reason, rows):
    assert answer({**rows[0], **cells})["unsupported"].startswith(reason)


def test_words_in_any_case(rows):
    row = next(row for row in rows if row["stack"] == "megatron" and row["activation_checkpointing"] == "full")
    words = ("stack", "mlp", "precision", "activation_checkpointing", "memory_kind")
    assert answer({**row, **{name: row[name].upper() for name in words}}) == answer(row)


def test_a_job_unlike_all_public_runs(rows):
    """The table has neither experts nor context parallelism; a row with both is answered, with wide intervals."""
    base = {**next(row for row in rows if row["mlp"] == "swiglu"), "stack": "new", "gpu": "B300", "gpu_memory_gib": ""}
    sizes = {"gpus": "64", "dp": "32", "cp": "2", "ep": "8", "zero": "1", "shard": "", "memory_kind": "torch_reserved"}
    few, many = (answer({**base, **sizes, "experts": count, "top_k": "2"}) for count in ("8", "64"))
    assert 0 < few["peak_memory_gib"] < many["peak_memory_gib"]
    assert 0 < few["step_seconds_low"] < few["step_seconds"] < few["step_seconds_high"]


def test_one_job(config, tmp_path, capsys):
    """The answer in one line, then the table, then one line for each strategy that is out."""
    out = tmp_path / "plan.json"
    command = ["plan", config, "--cluster", "h100x8", "--gpus", "16", "--why", "--overlap", "--json", str(out)]
    assert main([*command, "--rows", "99", "batch.micro_batch_size=2"]) == 0
    shown = capsys.readouterr().out
    first, _, _, _, header, best, *_ = shown.splitlines()
    assert len(re.findall(r"\([\d.,]+ to [\d.,]+\)", first)) == 3 and "tokens/s" in first and "more are ties" in first
    assert header.split()[:2] == ["strategy", "sizes"] and first.split()[0] == best.split()[0]
    assert re.search(r"^ddp \(dp 16\): 1\d\d GiB of 79, optimizer 60; more GPUs do not help$", shown, re.M)
    assert re.search(r"^single: .*distributed_type: NO, which is one process", shown, re.M)
    assert "communication / computation" in shown
    plans = json.loads(out.read_text())["plans"]
    folder = Path(plan.__file__).resolve().parents[2] / "configs"
    assert {each["strategy"] for each in plans} == {path.stem for path in folder.glob("*.yaml")}
    assert {each["micro_batch_size"] for each in plans if "sizes" in each} == {2}
    for sizes in (each["sizes"] for each in plans if "sizes" in each):
        assert sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"] == 16


def test_a_plan_outside_of_the_repository(config, tmp_path, monkeypatch, capsys):
    """Strategies and their DeepSpeed files are found beside the package."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(Path(config).resolve()), "--cluster", "h100x8", "--why"]) == 0
    assert "zero3" in capsys.readouterr().out


def test_strategies_that_are_named_are_evaluated_as_they_are(config, tmp_path, capsys):
    """In the order given, also where they do not fit, without a search; an override may stand behind them."""
    out, names = tmp_path / "plan.json", ["zero1", "single", "fsdp"]
    files = [f"configs/{name}.yaml" for name in names]
    command = ["plan", config, "--cluster", "a100_40gbx8", "--gpus", "16", "--json", str(out), "--strategy", *files]
    assert main([*command, "batch.sequence_length=8192"]) == 6
    plans = json.loads(out.read_text())["plans"]
    assert [each["strategy"] for each in plans] == names
    assert [each["verdict"] for each in plans] == ["too large", "cannot run", "too large"]
    assert "single: WORLD_SIZE: found 16" in capsys.readouterr().out
    assert {each.get("micro_batch_size", 1) for each in plans} == {1}


def test_values_of_a_single_strategy_file_count_as_in_a_run(config, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"output_dir: x\nsteps: 9\nmodel: {{config: {CONFIG}}}\ntokenizer: {{vocabulary_size: 512}}\n"
        "data: {path: rows.txt}\n"
    )
    for model in (config, str(recipe)):
        out = tmp_path / "plan.json"
        assert main(["plan", model, "--cluster", "h100x8", "--strategy", str(path), "--json", str(out)]) in (0, 6)
        shown = capsys.readouterr().out
        assert 'precision "fp16"' in shown and "batch.micro_batch_size 2" in shown and "mine.json:1" in shown
        assert [plan["micro_batch_size"] for plan in json.loads(out.read_text())["plans"]] == [2]


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tp", "hsdp"])
def test_nothing_fits_and_what_would(name, config, tmp_path, capsys):
    """The smallest number of GPUs with the file's own sizes, and a setting; both are true."""
    cluster = tmp_path / "cluster.yaml"  # with the memory of the host, to which states may be offloaded
    cluster.write_text("{gpu: A100-40GB, nodes: 1, gpus_per_node: 8, host: {memory_gib: 1000}}")
    command = ["plan", config, "--cluster", str(cluster), "batch.sequence_length=2048"]
    command += ["--strategy", f"configs/{name}.yaml", "--gpus"]
    assert main([*command, "4"]) == 6
    shown, message = capsys.readouterr()
    assert shown.splitlines()[0] == message.rstrip()
    (gpus,) = re.findall(rf"or {name} fits on (\d+) GPUs", message)
    assert int(gpus) > 4 and fits([*command, gpus], capsys)
    smaller = int(gpus) - 1 if int(gpus) <= 8 else int(gpus) - 8
    assert not fits([*command, str(smaller)], capsys)
    ((file, settings),) = re.findall(r"--strategy (\S+)(.*?) would fit", message)
    command[command.index(f"configs/{name}.yaml")] = file
    assert fits([*command, "4", *settings.split()], capsys)


def fits(command: list[str], capsys) -> bool:
    """Whether a plan's answer fits, also at the upper end of the memory interval."""
    capsys.readouterr()
    code = main(command)
    assert code in (0, 6)
    return code == 0 and ", fits (" in capsys.readouterr().out.splitlines()[0]


def test_more_gpus_are_what_files_as_they_are_fit_on(config, capsys):
    """Beside --strategy, recomputation is not searched, so that it takes more GPUs than with it."""
    command = ["plan", config, "--cluster", "a100_40gbx8", "batch.sequence_length=2048", "--strategy"]
    assert main([*command, "configs/fsdp.yaml", "--gpus", "4"]) == 6
    (number,) = re.findall(r"^fsdp .*; it fits on (\d+) GPUs$", capsys.readouterr().out, re.M)
    assert fits([*command, "configs/fsdp.yaml", "--gpus", number], capsys)
    assert not fits([*command, "configs/fsdp.yaml", "--gpus", str(int(number) - 8)], capsys)


@pytest.mark.full
def test_rows_that_no_number_of_gpus_can_hold(config, capsys):
    command = ["plan", config, "--cluster", "a100_40gbx8", "batch.sequence_length=1048576"]
    assert main(command) == 6
    (length,) = re.findall(r"batch.sequence_length=(\d+) would fit", capsys.readouterr().err)
    assert fits([*command[:-1], f"batch.sequence_length={length}"], capsys)
    assert not fits([*command[:-1], f"batch.sequence_length={2 * int(length)}"], capsys)


@pytest.mark.full
def test_masks_that_fit_nowhere(config, capsys):
    """sdpa's grow with the square of a row's length; another attention, which is named, has none."""
    command = ["plan", config, "--cluster", "h100x8", "--gpus", "32", "batch.global_batch_size=4"]
    command.append("batch.sequence_length=1048576")
    assert main(command) == 6
    file = re.search(r"--strategy (\S+) .* model.attention=varlen would fit", capsys.readouterr().err)
    assert file and main([*command, "model.attention=varlen"]) == 0
    assert capsys.readouterr().out.startswith(Path(file[1]).stem)


def test_the_answer_is_the_best_of_the_named_strategies(config, tmp_path, capsys):
    """The table keeps their order."""
    files = ["configs/zero3_nvme.yaml", "configs/fsdp.yaml"]
    assert main(["plan", config, "--cluster", "h100x8", "--gpus", "16", "--strategy", *files]) == 0
    first, _, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("fsdp (dp 16") and [row.split()[0] for row in rows[:2]] == ["zero3_nvme", "fsdp"]
    assert "ties" not in first


def test_a_strategy_file_that_is_wrong_is_a_configuration_error(config, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_process: 2\n")
    assert main(["plan", config, "--cluster", "h100x8", "--strategy", str(path)]) == 2
    assert "mine: num_process: unknown key; did you mean num_processes?" in capsys.readouterr().err


def test_what_the_plan_counts_otherwise_is_said(capsys):
    """Other kinds of recomputation have no formulas yet."""
    setting = "memory.activation_checkpointing=every_n_layers"
    assert main(["plan", "recipes/dpo.yaml", "--cluster", "h100x8", setting]) == 0
    shown = capsys.readouterr().out
    assert "task dpo. The reference is the model itself before the first step" in shown
    assert "every_n_layers. It is counted as none" in shown


def test_a_reason_names_its_strategy_once(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "gpt_neo"}))
    assert main(["plan", str(path), "--cluster", "h100x8", "--why"]) == 0
    assert "\npipeline: a pipeline cannot split a model of model_type gpt_neo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "q100x8"], "--cluster q100x8: expected a cluster file"),
        (["--cluster", "h100x8", "--gpus", "12"], "--gpus 12: nodes have 8 GPUs"),
        (["--cluster", "h100x8", "--rows", "0"], "--rows: found 0, but it must be at least 1"),
        (["--cluster", "h100x8", "batch.size=3"], "batch.size: unknown key"),
        ([], "plan needs MODEL_OR_RECIPE and --cluster"),
    ],
)
def test_bad_arguments(config, arguments, message, capsys):
    assert main(["plan", config, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected an object"),
        ('{"text_config": 3}', "text_config: found 3, expected an object"),
        (
            json.dumps(CONFIG | {"hidden_size": 4100}),
            "hidden_size: found 4100, expected a multiple of num_attention_heads, 32, such as 4096; or give head_dim",
        ),
        (
            json.dumps({"model_type": "gpt2", "n_embd": 100, "n_head": 12, "n_layer": 2, "vocab_size": 50257}),
            "n_embd: found 100, expected a multiple of n_head, 12, such as 96",
        ),
        (
            json.dumps(CONFIG | {"vocab_size": 100}, indent=1),
            "config.json:8: vocab_size: found 100, expected",
        ),
        (json.dumps({"text_config": CONFIG | {"vocab_size": 9}}), "text_config.vocab_size: found 9, expected at least"),
        (json.dumps({**CONFIG, "num_hidden_layers": None}), "num_hidden_layers or n_layer is missing"),
        (json.dumps(CONFIG | {"kv_lora_rank": 512}), "kv_lora_rank: the formulas do not cover latent attention"),
        (json.dumps(CONFIG | {"n_shared_experts": 1}), "n_shared_experts: the formulas do not cover shared experts"),
        (json.dumps(CONFIG | {"conv_L_cache": 3}), "conv_L_cache: the formulas do not cover convolutions"),
    ],
)
def test_a_config_that_the_formulas_do_not_cover(content, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["plan", str(path), "--cluster", "h100x8"]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "base.yaml" not in shown


def test_a_small_vocabulary_may_be_replaced(tmp_path, capsys):
    """A tokenizer of its own counts, not the config's number."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"vocab_size": 100}))
    assert main(["plan", str(path), "--cluster", "h100x8", "tokenizer.vocabulary_size=300"]) == 0
    assert main(["plan", str(path), "--cluster", "h100x8", "tokenizer.vocabulary_size=200"]) == 2
    assert "command line: tokenizer.vocabulary_size: found 200" in capsys.readouterr().err


def test_a_name_that_the_hub_cannot_have(capsys):
    assert main(["plan", "my models/llama", "--cluster", "h100x8"]) == 2
    assert "my models/llama: no such file, folder or model" in capsys.readouterr().err


def test_cluster_files(config, tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    path.write_text("gpu: H200\nnodes: 2\ngpus_per_node: 8\ngbit_per_s_per_node: 400\n")
    assert main(["plan", config, "--cluster", str(path), "--strategy", "configs/fsdp.yaml"]) == 0
    assert "on 16 x H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: H200\nnode: 2\ngpus_per_node: 8\n", "node: unknown key"),
        (
            "gpu: RTX 9999\nnodes: 1\ngpus_per_node: 8\n",
            'found "RTX 9999" (text), expected a GPU with known rates: GB200',
        ),
        (
            "gpu: h100\nnodes: 1\ngpus_per_node: 8\ngbit_per_s_per_node: fast\n",
            'found "fast" (text), expected a number',
        ),
        (
            "gpu: h100\nnodes: 1\ngpus_per_node: 8\ngbit_per_s_per_node: .inf\n",
            "found Infinity, expected a finite number",
        ),
        ("- h100\n", "found a list, expected a block of keys"),
        (
            "gpu: H100\nnodes: 1\ngpus_per_node: 8\nreserved_gib: 100\n",
            "reserved_gib: found 100, expected less than the memory of the GPU, 79.1 GiB",
        ),
    ],
)
def test_wrong_cluster_files(text, message, config, tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["plan", config, "--cluster", str(path)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("2 problems" if "node: 2" in text else "1 problem ")


def plan_of(arguments: list[str], tmp_path: Path) -> dict[str, dict]:
    out = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--cluster", "h100x8", "--json", str(out)]) == 0
    return {each["strategy"]: each for each in json.loads(out.read_text())["plans"]}


def test_tokens_are_those_of_the_global_batch(config, tmp_path):
    """4 rows on 8 GPUs are 4 rows, whatever a micro-batch could hold."""
    sizes = ["batch.global_batch_size=4", "batch.micro_batch_size=2", "batch.sequence_length=512"]
    found = plan_of([config, *sizes], tmp_path)["zero3"]
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(4 * 512)


def test_a_recipe_is_planned_only_where_it_may_run(tmp_path, capsys):
    """The rules are those of train.py; what the formulas leave out is said."""
    found = plan_of(["recipes/embed.yaml", "optimizer.name=adafactor", "--why"], tmp_path)
    assert "adafactor" in found["zero3"]["reason"] and "a pipeline supports" in found["pipeline"]["reason"]
    assert found["ddp"]["tokens_per_second"] > 0
    shown = capsys.readouterr().out
    assert "Not in these numbers: precision fp32" in shown and "Not in these numbers: task embed" in shown
    assert "Activations of models without gated MLPs are counted in 16 bits" in shown


def test_a_momentum_encoder_is_one_more_average_of_each_weight():
    bytes_of = [inputs.read("recipes/embed.yaml", [f"embed.queue={queue}"]).average_bytes for queue in (0, 16)]
    assert bytes_of == [0, 4]


def test_kernels_of_liger_are_said_to_be_left_out():
    liger = ["model.kernels=liger", "loss.implementation=liger"]
    requests = [inputs.read("recipes/pretrain.yaml", each) for each in ([], liger)]
    usual, found = (" ".join(inputs.left_out(each, gpu("H100"))) for each in requests)
    assert "liger" not in usual
    assert "model.kernels liger. Norms" in found and "loss.implementation liger. It is counted as chunked" in found


def test_a_cpu_has_rates_of_fp32(capsys):
    assert main(["plan", "recipes/embed.yaml", "--cluster", "cpux2", "--strategy", "configs/ddp.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "precision fp32. Activations of models without gated MLPs" in shown and "bf16 rates" not in shown


def test_the_data_may_be_elsewhere(tmp_path, capsys):
    """The documentation's own command: pretrain names no data. Named data may be missing here, also for --output."""
    assert plan_of(["recipes/pretrain.yaml", "--gpus", "16"], tmp_path).keys() >= {"ddp", "zero3"}
    elsewhere = ["data.path=/elsewhere", "evaluate.path=/other", "--output", str(tmp_path / "emitted")]
    plan_of(["recipes/pretrain.yaml", *elsewhere, "--launcher", "torchrun"], tmp_path)
    assert "data.path=/elsewhere evaluate.path=/other" in (tmp_path / "emitted" / "torchrun.sh").read_text()
    assert main(["plan", "recipes/pretrain.yaml", "data.path=3", "data.pathh=x", "--cluster", "h100x8"]) == 2
    assert "data.pathh: unknown key" in capsys.readouterr().err


def test_a_micro_batch_of_one_is_not_reduced(config, capsys):
    arguments = ["plan", config, "--cluster", "a100_40gbx1", "batch.sequence_length=131072"]
    assert main(arguments) == 6
    shown = capsys.readouterr().err
    assert "fsdp_cp fits on 16 GPUs" in shown and "micro_batch_size" not in shown


RECIPES = sorted(path for path in Path("recipes").glob("*.yaml") if path.stem not in ("base", "tiny"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_planned(recipe, config, tmp_path, capsys):
    """Models of the hub stand in the local cache, or here in a folder."""
    content, folder = recipe.read_text(), Path(config).parent
    more = [f"model.path={folder}"] if re.search(r"^  path: \w+/", content, re.M) else []
    more += [f"distill.teacher={folder}"] if "teacher:" in content else []
    plans = plan_of([str(recipe), *more, "--strategy", "configs/fsdp.yaml"], tmp_path)
    assert plans["fsdp"]["verdict"] == "fits"
    shown = capsys.readouterr().out
    assert ("million of an adapter" in shown) == ("adapter:" in content)
    assert ("a teacher of 8,030.3 million" in shown) == ("teacher:" in content)
    if "teacher:" in content:  # 8.03e9 weights of 2 bytes on 8 ranks
        assert re.search(r"^teacher +1\.87 +1\.87 +1\.87 ", shown, re.M)


def test_frozen_weights_by_hand():
    """Llama 3 8B: 32 layers of 218,103,808 weights in linear layers; 1,050,939,392 others, in 16 bits."""
    shape = model_shape.shape(CONFIG, "config.json")
    found = model_shape.adapted(shape, Adapter(name="lora", rank=16, quantization="4bit"), 2)
    linear = 32 * 218_103_808
    assert found.weight_bytes * shape.parameters == pytest.approx(linear / 2 + 2 * 1_050_939_392)
    assert found.scale_bytes == pytest.approx(linear * (1 / 64 + 4 / 64 / 256))
    # of each layer: rank x (rows + columns)
    pairs = 2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (14336 + 4096)
    assert found.trained * shape.parameters == pytest.approx(32 * 16 * pairs)
    some = model_shape.adapted(shape, Adapter(name="lora", rank=16, target_modules=["q_proj", "v_proj"]), 2)
    assert some.trained * shape.parameters == pytest.approx(32 * 16 * (8192 + 5120))
    assert (some.weight_bytes, some.scale_bytes, some.dequantized) == (2, 0, 0)


def test_a_strategy_that_cannot_run_says_why(capsys):
    arguments = ["plan", "recipes/embed.yaml", "--cluster", "h100x3", "--strategy", "configs/hsdp.yaml"]
    assert main(arguments) == 6
    shown = capsys.readouterr().err
    assert "nothing can run on 3 x H100-80GB" in shown and "but 3 processes cannot form 2 replicas" in shown


def test_the_peak_of_a_plan_is_all_that_a_gpu_holds(config, tmp_path, capsys):
    """The total below the anatomy; the counter of --runs and run.json shows less (docs/planning.md, Which memory)."""
    found = plan_of([config, "--strategy", "configs/fsdp.yaml"], tmp_path)["fsdp"]["peak_memory_gib"]
    total, _ = re.findall(r"^total +(.*)$", capsys.readouterr().out, re.M)
    assert max(map(float, total.split())) == pytest.approx(found, abs=0.1)


def test_states_of_an_optimizer(tmp_path):
    """AdamW keeps 8 bytes per parameter, Lion 4, AdamW in 8 bits 2: by hand on 109,529,856 parameters."""
    data = ["recipes/pretrain.yaml", "data.path=recipes/base.yaml"]
    memory = [
        plan_of([*data, f"optimizer.name={name}", "--strategy", "configs/ddp.yaml"], tmp_path)["ddp"]["peak_memory_gib"]
        for name in ("adamw", "lion", "adamw_8bit")
    ]
    parameters = 32000 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert parameters == 109_529_856
    differences = [(memory[0] - memory[1]) * 2**30, (memory[1] - memory[2]) * 2**30]
    share = 1.01 * 1.08  # rounding and gaps of the allocator
    assert differences == pytest.approx([4 * parameters * share, 2 * parameters * share], rel=1e-4)
