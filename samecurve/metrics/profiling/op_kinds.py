"""Which operator is what kind of work: the table by which a profile shares out the time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from samecurve.data.batches import DATA_WAIT
from samecurve.losses.cross_entropy import LOSS

KINDS = {
    "matmul": "matrix multiplications",
    "attention": "attention",
    "loss": "the loss, from the logits on",
    "optimizer": "gradient norm and optimizer",
    "copies": "copies, casts, look-ups",
    "elementwise": "norms and other element by element",
    "communication": "waiting for communication",
    "data_wait": "waiting for data",
    "idle": "none of these: Python, launches, waiting",
}


@dataclass(frozen=True)
class Work:
    """kind: of KINDS. claims: what runs inside counts as the same, whatever it is."""

    kind: str
    claims: bool = False


# The first match counts. What computes attention or the loss by itself claims its matrix multiplications and copies;
# eager attention is made of plain operators, so there only the softmax can be told from the rest of the model.
_OPERATORS = (
    (rf"^{DATA_WAIT}$", Work("data_wait", claims=True)),
    (rf"^{LOSS}$", Work("loss", claims=True)),
    (r"^Optimizer\.step#", Work("optimizer", claims=True)),
    (r"^c10d::", Work("communication", claims=True)),
    (
        r"^\w+::.*(scaled_dot_product|(flash|flex|varlen)_att)",
        Work("attention", claims=True),
    ),
    (r"^\w+::.*(cross_entropy|log_softmax|nll_loss|kl_div|logsumexp)", Work("loss", claims=True)),
    (r"^aten::_?(safe_)?softmax", Work("attention")),
    (r"^aten::(linalg_vector_norm|_foreach_|_fused_(adam|sgd|adagrad)|_amp_)", Work("optimizer")),
    (r"^aten::(linear|linear_backward|matmul|mm|bmm|addmm|addbmm|baddbmm|mv|dot|einsum)$", Work("matmul")),
    (r"^aten::_(scaled|grouped|int)_\w*mm$|^(mkldnn|mkl|onednn)::.*(linear|matmul)", Work("matmul")),
    (r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|zero_|zeros|fill_|full)$", Work("copies")),
    (r"^aten::(embedding\w*|index\w*|gather|scatter\w*|_local_scalar_dense|item)$", Work("copies")),
    (r"ddp\.reducer::copy_", Work("copies")),
    (r"^(CompiledFunction|Torch-Compiled Region|## Call CompiledFxGraph)", Work("elementwise")),
)

# Kernels whose operator the trace does not name (Triton's, another library's), by what their authors call them.
_KERNELS = (
    (r"(?i)nccl|rccl", Work("communication")),
    (r"(?i)flash|fmha|attention|attn", Work("attention")),
    (r"(?i)cross_entropy|softmax|nll", Work("loss")),
    (r"(?i)multi_tensor|adam|lion|optimi[sz]er", Work("optimizer")),
    (r"(?i)gemm|cutlass|cublas|xmma|nvjet|matmul|_mm_", Work("matmul")),
    (r"(?i)memcpy|memset|copy|cast|catarray|index|gather|embedding", Work("copies")),
)
# What the compiler fuses has the names of its operators, and a whole graph for a caller.
_COMPILED_LOSS = re.compile(r"^triton_.*(cross_entropy|log_softmax|nll_loss)")
# An operator on its own line of work: anything with a namespace but autograd's nodes, which only call others.
_COMPUTES = re.compile(r"^(?!autograd::|torch::autograd::)\w+::")


@lru_cache(maxsize=4096)
def listed(name: str) -> Work | None:
    """What the table says of an operator or range of the CPU's part of a trace."""
    return next((work for pattern, work in _OPERATORS if re.search(pattern, name)), None)


@lru_cache(maxsize=4096)
def computes(name: str) -> bool:
    """Whether time in it is work at all, of the kind `elementwise` unless it is listed or inside of what is."""
    return bool(_COMPUTES.search(name))


@lru_cache(maxsize=4096)
def is_compiled_loss(kernel: str) -> bool:
    """Whether a kernel of the compiler takes the loss, or its gradient; its caller does not tell."""
    return bool(_COMPILED_LOSS.search(kernel))


@lru_cache(maxsize=4096)
def of_kernel(name: str) -> Work:
    """What a device's kernel does by its name alone."""
    return next((work for pattern, work in _KERNELS if re.search(pattern, name)), Work("elementwise"))
