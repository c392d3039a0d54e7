"""Tests run side by side on one GPU: each gives back what its allocator has cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gpu.allocator import give_back_memory


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    give_back_memory()
