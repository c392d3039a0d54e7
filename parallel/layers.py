"""The matrix product of every linear layer. GEMMs stay with the vendor's library; this picks how to ask for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SWAPPED_ROWS = (1, *range(12, 49))
"""On a CPU these few rows are 10 to 25% faster as (weight @ x^T)^T; with 2 to 11 that is slower by half, above 48 the
same (float32 and bfloat16, oneDNN and MKL of torch 2.13 on Xeon; bench_cpu.py shows the sum)."""


def exact_float32() -> None:
    """Multiply float32 matrices in float32 on CUDA, in this process, from now on.

    It is torch's default, but NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which rounds their values to
    the 10 bits of TF32; who asks for float32 asks for more. (This setter is the one that torch 2.9 to 2.13 take without
    a warning and that leaves their old and new settings in agreement.)
    """
    torch.backends.cuda.matmul.allow_tf32 = False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x: [T, in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [T, out], contiguous.
    """
    if x.is_cuda or len(x) not in SWAPPED_ROWS:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias[:, None], weight, x.t()).t().contiguous()
