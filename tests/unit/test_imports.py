"""What a run does not need it does not load: importing DeepSpeed takes seconds, and not every machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
output_dir: {folder}/run
steps: 2
model:
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {{vocabulary_size: 300}}
data: {{path: {folder}/texts, cache_dir: {folder}/cache, validation_fraction: 0.5}}
batch: {{global_batch_size: 2, micro_batch_size: 1, sequence_length: 16}}
optimizer: {{learning_rate: 1e-3}}
evaluate: {{every_steps: 1}}
checkpoint: {{every_steps: 1}}
"""
CODE = """
import os, sys, train
train.main()
with open(f"{os.environ['FOUND']}_{os.environ.get('RANK', '0')}", "w") as stream:
    print("deepspeed" in sys.modules, file=stream)
"""
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_only_deepspeeds_strategies_import_deepspeed(strategy, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(16):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(str(number * k) for k in range(50)))
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "script.py"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    script.write_text(CODE)
    launcher, more = ((), ()) if strategy == "single" else (TORCHRUN, ("--strategy", f"configs/{strategy}.yaml"))
    around = {**os.environ, "PYTHONPATH": str(ROOT), "FOUND": str(tmp_path / "found")}
    command = [sys.executable, *launcher, str(script), str(recipe), *more]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()  # trained, evaluated, saved and exported
    found = sorted(path.read_text() for path in tmp_path.glob("found_*"))
    assert found == ["False\n"] * (1 if strategy == "single" else 2)
