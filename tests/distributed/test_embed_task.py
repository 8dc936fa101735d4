"""embed under every kind of strategy, against a loop written with transformers and torch alone.

The loop takes the whole global batch in one piece: every anchor against the positives and negatives of all rows. With a
queue, it embeds these by a second model, which follows the first one, and keeps the positives in a list.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import LLAMA, largest_relative_difference, long, relative_l2
from safetensors.torch import load_file
from test_encoder_tasks import BERT, STEPS, Setting, start
from test_equal_curves import CONTEXT
from test_pipeline_schedules import ENGINES as SCHEDULES
from test_plain_loop import train
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoTokenizer

from samecurve.cli import commands
from samecurve.config import loader
from samecurve.data.batches import StepBatches
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
SEQUENCE_LENGTH, HELD_OUT, TEMPERATURE = 48, 21, 0.1
COLUMNS = ("anchor", "positive", "negative")
CLASSES = {"bert": "BertModel", "llama": "LlamaModel"}
ENGINES = {"single": "{}", "ddp": "DistributedDataParallel", "fsdp": "FSDP{}", "tp": "{}"}
ENGINES |= {**SCHEDULES, **dict.fromkeys((*CONTEXT, "fsdp_tp_cp"), "FSDP{}")}
WORLDS = {"single": 1, **dict.fromkeys(("fsdp_tp_cp", "hsdp", "zero3_hpz"), 4)}
POOLING = {"bert": "mean", "llama": "last"}
QUEUE, MOMENTUM = 20, 0.9  # no multiple of the 8 rows of a step; within 10 steps all are replaced


@pytest.fixture(scope="module")
def files(workspace) -> dict[str, Path]:
    """Texts of very different lengths; a number of rows to evaluate on that no batch divides."""
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]

    def text(known: list[str]) -> str:
        return " ".join(draw.choices(known, k=draw.randint(1, 14)))

    found = {}
    for name, count in (("train", 100), ("held_out", HELD_OUT)):
        found[name] = workspace.folder / f"matches_{name}.jsonl"
        with open(found[name], "w") as file:
            for number in range(count):
                known, other = draw.sample(words, 5), draw.sample(words, 5)
                row = {"anchor": f"{text(known)} {number}", "positive": text(known), "negative": text(other)}
                file.write(json.dumps(row) + "\n")
    return found


@pytest.fixture(scope="module")
def settings(workspace, files) -> Callable[..., Setting]:
    """Made when asked for: most of them are for the long tests."""
    made = {}

    def setting(family: str, queue: int = 0) -> Setting:
        if (family, queue) not in made:
            made[family, queue] = _setting(workspace, files, family, queue)
        return made[family, queue]

    return setting


def _setting(workspace, files, family: str, queue: int) -> Setting:
    common = ["task=embed", f"steps={STEPS}", "checkpoint.every_steps=5", f"data.path={files['train']}"]
    common += [f"data.cache_dir={workspace.folder / 'cache'}", "data.packing=false", "data.validation_fraction=0"]
    common += [f"evaluate={{path: {files['held_out']}, every_steps: {STEPS}}}"]
    momentum = f", queue: {queue}, momentum: {MOMENTUM}" if queue else ""
    common += [f"embed={{temperature: {TEMPERATURE}, pooling: {POOLING[family]}{momentum}}}"]
    common += [f"batch.sequence_length={SEQUENCE_LENGTH}", "batch.micro_batch_size=2"]
    tokenizer = registry.load_task(loader.read_recipe(str(workspace.recipe), common).recipe).tokenizer
    fields = dict(BERT if family == "bert" else LLAMA)
    config = AutoConfig.for_model(
        fields.pop("model_type"), vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **fields
    )
    torch.manual_seed(1)
    folder = workspace.folder / f"{family}_embed"
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    overrides = (*common, f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}")
    return Setting(overrides, *plain_loop(workspace, files, family, overrides, queue))


def bare(folder: Path, family: str):
    """Embeddings need no pooler, and one that nothing trains would be one parameter too many."""
    options = {"add_pooling_layer": False} if family == "bert" else {}
    return AutoModel.from_pretrained(folder, dtype=torch.float32, **options)


def plain_loop(workspace, files, family, overrides, queue):
    found = loader.read_recipe(str(workspace.recipe), overrides).recipe
    model = bare(found.model.path, family).train()
    tokenizer = AutoTokenizer.from_pretrained(found.model.path)
    rows = [json.loads(line) for line in files["train"].read_text().splitlines()]
    batches = StepBatches(registry.load_task(found).train, found.seed, found.batch, (0, 1), STEPS)
    counts = []

    def steps():
        follower, older = copy.deepcopy(model), torch.zeros(0, model.config.hidden_size)
        for step in range(STEPS):
            together = [rows[index] for index in batches.rows_of(step)]
            texts = [[row[name] for row in together] for name in COLUMNS]
            anchors = encoded(model, tokenizer, texts[0], family)
            with torch.set_grad_enabled(not queue):
                others = [encoded(follower if queue else model, tokenizer, column, family) for column in texts[1:]]
            counts.append(len(together))
            yield contrasted([anchors, *others, *([older] if queue else [])])
            if queue:  # and the weights are updated
                older = torch.cat([older, functional.normalize(others[0], dim=-1)])[-queue:]
                with torch.no_grad():
                    for average, weight in zip(follower.parameters(), model.parameters(), strict=True):
                        average.mul_(MOMENTUM).add_(weight, alpha=1 - MOMENTUM)

    losses, norms = train(model, steps(), STEPS)
    return losses, norms, counts, {name: p.detach() for name, p in model.named_parameters()}


def encoded(model, tokenizer, texts: list[str], family: str):
    """One text at a time, so there is no padding to go wrong with."""
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=SEQUENCE_LENGTH, return_tensors="pt")
        (states,) = model(input_ids=inputs["input_ids"]).last_hidden_state
        found.append(states.mean(dim=0) if family == "bert" else states[-1])
    return torch.stack(found)


def contrasted(vectors):
    anchors, *candidates = vectors
    similarities = functional.cosine_similarity(anchors[:, None], torch.cat(candidates)[None], dim=-1)
    return functional.cross_entropy(similarities / TEMPERATURE, torch.arange(len(anchors)))


CASES = [("bert", "zero3"), *long(*(("bert", name) for name in ("single", "ddp", "fsdp", "zero2")))]
OF_LLAMA = ("single", "ddp", "fsdp", "zero2", "zero3", "tp", *CONTEXT, "fsdp_tp_cp", *SCHEDULES)
CASES += long(*(("llama", name) for name in OF_LLAMA))


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_follows_the_plain_loop(family, strategy, workspace, settings):
    """Though each rank reads two rows at a time: the loss is that of eight."""
    expected = settings(family)
    run = start(workspace, expected, strategy, WORLDS.get(strategy, 2))
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == WORLDS.get(strategy, 2)
    assert run.facts["engine"] == ENGINES.get(strategy, "DeepSpeedEngine").format(CLASSES[family])
    assert run.column("tokens") == expected.counts == [8] * STEPS
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.norms) < 1e-4
    assert relative_l2(run.weights, expected.weights) < 1e-4


QUEUED = [("bert", "zero3"), *long(*(("bert", name) for name in ("single", "ddp", "fsdp", "zero2", "zero2_offload")))]
QUEUED += long(*(("llama", name) for name in (*OF_LLAMA, "hsdp", "zero1", "zero3_nvme", "zero3_hpz")))


@pytest.mark.parametrize(("family", "strategy"), QUEUED)
def test_a_queue_of_a_momentum_encoder_follows_the_plain_loop(family, strategy, workspace, settings):
    expected = settings(family, QUEUE)
    assert largest_relative_difference(expected.losses, settings(family).losses) > 0.01
    run = start(workspace, expected, strategy, WORLDS.get(strategy, 2))
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == WORLDS.get(strategy, 2)
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.norms) < 1e-4
    assert relative_l2(run.weights, expected.weights) < 1e-4


@pytest.mark.parametrize(
    ("strategy", "after"),
    [("ddp", "zero3"), *long(("zero3", "fsdp"), ("zero2", "single"), ("single", "pipeline_1f1b"), ("tp", "zero2"))],
)
def test_a_queue_goes_on_under_another_strategy(strategy, after, workspace, settings, tmp_path):
    expected = settings("llama", QUEUE)
    before = start(workspace, expected, strategy, WORLDS.get(strategy, 2))
    run = workspace.resume(before, 5, after, WORLDS.get(after, 2), *expected.overrides)
    assert run.returncode == 0, run.output
    assert run.facts["resumed_from"] and run.column("step") == list(range(1, STEPS + 1))
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert relative_l2(run.weights, expected.weights) < 1e-4
    output = ["--checkpoint", "latest", "--output", str(tmp_path / "model")]
    assert commands.main(["export", str(run.directory), *output]) == 0
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found and all(torch.equal(found[name], run.weights[name]) for name in found)


ADAPTER = ("adapter={name: lora, rank: 4}", "optimizer.learning_rate=3e-3")
WITH = [("zero3", ADAPTER, 1e-5), *long(("fsdp", ADAPTER, 1e-5), ("zero2", ADAPTER, 1e-5))]
WITH += long(*((name, ("precision=bf16",), 0.02) for name in ("ddp", "fsdp", "zero2", "zero3", "pipeline_1f1b")))


@pytest.mark.parametrize(("strategy", "more", "tolerance"), WITH)
def test_a_queue_with_an_adapter_or_in_bf16_follows_one_process(strategy, more, tolerance, workspace, settings):
    """One in fp32, for bf16 too."""
    overrides = (*settings("llama", QUEUE).overrides, *more)
    wide = tuple(one for one in overrides if not one.startswith("precision="))
    one, run = workspace.run(None, 1, *wide), workspace.run(strategy, 2, *overrides)
    assert one.returncode == run.returncode == 0, run.output
    assert (run.facts["num_trained_parameters"] < run.facts["num_parameters"]) == (more == ADAPTER)
    assert max(one.column("loss")[:3]) - min(one.column("loss")) > 5 * tolerance
    assert largest_relative_difference(run.column("loss"), one.column("loss")) < tolerance


@pytest.mark.parametrize("strategy", ["zero3", *long("ddp")])
def test_the_export_retrieves_what_the_run_says(strategy, workspace, files, settings):
    """Counted here one text at a time, over 21 rows that two ranks shared."""
    run = start(workspace, settings("bert"), strategy)
    folder = run.directory / "model"
    model, tokenizer = bare(folder, "bert").eval(), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in files["held_out"].read_text().splitlines()]
    with torch.no_grad():
        vectors = [encoded(model, tokenizer, [row[name] for row in rows], "bert") for name in COLUMNS]
        losses = [contrasted(part) * len(part[0]) for part in zip(*(v.split(8) for v in vectors), strict=True)]
    corpus = {}
    for name, found in zip(COLUMNS[1:], vectors[1:], strict=True):
        corpus |= {row[name]: vector for row, vector in zip(rows, found, strict=True)}
    places = []
    for row, anchor in zip(rows, vectors[0], strict=True):
        near = sorted(corpus, key=lambda text: -functional.cosine_similarity(anchor, corpus[text], dim=0).item())
        places.append(1 + near.index(row["positive"]))
    measured = run.metrics[-1]
    assert measured["eval_rows"] == HELD_OUT
    assert measured["eval_loss"] == pytest.approx(sum(losses).item() / HELD_OUT, rel=1e-5)
    assert measured["eval_accuracy_at_1"] == pytest.approx(sum(place <= 1 for place in places) / HELD_OUT)
    assert measured["eval_accuracy_at_5"] == pytest.approx(sum(place <= 5 for place in places) / HELD_OUT)
    inverse = sum(1 / place for place in places if place <= 10)
    assert measured["eval_mrr_at_10"] == pytest.approx(inverse / HELD_OUT)


@pytest.mark.parametrize("data", [False, *long(True)])
def test_the_run_is_measured_again_by_itself(data, workspace, files, settings, tmp_path):
    """In one process, and as well where the data are named."""
    run = start(workspace, settings("bert"), "ddp")
    given = [str(files["held_out"])] if data else []
    command = [sys.executable, "-m", "samecurve", "evaluate", str(run.directory), *given, "--json"]
    done = workspace.execute([*command, str(tmp_path / "found.json")], run.directory)
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]
    assert found == {name: pytest.approx(run.metrics[-1][name], rel=1e-6) for name in found}
    assert {"eval_loss", "eval_accuracy_at_5"} <= found.keys()


@pytest.mark.full
def test_a_run_goes_on_under_another_strategy(workspace, settings):
    expected = settings("bert")
    before = start(workspace, expected, "ddp")
    run = workspace.resume(before, 5, "zero3", 2, *expected.overrides)
    assert run.returncode == 0, run.output
    assert run.facts["resumed_from"] and run.column("step") == list(range(1, STEPS + 1))
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "world", "micro_batch_size"),
    [("ddp", 3, 2), *long(("fsdp", 2, 1), ("fsdp", 2, 4), ("fsdp", 3, 1), ("zero3", 3, 3))],  # 3 ranks: 3, 3 and 2 rows
)
def test_the_micro_batch_and_the_ranks_decide_nothing(strategy, world, micro_batch_size, workspace, settings):
    expected = settings("bert")
    run = workspace.run(strategy, world, *expected.overrides, f"batch.micro_batch_size={micro_batch_size}")
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), expected.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.norms) < 1e-4
