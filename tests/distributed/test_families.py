"""What transformers wrote, loaded by a strategy, trained, exported and read by plain transformers: family by family."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import largest_relative_difference, launch_command
from quantized_folders import quantize
from test_equal_curves import ENGINES
from tiny_families import (
    CONSTANTS,
    OTHERS,
    PACKAGED,
    STORED_ALIKE,
    STORED_OTHERWISE,
    packaged_config,
    round_trip_config,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models.packaged import text_config
from samecurve.models.weight_files import read, weight_files

QUANTIZED = ["gpt_oss-mxfp4", "qwen3_moe-fp8", "mistral-static"]  # family and method
TEXT = [*STORED_OTHERWISE, *STORED_ALIKE, *CONSTANTS, *OTHERS]
# two ran in one process alone, and the text part of the third is no causal model
SHARDED = [name for name in PACKAGED if name not in ("deepseek_vl", "lfm2_vl", "paligemma")]
FAMILIES = [*TEXT, *QUANTIZED, *(f"packaged:{name}" for name in SHARDED)]
PIECES = [FAMILIES[start : start + 10] for start in range(0, len(FAMILIES), 10)]
EVERY_DAY = ["apertus", "gpt_oss-mxfp4", "packaged:qwen3_5"]
WITHOUT_SDPA = {"bloom": "eager", "gpt_oss": "eager", "mamba": "none"}
STRATEGIES = {"single": 1, "fsdp": 2, "zero3": 2}


def config_of(family: str):
    return packaged_config(family.removeprefix("packaged:")) if "packaged:" in family else round_trip_config(family)


def auto(family: str) -> Any:
    return AutoModelForImageTextToText if "packaged:" in family else AutoModelForCausalLM


def folders(families: list[str], folder: Path) -> None:
    for name in families:
        family, _, method = name.partition("-")
        torch.manual_seed(0)
        config = config_of(family)
        text = config.get_text_config()
        for key in ("vocab_size", "vocab_size_per_layer_input"):
            if hasattr(text, key):
                setattr(text, key, 300)
        model = auto(family).from_config(config)
        model.save_pretrained(folder / name / "plain", max_shard_size="100KB")
        shutil.copytree(folder / name / "plain", folder / name / "start")
        if method:
            quantize(folder / name / "start", method)


def trained(workspace, strategy: str, folder: Path, *more: str) -> None:
    path = workspace.strategy(strategy)
    script = str(Path(__file__).with_name("families_probe.py"))
    world = STRATEGIES[strategy]
    arguments = [str(folder), str(workspace.recipe), f"output_dir={folder / strategy}"]
    arguments += [f"batch.micro_batch_size={8 // world}", *more, "--strategy", str(path)]
    run = workspace.execute([*launch_command("fork", path, world, folder, script), *arguments], folder)
    assert run.returncode == 0, run.output


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in weight_files(str(folder)).items()}


def trained_class(family: str) -> str:
    config = config_of(family)
    config = text_config(config) if "packaged:" in family else config
    return AutoModelForCausalLM._model_mapping[type(config)].__name__


def check(name: str, strategy: str, folder: Path, packed: bool = False) -> None:
    family, exported = name.partition("-")[0], folder / name / strategy
    live = torch.load(exported / "logits.pt", weights_only=True)
    alone = torch.load(folder / name / "single" / "logits.pt", weights_only=True)
    assert "error" not in live, live["error"]
    assert live["engine"] == ENGINES[strategy].replace("LlamaForCausalLM", trained_class(family))
    assert live["attention"] == WITHOUT_SDPA.get(family, live["attention"])
    assert largest_relative_difference(live["losses"], alone["losses"]) < 2e-5
    start = folder / name / "plain"
    assert stored(exported) == stored(start)
    if "packaged:" in family:
        before, after = weight_files(str(start)), weight_files(str(exported))
        kept = [name for name in before if any(part in name for part in ("visi", "visual", "projector", "connector"))]
        assert len(kept) >= 5
        assert all(torch.equal(read(before, [name])[name], read(after, [name])[name]) for name in kept)
    model, found = auto(family).from_pretrained(exported, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    with torch.no_grad():
        model.eval()
        logits = alone_in_rows(model, **live["inputs"]) if packed else model(**live["inputs"], use_cache=False).logits
    trains = live["labels"].flatten() != IGNORE_INDEX if packed else slice(None)
    torch.testing.assert_close(logits.flatten(0, 1)[trains], live["logits"].flatten(0, -2), rtol=1e-4, atol=1e-5)


def alone_in_rows(model, input_ids, position_ids) -> torch.Tensor:
    """Compute the logits of each document of packed rows alone."""
    rows, counts = [], []
    for ids, positions in zip(input_ids, position_ids, strict=True):
        sizes = torch.diff((positions == 0).nonzero().flatten(), append=torch.tensor([len(ids)])).tolist()
        rows.append(torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(sizes)]))
        counts.append(len(sizes))
    assert max(counts) > 1
    return torch.stack(rows)


@pytest.mark.parametrize(
    "families",
    [EVERY_DAY, *(pytest.param(piece, marks=pytest.mark.full) for piece in PIECES)],
    ids=["some", *(f"from_{piece[0]}" for piece in PIECES)],
)
def test_round_trip_under_each_strategy(families, workspace, tmp_path):
    assert len(TEXT) >= 80
    folders(families, tmp_path)
    for strategy in STRATEGIES:
        trained(workspace, strategy, tmp_path)
    problems = []
    for family in families:
        for strategy in STRATEGIES:
            try:
                check(family, strategy, tmp_path)
            except (AssertionError, KeyError) as error:
                problems.append(f"{family} under {strategy}: {error!r}")
    assert not problems, "\n".join(problems)


@pytest.mark.full
def test_separated_documents_under_each_strategy(workspace, tmp_path):
    """Packed rows of families that mix documents by themselves: one curve, and the logits of each document alone."""
    families = ["bamba", "gpt_oss", "lfm2", "qwen3_next"]
    folders(families, tmp_path)
    for path in tmp_path.glob("*/start/config.json"):  # rotary positions, which have no weights
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    for strategy in STRATEGIES:
        trained(workspace, strategy, tmp_path, "data.packing=true", "batch.sequence_length=300")
    for family, strategy in product(families, STRATEGIES):
        check(family, strategy, tmp_path, packed=True)
