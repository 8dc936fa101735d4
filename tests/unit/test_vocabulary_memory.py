"""With a vocabulary of 128k the logits are the largest tensor of a step by far, and are never all there at once."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vocabulary_probe import VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 2048
RECIPE = """
output_dir: {folder}/run
steps: 1
precision: {precision}
model:
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {{vocabulary_size: 300}}
data: {{path: {folder}/texts, cache_dir: {folder}/cache, validation_fraction: 0.5}}
batch: {{global_batch_size: 4, micro_batch_size: 4, sequence_length: 512}}
optimizer: {{learning_rate: 1e-3}}
"""


@pytest.mark.full  # test_chunked_head.py counts the bytes of the tensors every day
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_does_not_hold_the_logits(precision, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(64):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(str(number * k) for k in range(200)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, precision=precision))
    probe = [sys.executable, str(Path(__file__).with_name("vocabulary_probe.py")), str(recipe)]
    done = subprocess.run(probe, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])
    assert 0.9 * TOKENS < found["tokens"] <= TOKENS
    assert found["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.02)  # of an untrained model
    # 1,051 MB in fp32, which the loss is taken in; full ones took three times that. A chunk is 256 tokens, 131 MB, and
    # there are five tensors like it at once
    assert found["growth"] < 0.8 * TOKENS * VOCABULARY * 4


def environment() -> dict[str, str]:
    """As a user's run has it: malloc's settings are samecurve's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return own | {"PYTHONPATH": str(ROOT)}
