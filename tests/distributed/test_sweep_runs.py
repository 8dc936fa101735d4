"""A sweep of real runs: stopped, continued, compared, and its best run exported to GGUF."""

from __future__ import annotations

import json
import re

import pytest
from gguf import GGUFReader

from samecurve.cli import commands

pytestmark = pytest.mark.full
SETTINGS = ["steps=4", "schedule.warmup_steps=0", "evaluate.every_steps=2", "checkpoint.every_steps=2"]
SETTINGS += ["batch.global_batch_size=2", "batch.micro_batch_size=2", "batch.sequence_length=32"]
SETTINGS += ["model.config.num_hidden_layers=1"]


def test_best_of_a_sweep_becomes_a_gguf(tmp_path, capsys):
    output = tmp_path / "sweep"
    sweep = ["sweep", "recipes/quickstart.yaml", "optimizer.learning_rate=1e-5,3e-3", *SETTINGS]
    for count in (0, 2):
        assert commands.main([*sweep, "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        assert printed.count("done already") == count
    best = output / "learning_rate=3e-3"
    assert f"best: {best.name}, held-out loss" in printed
    losses = {}
    for name in ("1e-5", "3e-3"):
        lines = (output / f"learning_rate={name}" / "metrics.jsonl").read_text().splitlines()
        losses[name] = json.loads(lines[-1])["eval_loss"]
    assert losses["3e-3"] < losses["1e-5"] - 1e-3  # the swept value had an effect
    command = re.search(r"python -m samecurve (export .*) --dtype bf16", printed)[1].split()
    assert commands.main([*command, "--format", "gguf", "--dtype", "q8_0"]) == 0
    assert "logits read back from the file differ by at most" in capsys.readouterr().out
    written = GGUFReader(best / "model-gguf-q8_0" / f"{best.name}-q8_0.gguf")
    assert written.fields["general.architecture"].contents() == "llama"
    assert commands.main(["export", str(best), "--checkpoint", "latest", "--format", "gguf"]) == 0
