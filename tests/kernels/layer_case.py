"""How close the results of the small kernels must be to their twins in float64, for tests on either device."""

from __future__ import annotations

import torch
from torch import Tensor

ERROR = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Largest error of a vector, relative to its norm: in 16 bits eps, twice what rounding the result once can cost."""


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Vector by vector along the last dimension, so that no single token or key hides in a norm over all."""
    assert got.dtype == dtype
    norm = want.norm(dim=-1)
    error = (got.double() - want).norm(dim=-1) / norm.where(norm > 0, 1.0)
    assert float(error.max()) < ERROR[dtype], error.max()


def rounded_once(got: Tensor, want: Tensor) -> None:
    """Nearly all 16-bit values are the exact ones, rounded; more would differ had other values been rounded too."""
    assert float((got == want.to(got.dtype)).double().mean()) > 0.97
