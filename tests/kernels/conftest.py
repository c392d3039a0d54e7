"""Kernels run on a GPU, or without one in Triton's interpreter (chosen in tests/conftest.py)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

BORDER = 64


@pytest.fixture
def device() -> str:
    """Where Triton kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel's wrapper makes is full of NaN, and behind it lies a border that no kernel may write to."""
    borders: list[Tensor] = []

    def room(*shape: Any, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        sizes = shape if not shape or isinstance(shape[0], int) else shape[0]
        fill = math.nan if dtype.is_floating_point else 77
        whole = torch.full((math.prod(sizes) + BORDER,), fill, dtype=dtype, device=device)
        borders.append(whole[-BORDER:].fill_(77))
        return whole[:-BORDER].view(sizes)

    def room_like(like: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return room(*(shape or (like.shape,)), dtype=dtype or like.dtype, device=device or like.device)

    monkeypatch.setattr(torch, "empty", room)
    monkeypatch.setattr(torch, "empty_like", room_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", room_like)
    with warnings.catch_warnings():  # the interpreter computes with numpy, which warns where a GPU gives infinity
        warnings.filterwarnings("ignore", ".*encountered in", RuntimeWarning)
        yield
    for border in borders:
        assert (border == 77).all()
