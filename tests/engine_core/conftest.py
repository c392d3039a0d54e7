"""The tiny model of tests that do not care which."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoints import make_config, save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32; read only."""
    return save_model(tmp_path_factory.mktemp("llama") / "model", make_config("Llama"))
