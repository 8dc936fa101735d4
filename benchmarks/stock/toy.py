"""What the three stock loops share: the model, the rows, the schedule of saves, and the file of losses.

All numbers that `faults.py` also gives to samecurve stand here, so that no loop has an easier task.
"""

from __future__ import annotations

import json
import os
import random
from datetime import timedelta
from pathlib import Path

SEED, STEPS, SAVE_EVERY, KEEP = 3, 30, 5, 2
GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 256, 300
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-3, 5, 0.1, 1.0
# The default of both libraries is 30 minutes. samecurve gets the same time, as watchdog.timeout_seconds.
TIMEOUT = timedelta(seconds=20)
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))

# tests/distributed/harness.py's, wider: a save then takes some 50 ms, long enough to be hit from outside
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def documents() -> list[str]:
    """Made-up words, with enough structure to learn. samecurve trains on the same texts."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    return [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(250)]


def rows() -> list[dict]:
    """160 full rows, 20 steps an epoch: a run of 30 steps ends in its second epoch. A token is a byte.

    Full rows: where lengths differ, a mean of the ranks' mean losses is not the loss of the batch.
    """
    import torch

    stream = torch.tensor(list(" ".join(documents()).encode()))
    assert len(stream) >= 160 * SEQUENCE
    return [{"input_ids": row, "labels": row} for row in stream[: 160 * SEQUENCE].view(160, SEQUENCE)]


def model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **MODEL))


def record(directory: Path, step: int, loss: float) -> None:
    """One line per step, by rank 0."""
    if RANK == 0:
        with open(directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
