"""Sharded strategies build a model without any rank ever holding all of it, from scratch and pretrained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import LLAMA, launch_command, long
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LARGE = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
# What two ranks keep, in units of the whole fp32 weights. FSDP2: half of the weights. ZeRO-3: half of the working
# weights, of the fp32 masters and of the gradients. A rank that held the whole model on the way would add one more.
KEPT = {"fsdp": 0.5, "zero3": 1.5}
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
@pytest.mark.parametrize("strategy", KEPT)
def test_no_rank_holds_the_whole_model(strategy, origin, workspace, pretrained, reference):
    path = workspace.strategy(strategy)
    command = launch_command("torchrun", path, 2, workspace.folder, str(Path(__file__).with_name("memory_probe.py")))
    model = {"config": LARGE} if origin == "config" else {"path": str(pretrained)}
    tokenizer = {"path": str(reference.directory / "model")}
    arguments = [f"model={json.dumps(model)}", f"tokenizer={json.dumps(tokenizer)}", "batch.micro_batch_size=2"]
    run = workspace.execute(
        [*command, str(workspace.recipe), *arguments, "--strategy", str(path)],
        workspace.folder,
        MALLOC_ARENA_MAX="1",
        MALLOC_MMAP_THRESHOLD_="65536",  # freed tensors go back to the system, so the peak is of what is held
    )
    assert run.returncode == 0, run.output
    found = json.loads(run.output.split("FOUND ", 1)[1].splitlines()[0])
    assert found["weights_mib"] > 100
    print(found)
    assert found["growth"] < KEPT[strategy] + ON_THE_WAY, found
