"""Tests run side by side on one GPU: each gives back what its allocator has cached."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
