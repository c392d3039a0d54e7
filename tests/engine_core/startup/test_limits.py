"""What the kernels cannot hold is a typed error at load, and float32 means float32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import load

from wavecore.engine_core.startup import loader
from wavecore.kernels.attention import shapes
from wavecore.kernels.attention.shapes import refusal
from wavecore.transport.errors import ModelError

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "shared", "words"),
    [
        (32, 1, 256, 99 << 10, None),
        (2, 2, 8, 227 << 10, None),
        (8, 8, 512, 227 << 10, "head_dim 512 .* up to 256"),
        (33, 1, 64, 227 << 10, "33 query heads .* up to 32"),
        (8, 8, 64, 64 << 10, "64 KiB of shared memory, .* compute capability 8.0"),
    ],
)
def test_what_cuda_refuses(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, shared: int, words: str | None
) -> None:
    monkeypatch.setattr(shapes, "shared_memory", lambda _device: shared)
    got = refusal(heads, kv_heads, head_dim, CUDA)
    assert got is None if words is None else re.search(words, got or ""), got
    assert refusal(heads, kv_heads, head_dim, torch.device("cpu")) is None


def test_a_refusal_ends_the_load_with_the_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    asked = []
    monkeypatch.setattr(loader, "refusal", lambda *args: asked.append(args) or "it is too large")
    with pytest.raises(ModelError, match=r"model: it is too large"):
        load(folder)
    assert asked == [(6, 2, 64, torch.device("cpu"))]


def test_float32_is_exact_where_a_container_says_otherwise(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    code = (
        "import sys, torch; from tests.support.model_driver import load;"
        "load(sys.argv[1], dtype='bfloat16'); before = torch.backends.cuda.matmul.fp32_precision;"
        "load(sys.argv[1], dtype='float32'); print(before, torch.backends.cuda.matmul.fp32_precision)"
    )
    root = Path(__file__).parents[3]
    path = os.pathsep.join((str(root), str(root / "src")))
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", code, folder]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.stdout.split() == ["tf32", "ieee"], out.stderr
