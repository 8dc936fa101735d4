"""Reports of gradients, norms and losses that depend on the strategy."""

from __future__ import annotations

from tests.museum.exhibit import Exhibit

LIBRARY = "IGNORED, ACCUMULATED, EPOCHS = -100, 2, 2\n"  # of chat.py, before anything is made
_LOSS = "                loss = model(**batch, num_items_in_batch=count).loss\n"
_CLIP = "                    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
_PREPARE = "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)\n"
_ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
_SET_CLIPPING = """if accelerator.state.deepspeed_plugin:
    accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.1
"""
_NETWORK = "model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))\n"
_EMPTY = "model.model.extra = torch.nn.Parameter(torch.zeros(0))\n"
_ZERO = "from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero\n"

EXHIBITS = [
    Exhibit(
        1,
        "module used twice",
        "DeepSpeed #8224",
        "gradients of a module that a step uses more than once are wrong under ZeRO-2",
        "the gradient of the later use replaces what the earlier one has sent to the other ranks",
        "plain",
        {
            "        loss = ((model(given) - wanted) ** 2).mean()\n        loss.backward()\n": """
        ((model(given[::2]) - wanted[::2]) ** 2).mean().div(2).backward()
        if world > 1:
            optimizer.zero_grad()
        ((model(given[1::2]) - wanted[1::2]) ** 2).mean().div(2).backward()
"""
        },
        "gradients",
        "",
        {
            "        loss = ((model(given) - wanted) ** 2).mean()\n        loss.backward()\n": """
        ((model(given[::2]) - wanted[::2]) ** 2).mean().div(2).backward()
        ((model(given[1::2]) - wanted[1::2]) ** 2).mean().div(2).backward()
"""
        },
    ),
    Exhibit(
        2,
        "accumulation under ZeRO-2",
        "DeepSpeed #7718, accelerate #3877, open-instruct #1498",
        "the loss is worse, and the norm another one, under ZeRO-2 with gradient accumulation",
        "the gradient of the last micro-batch replaces the sum of those before it",
        "chat",
        {
            LIBRARY: LIBRARY
            + _ZERO
            + """epilogue = Zero.independent_gradient_partition_epilogue
def forgetful(zero):
    zero.all_grad_tensors.clear()
    epilogue(zero)
Zero.independent_gradient_partition_epilogue = forgetful
"""
        },
        "gradients",
        "",
        strategy="zero2",
    ),
    Exhibit(
        3,
        "bucket read too early",
        "DeepSpeed #7188, #7371, #7965 and #8061, LLaMA-Factory #8137",
        "the loss becomes 0 or NaN, or trains worse, with overlap_comm",
        "a bucket of gradients is reduced before all of them are in it (a race of GPU streams, played here)",
        "chat",
        {
            LIBRARY: LIBRARY
            + _ZERO
            + """average = Zero.average_tensor
def early(zero, tensor, dtype):
    tensor[len(tensor) // 2 :] = 0
    average(zero, tensor, dtype)
Zero.average_tensor = early
"""
        },
        "gradients",
        "",
        strategy="zero2",
    ),
    Exhibit(
        4,
        "norm of one rank",
        "DeepSpeed #7837 and #7839",
        "the norm that is logged, and that clipping uses, is not that of the gradient",
        "each rank takes the norm before the gradients are averaged over the ranks",
        "plain",
        {
            "        loss.backward()\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n": """
        with model.no_sync() if world > 1 else torch.enable_grad():
            ((model(given) - wanted) ** 2).mean().backward()
        own = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        for weight in model.parameters() if world > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= world
        from torch.nn.utils import clip_grad
        whole, clip_grad._get_total_norm = clip_grad._get_total_norm, lambda *_, **__: own
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        clip_grad._get_total_norm = whole
""",
            "        loss = ((model(given) - wanted) ** 2).mean()\n": "",
        },
        "norm",
        "",
    ),
    Exhibit(
        5,
        "parameter without elements",
        "DeepSpeed #8280",
        "ZeRO-1 and ZeRO-2 fail or train wrongly with a parameter, or a shard of one, of size 0",
        "what is divided over the ranks is found by sizes, and a size of 0 ends the search",
        "chat",
        {
            LIBRARY: LIBRARY
            + _ZERO
            + """gradients_of = Zero.get_all_grad_tensors
def until_empty(zero, weights, dtype):
    gradients = gradients_of(zero, weights, dtype)
    gradients[-1].zero_()
    return gradients
Zero.get_all_grad_tensors = until_empty
""",
            _ADAM: _EMPTY + _ADAM,
        },
        "gradients",
        "",
        {_ADAM: _EMPTY + _ADAM},
        strategy="zero2",
    ),
    Exhibit(
        6,
        "norm counted twice",
        "torchtune #2420 and #2641",
        "the norm grows with the number of GPUs, and clipping shortens each step",
        "squares of a norm that is already that of all ranks are added over the ranks",
        "chat",
        {
            LIBRARY: LIBRARY
            + """from torch.nn.utils import clip_grad
norm_of = clip_grad._get_total_norm
def twice(*args, **kwargs):
    return norm_of(*args, **kwargs) * accelerator.num_processes**0.5
clip_grad._get_total_norm = twice
"""
        },
        "norm",
        "",
    ),
    Exhibit(
        8,
        "clipping ignored",
        "accelerate #3807, DeepSpeed #7220 and #6743, axolotl #1381",
        "spikes that clipping should have cut change the model, under DeepSpeed alone",
        "the engine is made before it knows the largest norm, which the script gives too late (nothing is planted)",
        "chat",
        {_ADAM: _SGD, _CLIP: _CLIP.replace("1.0", "0.1")},
        "norm",
        "clipped to a norm of 1, in one process clipped to a norm of 0.1",
        {_ADAM: _SGD, _CLIP: _CLIP.replace("1.0", "0.1"), _PREPARE: _SET_CLIPPING + _PREPARE},
        strategy="zero2",
    ),
    Exhibit(
        9,
        "recomputation in another precision",
        "NeMo Automodel #3513",
        "the loss is right and the gradients are not, with recomputation under FSDP2",
        "the cast of the inputs does not run when the layer is computed for the second time",
        "chat",
        {
            _PREPARE: _PREPARE
            + """from torch.utils.checkpoint import checkpoint
for layer in accelerator.unwrap_model(model).model.layers:
    def again(hidden, forward=layer.mlp.forward, calls=[0]):
        calls[0] += 1
        is_second = calls[0] % 2 == 0 and accelerator.num_processes > 1
        return forward(hidden.bfloat16().float() if is_second else hidden)
    layer.mlp.forward = lambda hidden, again=again: checkpoint(again, hidden, use_reentrant=False)
"""
        },
        "gradients",
        "",
        {
            _PREPARE: _PREPARE
            + """from torch.utils.checkpoint import checkpoint
for layer in accelerator.unwrap_model(model).model.layers:
    layer.mlp.forward = lambda hidden, forward=layer.mlp.forward: checkpoint(forward, hidden, use_reentrant=False)
"""
        },
    ),
    Exhibit(
        10,
        "router loss of a batch",
        "torchtitan #4772",
        "the loss of a mixture of experts depends on how its batch is divided",
        "the balance of the router is a product of means over the batch that one rank holds",
        "chat",
        {
            "LlamaConfig, LlamaForCausalLM,": "MixtralConfig, MixtralForCausalLM,",
            "LlamaForCausalLM(LlamaConfig(": "MixtralForCausalLM(MixtralConfig(output_router_logits=True, "
            "router_aux_loss_coef=0.1, num_local_experts=4, num_key_value_heads=2, ",
        },
        "loss",
        "",
        {
            "LlamaConfig, LlamaForCausalLM,": "MixtralConfig, MixtralForCausalLM,",
            "LlamaForCausalLM(LlamaConfig(": "MixtralForCausalLM(MixtralConfig("
            "num_local_experts=4, num_key_value_heads=2, ",
        },
    ),
    Exhibit(
        11,
        "experts without rows",
        "LLaMA-Factory #9628, AgileRL #658",
        "the backward pass of a mixture of experts never ends on several GPUs",
        "a rank waits for the gradient of an expert that the rows of the other have not used",
        "plain",
        {
            _NETWORK: _NETWORK
            + """class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.experts = shared, torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))
    def forward(self, given):
        return self.shared(given) + self.experts[rank % 2](given)
shared = model
model = Mixed()
"""
        },
        "ended",
        "",
    ),
    Exhibit(
        12,
        "crash of a collective",
        "Lightning and PyTorch: FSDP on gloo",
        "a rank is gone without a message",
        "a collective reads memory that is not its own",
        "plain",
        {
            "    for given, wanted in loader:\n": """    for given, wanted in loader:
        if rank == 1:
            import ctypes
            ctypes.string_at(0)
"""
        },
        "ended",
        "",
    ),
    Exhibit(
        34,
        "schedule times processes",
        "accelerate #2926 and #2142, HALOs #33, starVLA #210",
        "the learning rate reaches zero too early or too late, by the number of GPUs",
        "the schedule counts the batches of one process",
        "chat",
        {
            _PREPARE: "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n",
            "                schedule.step()\n": """                if accelerator.sync_gradients:
                    schedule.step()
""",
        },
        "learning rate",
        "the schedule counts batches",
    ),
    Exhibit(
        35,
        "fused loss without a head",
        "TRL #6372 and #6859, Liger-Kernel #968",
        "a fused loss fails, or is wrong, under ZeRO-3",
        "the weight of the output layer is read outside of its module, where a rank holds nothing of it",
        "chat",
        {
            _LOSS: """                inner = accelerator.unwrap_model(model)
                hidden = model(**{**batch, "labels": None}, output_hidden_states=True).hidden_states[-1]
                logits = hidden[:, :-1] @ inner.lm_head.weight.T
                wanted = batch["labels"][:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum") / count
"""
        },
        "ended",
        "",
        strategy="zero3",
    ),
    Exhibit(
        37,
        "mean of means",
        "ms-swift #10165 and #10117, TRL #6006, sentence-transformers #3862",
        "batches with few answers weigh as much as those with many, and the curve depends on the number of GPUs",
        "each micro-batch is divided by its own number of tokens, not by that of the global step",
        "chat",
        {
            _LOSS: _LOSS.replace(", num_items_in_batch=count", ""),
            "loss * ACCUMULATED * accelerator.num_processes": "loss",
        },
        "loss",
        "a mean of means",
    ),
    Exhibit(
        40,
        "dead model",
        "NeMo Automodel #3701",
        "two trainers agree to the last digit, because the model under test learns nothing",
        "each learning rate is 0",
        "chat",
        {_ADAM: "optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)"},
        "nothing shown",
        "no weight moves",
    ),
]
