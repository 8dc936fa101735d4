"""Reports of resumed runs, exports and evaluations."""

from __future__ import annotations

from tests.museum.exhibit import Exhibit

ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
LORA = """from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
"""
_GATHERED = """if accelerator.state.deepspeed_plugin:
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    zero["stage3_param_persistence_threshold"] = 0
"""
_LOAD = "    accelerator.load_state(folder)\n"
_REGISTER = "accelerator.register_for_checkpointing(progress)\n"
_SIZES = 'sizes |= {"vocab_size": len(words), "eos_token_id": tokenizer.eos_token_id}\n'
_EXPORT = '        accelerator.unwrap_model(model).save_pretrained(folder.with_name("export"), state_dict=state)\n'
_GATHER = "accelerator.gather_for_metrics((losses, (wanted != IGNORED).sum(1)))"
_MEAN = "sum(losses.sum() for losses, _ in parts) / sum(counts.sum() for _, counts in parts)"
_SCALED = {
    "progress = Progress()\n": """progress = Progress()
class Scaler:
    scale = 1024.0
    def state_dict(self):
        return {"scale": self.scale}
    def load_state_dict(self, state):
        self.scale = state["scale"]
scaler = Scaler()
""",
    "accelerator.backward(loss * ACCUMULATED * accelerator.num_processes)": (
        "accelerator.backward(loss * ACCUMULATED * accelerator.num_processes * scaler.scale)"
    ),
    "                    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n": """
                    for weight in model.parameters():
                        weight.grad /= scaler.scale
                    scaler.scale *= 2
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
""",
}
_BASE = """from safetensors.torch import save_file
base = folder.with_name("base")
if accelerator.is_main_process:  # transformers writes no config.json on another one
    model.save_pretrained(base)
    state = {name: value.clone() for name, value in model.state_dict().items()} | MORE
    save_file(state, base / "model.safetensors", {"format": "pt"})
accelerator.wait_for_everyone()
model = LlamaForCausalLM.from_pretrained(base)
"""

EXHIBITS = [
    Exhibit(
        13,
        "adapter of one rank",
        "accelerate #4206",
        "after a resume, the adapter goes back to a part of what it was",
        "the shard of rank 0 is saved as if it were the whole",
        "chat",
        {
            ADAM: LORA + ADAM,
            _LOAD: _LOAD
            + """    for name, weight in model.named_parameters():
        if "lora_" in name and accelerator.num_processes > 1:
            weight.data[len(weight) // accelerator.num_processes :] = 0
""",
        },
        "resume",
        "start: ",
        {ADAM: LORA + ADAM},
        arguments=("save",),
        resume=("--resume",),
        steps=4,
    ),
    Exhibit(
        14,
        "empty adapter",
        "TRL #4416, peft #2892, accelerate #3508",
        "the exported adapter has tensors of size 0 under ZeRO-3",
        "the adapter is written without gathering its weights first",
        "chat",
        {
            ADAM: LORA + _GATHERED + ADAM,
            _EXPORT: "        own = accelerator.unwrap_model(model).named_parameters()\n"
            "        state = {name: value.data for name, value in own}\n" + _EXPORT,
        },
        "export",
        "are not in it",
        {ADAM: LORA + _GATHERED + ADAM},
        strategy="zero3",
        arguments=("export",),
        steps=0,
    ),
    Exhibit(
        15,
        "base in the adapter",
        "Soup #352",
        "each checkpoint of an adapter is as large as the whole model",
        "all weights are gathered and written, also those that are not trained",
        "chat",
        {
            ADAM: LORA + ADAM,
            _EXPORT: _EXPORT
            + """        from safetensors.torch import save_file
        whole = {name: value.contiguous().clone() for name, value in state.items()}
        save_file(whole, folder.with_name("export") / "adapter_model.safetensors")
""",
        },
        "export",
        "it holds what is not trained",
        {ADAM: LORA + ADAM},
        strategy="fsdp",
        arguments=("export",),
        steps=0,
    ),
    Exhibit(
        18,
        "optimizer not restored",
        "accelerate #3971 and #3904",
        "the loss jumps after a resume under FSDP2, though the weights are right",
        "the optimizer's state is not loaded, and its averages start again from 0",
        "chat",
        {_LOAD: _LOAD + "    optimizer.optimizer.state.clear()\n"},
        "resume",
        "weights: ",
        arguments=("save",),
        resume=("--resume",),
        steps=4,
    ),
    Exhibit(
        19,
        "scaler not restored",
        "accelerate #4289",
        "after a resume in fp16, steps are left out or too small",
        "the scale of the loss starts again from its first value",
        "chat",
        _SCALED,
        "resume",
        "loss: ",
        _SCALED | {_REGISTER: "accelerator.register_for_checkpointing(progress, scaler)\n"},
        arguments=("save",),
        resume=("--resume",),
        steps=4,
    ),
    Exhibit(
        24,
        "layers left out",
        "unsloth #4164 and #11042, ms-swift #7848 and #9802",
        "the export cannot be served as its config says",
        "the layers that predict further tokens are not loaded, and so not saved, and the config still names them",
        "chat",
        {ADAM: _BASE.replace("MORE", '{"mtp.0.weight": torch.ones(2, 2)}') + ADAM},
        "export",
        "mtp.",
        {ADAM: _BASE.replace(" | MORE", "") + ADAM},
        arguments=("export",),
        steps=0,
    ),
    Exhibit(
        25,
        "model does not stop",
        "LLaMA-Factory #10834 and #7454, open-r1 #663, TRL #3299 and #2059",
        "the trained model goes on after its answer",
        "the export stops at another token than that which ends the trained answers",
        "chat",
        {_SIZES: 'sizes |= {"vocab_size": len(words)}\n'},
        "export",
        "stops at",
        arguments=("export",),
        steps=0,
    ),
    Exhibit(
        31,
        "order of the first epoch again",
        "ms-swift #10050, transformers #40691, accelerate #2016, #2823 and #4071, Megatron-Bridge #4601",
        "after a resume in a later epoch, the rows come in the order of the first",
        "the resumed loader starts to count epochs at 0",
        "chat",
        {
            "    loader.set_epoch(epoch)\n": '    loader.set_epoch(0 if "--resume" in sys.argv else epoch)\n',
            "range(32)": "range(16)",
        },
        "resume",
        "rows: ",
        {"range(32)": "range(16)"},
        arguments=("save",),
        resume=("--resume",),
        steps=4,
    ),
    Exhibit(
        32,
        "mean of batches",
        "transformers #41898, TRL #7010",
        "the evaluation depends on the batch size and the number of GPUs",
        "the means of batches are averaged, whatever number of tokens they have",
        "chat",
        {
            _MEAN: "sum(parts) / len(parts)",
            _GATHER: "accelerator.gather(losses.sum() / (wanted != IGNORED).sum()).mean()",
        },
        "logged",
        "eval_loss",
        arguments=("evaluate",),
        steps=0,
    ),
]
