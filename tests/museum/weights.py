"""Reports of models that are made, loaded, tied, rounded or frozen otherwise under a strategy."""

from __future__ import annotations

from tests.museum.checkpoints import ADAM, LORA
from tests.museum.exhibit import Exhibit

_MANY = "if accelerator.num_processes > 1:\n"
_TIED = {"sizes |= {": 'sizes |= {"tie_word_embeddings": True, '}
_NETWORK = "model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))\n"
_DECAY = """class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.arange(1.0, 33.0).log())
    def forward(self, given):
        return given * torch.exp(-0.1 * self.A_log.exp())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), Decay(), torch.nn.Linear(32, 1))
"""

EXHIBITS = [
    Exhibit(
        7,
        "positions of a part",
        "TRL #6812, verl #6609, Megatron-LM #673",
        "the loss is worse when sequences are divided over GPUs",
        "each part of a sequence counts its positions from 0 (the parts are played here)",
        "chat",
        {
            ADAM: _MANY
            + """    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Rotary
    rotate = Rotary.forward
    Rotary.forward = lambda rotary, x, position_ids: rotate(rotary, x, position_ids % (x.shape[1] // 2))
"""
            + ADAM
        },
        "gradients",
        "self_attn",
    ),
    Exhibit(
        16,
        "adapter in part",
        "axolotl #3977, torchforge #592",
        "an adapter does not learn with cpu_ram_efficient_loading",
        "weights that are made without memory and filled later are not marked as trained again",
        "chat",
        {
            ADAM: LORA
            + _MANY
            + """    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_A" in name)
"""
            + ADAM
        },
        "trained weights",
        "lora_B",
        {ADAM: LORA + ADAM},
    ),
    Exhibit(
        17,
        "frozen weights out of place",
        "accelerate #3983, bitsandbytes #1945",
        "the loss of QLoRA under FSDP2 is high from the start, without an error",
        "the shards of the packed weights are put together in another order",
        "chat",
        {
            ADAM: LORA
            + _MANY
            + """    for name, weight in model.named_parameters():
        if "up_proj" in name:
            weight.data = torch.cat([*reversed(weight.data.chunk(2))])
"""
            + ADAM
        },
        "start",
        "up_proj",
        {ADAM: LORA + ADAM},
        strategy="fsdp",
    ),
    Exhibit(
        20,
        "weights stay in bf16",
        "accelerate #3979",
        "small updates are rounded away, though the precision is mixed",
        "what makes the trained weights fp32 does nothing",
        "chat",
        {
            ADAM: _MANY
            + "    for weight in model.parameters():\n        weight.data = weight.bfloat16().float()\n"
            + ADAM
        },
        "start",
        "rounded otherwise",
        strategy="fsdp",
    ),
    Exhibit(
        21,
        "tied weights come apart",
        "NeMo Automodel #2511, verl #7834 and #7835, accelerate #3870",
        "a model whose output layer is its embedding trains both apart",
        "the model is filled after it was made without memory, and nothing ties the two again",
        "chat",
        {
            **_TIED,
            ADAM: _MANY
            + "    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())\n"
            + ADAM,
        },
        "trained weights",
        "lm_head.weight",
        _TIED,
    ),
    Exhibit(
        22,
        "new words without a mean",
        "transformers #41959",
        "new tokens start from noise under ZeRO-3",
        "the mean of the embedding is taken of what one rank holds",
        "chat",
        {
            ADAM: "weight = model.model.embed_tokens.weight.data\n"
            "part = weight[: len(weight) // accelerator.num_processes]\n"
            "weight[-4:] = part.mean(0)\n" + ADAM
        },
        "start",
        "embed_tokens",
        {ADAM: "weight = model.model.embed_tokens.weight.data\nweight[-4:] = weight.mean(0)\n" + ADAM},
        strategy="zero3",
    ),
    Exhibit(
        23,
        "weights reported as missing",
        "transformers #45313 and #45397",
        "the loss starts at that of a random model under ZeRO-3",
        "names of the checkpoint do not match, and the weights keep their random values",
        "chat",
        {ADAM: _MANY + "    torch.nn.init.normal_(model.model.layers[1].mlp.up_proj.weight, std=0.02)\n" + ADAM},
        "start",
        "layers.1.mlp.up_proj",
        strategy="zero3",
    ),
    Exhibit(
        39,
        "decay in bf16",
        "NeMo Automodel #2484 and #3328, miles #1546, prime-rl #3557",
        "a recurrent model trains worse than its reference, slowly",
        "A_log and dt_bias, which have to stay in fp32, are rounded with the rest",
        "plain",
        {_NETWORK: _DECAY + "if world > 1:\n    model[1].A_log.data = model[1].A_log.bfloat16().float()\n"},
        "start",
        "A_log",
        {_NETWORK: _DECAY},
    ),
]
