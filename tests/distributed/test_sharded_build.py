"""Sharded strategies build a model without any rank ever holding all of it, from scratch and pretrained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import LLAMA, long
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LARGE = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
# What two ranks keep, in units of the whole fp32 weights. FSDP2: half of the weights. ZeRO-3: half of the working
# weights, of the fp32 masters and of the gradients. A rank that held the whole model on the way would add one more.
KEPT = {"fsdp": 0.5, "zero3": 1.5}
AS_AT_EVERY_STEP = {"zero1": 1.0}  # DeepSpeed's all-gather of the working weights over gloo
SLACK = 0.05  # of the weights, 8 MiB: the index, buffers of the file system
ON_THE_WAY = 0.5  # a block of the model, the libraries' own buffers, and the allocator's slack


@pytest.fixture(scope="module")
def pretrained(workspace, reference) -> Path:
    folder = workspace.folder / "large"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference.directory / "model")
    fields = {key: value for key, value in LARGE.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("origin", ["path", *long("config")])
@pytest.mark.parametrize("strategy", ["fsdp", *long("zero3")])
def test_no_rank_holds_the_whole_model(strategy, origin, workspace, pretrained, reference):
    model = {"config": LARGE} if origin == "config" else {"path": str(pretrained)}
    found = probe("sharded_build_probe.py", strategy, model, workspace, reference)
    assert found["growth"] < KEPT[strategy] + ON_THE_WAY, found


@pytest.mark.parametrize("strategy", long("ddp", "fsdp", "pipeline", "zero1", "zero3"))
def test_saving_and_loading_hold_a_few_parameters(strategy, workspace, reference, tmp_path):
    found = probe("checkpoint_memory_probe.py", strategy, {"config": LARGE}, workspace, reference, tmp_path / "run")
    few = 4 * found["largest_parameter"] + SLACK
    assert found["streamed"] < few, found
    assert found["loaded"] < few + AS_AT_EVERY_STEP.get(strategy, 0.0), found
    # beside training: this rank's half of weights and moments, once
    assert 1.2 < found["copied"] < 1.5 + few, found


def probe(name: str, strategy: str, model: dict, workspace, reference, output_dir: Path | None = None) -> dict:
    tokenizer = {"path": str(reference.directory / "model")}
    arguments = [f"model={json.dumps(model)}", f"tokenizer={json.dumps(tokenizer)}", "batch.micro_batch_size=2"]
    arguments += [f"output_dir={output_dir}"] if output_dir else []
    # freed tensors go back to the system, so the peak is of what is held
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = workspace.probe(name, strategy, 2, *arguments, launcher="torchrun", **allocator)
    assert found["weights_mib"] > 100
    print(found)
    return found
