"""The layers whose weights ranks share.

A layer's first product is cut by columns of its output, which needs no word between ranks; its second one by columns of
its input, whose partial sums are added up (Megatron-LM, arXiv:1909.08053). The vocabulary is cut by rows of the
embedding and of the LM head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from wavecore.kernels import ops
from wavecore.parallel.collectives import Collectives


def exact_float32() -> None:
    """Multiply float32 matrices in float32 on CUDA, in this process, from now on.

    It is torch's default, but NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which rounds their values to
    the 10 bits of TF32; who asks for float32 asks for more. (This setter is the one that torch 2.9 to 2.13 take without
    a warning and that leaves their old and new settings in agreement.)
    """
    torch.backends.cuda.matmul.allow_tf32 = False


def partial_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Collectives) -> Tensor:
    """`ops.linear` of which this rank has some input columns; the sum over ranks is the whole.

    Args:
        x: [T, in / size].
        weight: [out, in / size].
        bias: the whole one, which rank 0 adds.
    """
    return ops.linear(x, weight, bias if group.rank == 0 else None)


def embedding(token_ids: Tensor, weight: Tensor, group: Collectives) -> Tensor:
    """Rows of a table of which this rank has some: the ids from rank * len(weight) on.

    Args:
        token_ids: integers [T].
        weight: [rows of this rank, hidden].

    Returns:
        [T, hidden].
    """
    if group.size == 1:
        return F.embedding(token_ids, weight)
    row = token_ids - group.rank * len(weight)
    elsewhere = (row < 0) | (row >= len(weight))
    x = F.embedding(row.masked_fill(elsewhere, 0), weight)
    return group.all_reduce(x.masked_fill_(elsewhere[:, None], 0.0))


def gathered(x: Tensor, columns: int, group: Collectives) -> Tensor:
    """All ranks' columns, which may end in padding: x [T, columns of this rank] to [T, columns], of unit stride along
    them."""
    if group.size == 1:
        return x
    return group.all_gather(x).transpose(0, 1).reshape(len(x), -1)[:, :columns]
