"""What a run does not need it does not load: importing DeepSpeed takes seconds, and not every machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
output_dir: {folder}/run
steps: 2
model:
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {{vocabulary_size: 300}}
data: {{path: {folder}/texts, cache_dir: {folder}/cache, held_out_fraction: 0.5}}
batch: {{global_batch_size: 2, micro_batch_size: 1, sequence_length: 16}}
optimizer: {{learning_rate: 1e-3}}
evaluate: {{every_steps: 1}}
checkpoint: {{every_steps: 1}}
"""
CODE = "import sys, train; train.main(); print('deepspeed' in sys.modules)"


def test_a_single_process_trains_without_deepspeed(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(16):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(str(number * k) for k in range(50)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    command = [sys.executable, "-c", CODE, str(recipe)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()  # trained, evaluated, saved and exported
    assert done.stdout.splitlines()[-1] == "False"
