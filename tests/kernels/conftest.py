"""Kernels run on a GPU, or without one in Triton's interpreter (chosen in tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where Triton kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)
