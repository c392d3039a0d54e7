"""The linear layer equals torch's, however it asks for the product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from wavecore.kernels.reference.layers import SWAPPED_ROWS, linear


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 48, 49])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    offset = torch.randn(40, dtype=dtype) if bias else None
    out = linear(x, weight, offset)
    assert out.is_contiguous()
    assert rows in SWAPPED_ROWS or torch.equal(out, F.linear(x, weight, offset))
    torch.testing.assert_close(out, F.linear(x, weight, offset))
