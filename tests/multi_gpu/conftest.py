"""Several engines of one deployment, on two GPUs where the machine has them."""

from __future__ import annotations

import pytest

from wavecore.testing import gpus


@pytest.fixture(scope="session")
def two_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; tests that need them are skipped elsewhere."""
    return gpus(2)
