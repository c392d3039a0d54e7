"""A user's kernels: tried where they are registered as far as that can be, and by each engine in its own dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import custom_ops as kernels
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import load

from wavecore.engine_core.api import custom_ops
from wavecore.kernels import ops
from wavecore.transport.errors import ConfigError


@pytest.fixture(autouse=True)
def _restore(own_ops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ops, "registered", {})


def test_an_engine_judges_in_its_own_dtype(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    settings = {"custom_ops": {"silu_mul": "tests.support.custom_ops:careless"}}
    load(folder, dtype="float32", **settings)
    with pytest.raises(ConfigError, match=r"silu_mul.*with torch.bfloat16 on cpu: result\[0\] differs"):
        load(folder, dtype="bfloat16", **settings)


def test_a_kernel_for_gpus_is_left_to_the_engine_where_there_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="RuntimeError: not on this device"):
        custom_ops.register_op("silu_mul", kernels.for_gpus)
    assert custom_ops.registered == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    custom_ops.register_op("silu_mul", kernels.for_gpus)
    assert custom_ops.registered == {"silu_mul": "tests.support.custom_ops:for_gpus"} and not ops.silu_mul.custom
    with pytest.raises(ValueError, match="differs"):  # wrong is wrong
        custom_ops.register_op("silu_mul", kernels.doubled)
