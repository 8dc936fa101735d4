"""What the peers' scripts train: a tiny Llama with random weights, its tokenizer, and texts of uneven lengths."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SEED, BATCH, ACCUMULATED, STEPS, SAVED_AT = 3, 2, 2, 5, 3
ROWS, TESTS = 32, 7  # 4 steps of 2 processes; a round of 3 processes has 6 rows, which 32 do not fill
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *(f"w{number}" for number in range(60))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def model_folder() -> str:
    """Write model and tokenizer once for all processes. Returns their folder."""
    folder = Path(tempfile.gettempdir(), f"samecurve_peers_{os.getuid()}")
    if not folder.exists():
        set_seed(SEED)
        words = tokenizer()
        special = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **special, bos_token_id=None))
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            model.save_pretrained(f"{scratch}/whole")
            words.save_pretrained(f"{scratch}/whole")
            with contextlib.suppress(OSError):  # another process was first
                os.rename(f"{scratch}/whole", folder)
    return str(folder)


def text(draw: random.Random) -> str:
    return "".join(f" w{draw.randrange(60)}" for _ in range(draw.randint(2, 14)))


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Prompts, each with a chosen and a rejected answer of 2 to 14 tokens."""
    draw = random.Random(seed)
    return [{"prompt": f"{text(draw)[1:]}", "chosen": text(draw), "rejected": text(draw)} for _ in range(count)]


def completions(count: int, seed: int) -> list[dict[str, str]]:
    """Prompts, each with an answer."""
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs(count, seed)]


def encoded(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Token ids of prompts and answers; the answers alone are trained."""
    words, rows = tokenizer(), []
    for row in completions(count, seed):
        prompt, answer = words(row["prompt"])["input_ids"], words(row["completion"])["input_ids"]
        answer.append(words.eos_token_id)
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


def judgements(count: int, seed: int) -> list[dict]:
    """Prompts, each with an answer and whether it is wanted: one of three is not."""
    rows = enumerate(completions(count, seed))
    return [{**row, "label": number % 3 > 0} for number, row in rows]


def arguments(script: str, arguments: list[str]) -> tuple[dict, str | None]:
    """Read `--resume_from_checkpoint FOLDER`.

    Returns the settings that all trainers have, and FOLDER. Without one, checkpoints of earlier runs are removed:
    another strategy may have left them.
    """
    checkpoint = arguments[1] if arguments[:1] == ["--resume_from_checkpoint"] else None
    folder = Path("runs/peers", Path(script).stem)
    if checkpoint is None and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "logging_steps": 1,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": SEED,
    }
    return settings, checkpoint
