"""Bytes that a forward pass keeps for the backward pass, per token and layer.

GPT: s b h (34 + 5 a s / h), where 5 a s / h are the attention scores that a fused kernel does not keep
(arXiv:2205.05198, section 4). Tensor parallelism divides 24 of the 34; sequence parallelism divides the rest, too.
Stacks with fused attention train without dropout, whose two masks are 2 of the 34.
Llama: s b (28 h + 8 f), no dropout, of which norms and residuals, 10 h, need sequence parallelism to be divided. A
fused norm keeps its input alone and not the fp32 copies, 4 h of the 10 h.

transformers' Llama keeps other tensors, as torch's MemTracker counts them (torch 2.13, transformers 5.23; a: width of
the attention, k: keys per query). Its norms are made of single operations. With 16-bit weights, a layer keeps
s b (16 h + 8 f + (4 + 4 k) a): of each norm an fp32 copy, the normalized and the scaled input. Under autocast, norms
read and write fp32, and the input of each of five products has a 16-bit copy of its own: 26 h. In fp32 it keeps 24 h +
16 f + 16 a.
Where rows hold several documents, SDPA gets a mask. It keeps it in each layer, converted to the numbers' precision, and
keeps keys and values repeated to as many heads as the queries have.
"""

from __future__ import annotations

from samecurve.planner.hardware import FUSED_NORMS
from samecurve.planner.job import Job

NORMS = {"16-bit": 16, "copies": 16, "autocast": 26, "fp32": 24}  # by Job.flow; not divided by tensor parallelism alone
# Of these, inputs of products. Sequence parallelism gathers and keeps them whole (tensor_lines.gathered_inputs).
PRODUCT_INPUTS = {"16-bit": 4, "copies": 4, "autocast": 10, "fp32": 8}
HEAD_NORM = {"16-bit": 6, "copies": 6, "autocast": 6, "fp32": 8}  # per element of queries and keys
POST_NORM = {"16-bit": 12, "copies": 12, "autocast": 16, "fp32": 16}  # of both, which are no inputs of products
LAST_NORM = 24  # of the last norm, and of gradients on their way back, tracked as above
EXPERT_IMBALANCE = 1.2  # busiest by average expert (assumed)
COMPILED = 0.75  # share of kept bytes: torch.compile recomputes cheap element-wise results (assumed)


def layer_bytes(job: Job) -> float:
    """Return the bytes of one layer and one micro-batch on one rank without recomputation."""
    shape, dims = job.shape, job.dims
    experts = max(shape.top_k, 1) * expert_imbalance(job)
    width = 4 if job.flow == "fp32" else 2
    # inputs and outputs of the experts; an all-to-all needs neither for its own backward pass
    dispatched = 2 * width * shape.hidden * experts if shape.experts else 0
    # MemTracker's numbers are of gated models; others are counted as a GPT in 16 bits (inputs.left_out)
    if shape.gated and job.flow:
        attention = job.element_bytes * _attention_width(job)
        if shape.head_norms:
            per_element = HEAD_NORM["fp32" if shape.fp32_norms else job.flow]
            attention += per_element * (1 + shape.kv_share) * shape.attention_width
        inner = shape.mlp_bytes[job.flow == "fp32"] * shape.ffn * experts
        num_norms = 2 if shape.post_norms else 1  # in front of a block, and behind it
        norms = NORMS[job.flow] + (POST_NORM[job.flow] if shape.post_norms else 0)
        in_16_bit = job.flow in ("16-bit", "copies")
        # what only the gradients of norms' weights need: the normalized numbers
        norms -= (4 if in_16_bit else 8) * num_norms if job.frozen else 0
        # the scaled numbers in fp32, before they are cast
        norms += 4 * num_norms if shape.fp32_norms and in_16_bit else 0
        norms -= PRODUCT_INPUTS[job.flow] if job.strategy.tp_sequence_parallel else 0
        mlp = (inner + dispatched) * (dims.tp / job.mlp_split)
    elif shape.gated:
        attention = (8 + 10 * shape.kv_share) * shape.attention_width
        norms = 4 if job.stack in FUSED_NORMS else 10
        mlp = (8 * shape.ffn * experts + dispatched) * (dims.tp / job.mlp_split)
    else:
        attention = (4 + 4 * shape.kv_share) * shape.attention_width
        norms = 8 if job.flash else 10
        mlp = 4 * shape.ffn * experts + dispatched  # 16 h of the 34 h in a GPT with ffn = 4 h
    kept = (attention + mlp) / dims.tp
    kept += norms * shape.hidden / job.sequence_split
    kept *= COMPILED if job.compile else 1
    kept += job.element_bytes * job.frozen.width if job.frozen else 0
    return job.tokens * (kept + score_bytes(job)) + job.element_bytes * mask_elements(job)


def _attention_width(job: Job) -> float:
    """Elements of queries, keys, values and outputs that attention keeps of a token, of all heads."""
    shape, dims = job.shape, job.dims
    exchange = job.exchange
    by_heads = exchange == "ulysses"
    heads = shape.kv_heads / dims.tp / (dims.cp if by_heads else 1)
    # a single head is repeated without a copy
    is_repeated = job.masked and shape.kv_heads < shape.heads and heads > 1
    keys = 2 * shape.kv_share
    if exchange == "allgather":  # a row's first keys up to each of the two chunks, or all of them
        keys = 2 * dims.cp + 1 if is_repeated else dims.cp * keys
    elif is_repeated:
        keys = 2 + (keys if by_heads else 0)  # what was exchanged is one tensor with the queries
    outputs = 2 if exchange else 1  # once more for the product behind
    return (1 + keys + outputs) * shape.attention_width


def mask_elements(job: Job) -> float:
    """Return the elements of a micro-batch's masks, of the queries and keys that the rank's attention sees.

    Tensor parallelism and an exchange of sequence for heads leave them whole.
    """
    dims, pairs = job.dims, job.seq**2
    if job.exchange == "allgather":
        pairs *= (2 * dims.cp + 1) / (4 * dims.cp**2)  # two chunks of s / 2 cp, and the keys up to their ends
    return job.micro_batch * job.sequences * pairs if job.masked else 0


def expert_imbalance(job: Job) -> float:
    """Tokens of the rank whose experts get the most, by the mean, where experts are on different ranks (assumed)."""
    chooses = job.shape.top_k < job.shape.experts
    return EXPERT_IMBALANCE if chooses and job.dims.ep > 1 else 1


def score_bytes(job: Job) -> float:
    """Return the bytes of one token's attention scores; 0 with a fused kernel or where they alone are recomputed."""
    if job.flash or (job.checkpointing == "selective" and not job.keeps_products):
        return 0
    return bytes_per_score(job) * job.shape.heads * job.seq / job.dims.tp


def bytes_per_score(job: Job) -> int:
    """Return the bytes that attention without a fused kernel keeps of one score."""
    return job.shape.score_bytes[job.flow == "fp32"] if job.flow else 5


def score_gradient_bytes(job: Job) -> float:
    """Return the bytes of one layer's gradients of scores in the backward pass: in fp32, and what is cast of them."""
    if job.flash or not job.flow:
        return 0
    per_score = 4 if job.flow == "fp32" else 6
    return per_score * job.tokens * job.shape.heads * job.seq / job.dims.tp


def kept_bytes(job: Job) -> float:
    """Return the bytes that one layer keeps of a micro-batch on one rank, by the kind of recomputation.

    Full recomputation keeps the layer's input: 2 s b h; 4 s b h where residuals are fp32. Selective recomputation by
    operator also keeps results of products and attention. Products of experts are none of torch's `mm`. Where every
    second product is kept, keys' is not, nor the last of attention, nor one of a gated MLP.
    """
    if job.checkpointing != "full" and not job.keeps_products:
        return layer_bytes(job)
    shape, width = job.shape, job.shape.attention_width
    input_bytes = (4 if job.flow in ("fp32", "autocast") else 2) * job.tokens * shape.hidden / job.sequence_split
    if job.checkpointing == "full":
        return input_bytes
    ffn = 0 if shape.experts else shape.ffn
    inputs = int(shape.gated)  # products of a gated MLP beside the two of any MLP
    if job.flow:
        split, whole = (2 + 2 * shape.kv_share) * width + (1 + inputs) * ffn, (1 if shape.experts else 2) * shape.hidden
    else:
        split, whole = (2 + shape.kv_share) * width + ffn, (inputs if ffn else 0) * shape.hidden
    return input_bytes + job.element_bytes * job.tokens * (
        split / job.dims.tp + whole / (1 if job.flow else job.sequence_split)
    )


def cut_gradient_bytes(job: Job) -> float:
    """Return the bytes of a layer's gradients that wait between the halves of a backward pass.

    PyTorch keeps the gradient of each product's and each norm's output until it computes those of their weights.
    """
    shape, dims = job.shape, job.dims
    inner = (2 if shape.gated else 1) * shape.ffn * max(shape.top_k, 1) * expert_imbalance(job)
    split = (1 + 2 * shape.kv_share) * shape.attention_width / dims.tp + inner / job.mlp_split
    whole = 4 * shape.hidden / job.sequence_split
    return job.element_bytes * job.tokens * (split + whole)
