"""Classification of operators and kernels by kind of work, for the time breakdown of a profile."""

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
class OperatorClass:
    """Classification of an operator. kind: a key of KINDS. claims: operators called inside count as the same kind."""

    kind: str
    claims: bool = False


# The first match counts. Fused attention and loss operators claim their matrix multiplications and copies. Eager
# attention consists of plain operators, of which only the softmax can be told from the rest of the model.
_OPERATORS = (
    (rf"^{DATA_WAIT}$", OperatorClass("data_wait", claims=True)),
    (rf"^{LOSS}$", OperatorClass("loss", claims=True)),
    (r"^Optimizer\.step#", OperatorClass("optimizer", claims=True)),
    (r"^c10d::", OperatorClass("communication", claims=True)),
    (
        r"^\w+::.*(scaled_dot_product|(flash|flex|varlen)_att)",
        OperatorClass("attention", claims=True),
    ),
    (r"^\w+::.*(cross_entropy|log_softmax|nll_loss|kl_div|logsumexp)", OperatorClass("loss", claims=True)),
    (r"^aten::_?(safe_)?softmax", OperatorClass("attention")),
    (r"^aten::(linalg_vector_norm|_foreach_|_fused_(adam|sgd|adagrad)|_amp_)", OperatorClass("optimizer")),
    (r"^aten::(linear|linear_backward|matmul|mm|bmm|addmm|addbmm|baddbmm|mv|dot|einsum)$", OperatorClass("matmul")),
    (r"^aten::_(scaled|grouped|int)_\w*mm$|^(mkldnn|mkl|onednn)::.*(linear|matmul)", OperatorClass("matmul")),
    (r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|zero_|zeros|fill_|full)$", OperatorClass("copies")),
    (r"^aten::(embedding\w*|index\w*|gather|scatter\w*|_local_scalar_dense|item)$", OperatorClass("copies")),
    (r"ddp\.reducer::copy_", OperatorClass("copies")),
    (r"^(CompiledFunction|Torch-Compiled Region|## Call CompiledFxGraph)", OperatorClass("elementwise")),
)

# Kernels without an operator in the trace (from Triton or another library), matched by kernel name.
_KERNELS = (
    (r"(?i)nccl|rccl", OperatorClass("communication")),
    (r"(?i)flash|fmha|attention|attn", OperatorClass("attention")),
    (r"(?i)cross_entropy|softmax|nll", OperatorClass("loss")),
    (r"(?i)multi_tensor|adam|lion|optimi[sz]er", OperatorClass("optimizer")),
    (r"(?i)gemm|cutlass|cublas|xmma|nvjet|matmul|_mm_", OperatorClass("matmul")),
    (r"(?i)memcpy|memset|copy|cast|catarray|index|gather|embedding", OperatorClass("copies")),
)
# Kernels fused by torch.compile contain the names of their operators; the caller is a whole graph.
_COMPILED_LOSS = re.compile(r"^triton_.*(cross_entropy|log_softmax|nll_loss)")
# Operators that compute: all names with a namespace, except autograd's nodes, which only call others.
_COMPUTES = re.compile(r"^(?!autograd::|torch::autograd::)\w+::")


@lru_cache(maxsize=4096)
def listed(name: str) -> OperatorClass | None:
    """Look up an operator or range of the CPU part of a trace; None if the table has no entry."""
    return next((work for pattern, work in _OPERATORS if re.search(pattern, name)), None)


@lru_cache(maxsize=4096)
def computes(name: str) -> bool:
    """Whether an operator computes. Its kind is then `elementwise`, unless it or an operator around it is listed."""
    return bool(_COMPUTES.search(name))


@lru_cache(maxsize=4096)
def is_compiled_loss(kernel: str) -> bool:
    """Whether a compiled kernel computes the loss or its gradient, which its caller does not show."""
    return bool(_COMPILED_LOSS.search(kernel))


@lru_cache(maxsize=4096)
def of_kernel(name: str) -> OperatorClass:
    """Classify a GPU kernel by its name alone."""
    return next((work for pattern, work in _KERNELS if re.search(pattern, name)), OperatorClass("elementwise"))
