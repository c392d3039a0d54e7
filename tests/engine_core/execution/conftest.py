"""A model whose tokens are worth sampling."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoints import make_config, save_model


@pytest.fixture(scope="session")
def broad_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrow weights: the distribution is broad, so that sampling has something to choose from. Its end is 3."""
    config = make_config("Llama", eos_token_id=3)
    return save_model(tmp_path_factory.mktemp("broad") / "model", config, scale=0.12)
