"""embed's loss, gradient, metrics and export against those of sentence-transformers.

It is no dependency of this repository: scripts/test.sh --full installs it into a folder of its own, which
SAMECURVE_SENTENCE_TRANSFORMERS names, and it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_embed import BERT, made

from samecurve.config.schema import Adapter, Embed, Model
from samecurve.export import hf_export
from samecurve.interfaces.engine import EvalResult
from samecurve.models import weights
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.tasks import registry

pytestmark = pytest.mark.full
FOLDER = os.environ.get("SAMECURVE_SENTENCE_TRANSFORMERS", "")
COLUMNS = ("anchor", "positive", "negative_1", "negative_2")
PROGRAM = """
import json, sys
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

folder, temperature = sys.argv[1], float(sys.argv[2])
rows = [json.loads(line) for line in open(f"{folder}/rows.jsonl")]
model = SentenceTransformer(f"{folder}/model", device="cpu").eval()
loss = MultipleNegativesRankingLoss(model, scale=1 / temperature)
columns = [[row[name] for row in rows] for name in sys.argv[3:]]
value = loss([dict(model.preprocess(texts)) for texts in columns], None)
value.backward()
corpus = {text: text for texts in columns[1:] for text in texts}
queries = {str(n): text for n, text in enumerate(columns[0])}
relevant = {str(n): {text} for n, text in enumerate(columns[1])}
evaluator = InformationRetrievalEvaluator(queries, corpus, relevant, accuracy_at_k=[1, 5], mrr_at_k=[10])
found = {
    "embeddings": model.encode(columns[0], convert_to_numpy=True).tolist(),
    "loss": value.item(),
    "gradient": {n: p.grad.tolist() for n, p in model[0].auto_model.named_parameters() if p.grad is not None},
    "metrics": evaluator(model),
}
json.dump(found, open(f"{folder}/found.json", "w"))
"""

ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer

folder = sys.argv[1]
texts = [json.loads(line)["anchor"] for line in open(f"{folder}/rows.jsonl")]
model = SentenceTransformer(f"{folder}/model", device="cpu").eval()
json.dump(model.encode(texts, convert_to_numpy=True).tolist(), open(f"{folder}/found.json", "w"))
"""


def rows() -> list[dict]:
    """Texts of different lengths, some too long for a row, some positives twice."""
    draw = np.random.default_rng(4)

    def text() -> str:
        return " ".join(draw.choice(list("abcdefgh"), draw.integers(1, 12)))

    found = [dict.fromkeys(COLUMNS) | {name: f"{text()} {n} {name}" for name in COLUMNS} for n in range(12)]
    found[5]["positive"] = found[3]["positive"]
    found[7]["negative_1"] = found[3]["positive"]
    return found


needs_sentence_transformers = pytest.mark.skipif(
    not Path(FOLDER, "sentence_transformers").is_dir(),
    reason="SAMECURVE_SENTENCE_TRANSFORMERS names no folder that sentence-transformers is installed in",
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": FOLDER, "HF_HUB_OFFLINE": "1"}


@needs_sentence_transformers
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_loss_gradient_metrics_and_export_are_those_of_sentence_transformers(tmp_path, pooling):
    temperature = 0.07
    recipe = made(tmp_path, rows(), embed=Embed(pooling=pooling, temperature=temperature).model_dump())
    task = registry.load_task(recipe)
    whole, features = exported(recipe, task, tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(temperature), *COLUMNS]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())

    torch.testing.assert_close(features[:, :16], torch.tensor(found["embeddings"]), atol=1e-6, rtol=1e-5)
    context = task.context(features.detach())
    assert context["row_loss"].mean().item() == pytest.approx(found["loss"], rel=1e-5)
    (features * context["gradient"]).sum().div(len(features)).backward()
    ours = {name: p.grad for name, p in whole.named_parameters()}
    assert found["gradient"].keys() == ours.keys()
    for name, gradient in found["gradient"].items():
        torch.testing.assert_close(ours[name], torch.tensor(gradient), atol=1e-6, rtol=1e-4)

    task.splits = task.splits.__class__(task.train, task.train, 0, {})
    measured = task.metrics(EvalResult(float("nan"), len(features), features=features.detach()))
    for ours, theirs in (("accuracy_at_1", "accuracy@1"), ("accuracy_at_5", "accuracy@5"), ("mrr_at_10", "mrr@10")):
        assert measured[f"eval_{ours}"] == pytest.approx(found["metrics"][f"cosine_{theirs}"]), ours


def exported(recipe, task, folder: Path):
    """A new model, written as a run does, and the features of all rows by it."""
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    whole = construct(type(skeleton), skeleton.config, torch.device("cpu")).eval()
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    with torch.no_grad():
        weights.load_weights(
            skeleton, recipe, lambda name, tensor: tensors[name].copy_(3 * tensor if "weight" in name else tensor)
        )
    hf_export.export(
        whole.named_parameters(),
        skeleton,
        hf_export.ExportTarget(folder, task.tokenizer, save_task_files=task.save_task_files),
        True,
    )
    return whole, featured(task, whole)


def featured(task, whole) -> torch.Tensor:
    arrays = task.train[np.arange(len(task.train))]
    inputs = {name: torch.from_numpy(array).flatten(0, 1) for name, array in arrays.inputs.items()}
    labels = torch.zeros(len(task.train), dtype=torch.long)
    states = task.outputs(whole(**inputs))
    assert states.shape[-1] == BERT["hidden_size"]
    return task.features(states, labels, inputs["attention_mask"])


@needs_sentence_transformers
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_adapters_export_is_read_too(tmp_path, pooling):
    recipe = made(tmp_path, rows(), embed=Embed(pooling=pooling).model_dump())
    task = registry.load_task(recipe)
    exported(recipe, task, tmp_path / "base")
    settings = Adapter(name="lora", rank=4, alpha=8)
    recipe = recipe.model_copy(update={"model": Model(path=str(tmp_path / "base")), "adapter": settings})
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    whole = construct(type(skeleton), skeleton.config, torch.device("cpu"), settings).eval()
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    with torch.no_grad():
        weights.load_weights(skeleton, recipe, lambda name, tensor: tensors[name].copy_(tensor))
        before = featured(task, whole)
        trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        for parameter in trained.values():  # B starts at 0
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    parameters = ((name, p.detach()) for name, p in trained.items())
    further = task.save_task_files
    hf_export.export(
        parameters, skeleton, hf_export.ExportTarget(tmp_path / "model", task.tokenizer, save_task_files=further), True
    )
    features = featured(task, whole)
    assert (features - before).abs().max() > 0.05
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, str(tmp_path)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads((tmp_path / "found.json").read_text()))
    torch.testing.assert_close(features[:, :16], found, atol=1e-6, rtol=1e-5)
