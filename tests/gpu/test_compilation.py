"""Kernels compile while the engine starts, never while it serves: a compilation in a step costs seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.support.checkpoints import make_config, save_model
from tests.support.environment import environment
from tests.support.every_request import every_request
from tests.support.model_driver import load

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 128, "max_position_embeddings": 4200}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 48, "tie_word_embeddings": True}),
}


ROOT = Path(__file__).parent.parent.parent


@triton.jit
def _probe(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels compiled from here on, in this process."""
    names: list[str] = []

    def hook(*_args: Any, **details: Any) -> None:
        names.append(details["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = hook
    yield names
    triton.knobs.runtime.jit_post_compile_hook = None


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "rows", "tokens", "dtype"),
    [("llama", 2048, 4096, "bfloat16"), ("llama", 50, 4097, "float32"), ("gemma2", 100, 600, "bfloat16")],
)
def test_no_request_compiles_a_kernel(
    tmp_path: Path, compiled: list[str], model: str, rows: int, tokens: int, dtype: str
) -> None:
    """Whatever it asks for, and however many there are. tests/kernels/test_compile.py is the same without a GPU."""
    family, changes = MODELS[model]
    folder = save_model(tmp_path / "model", make_config(family, **changes), scale=0.08)
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "block_size": 16}
    runner = load(folder, device="cuda", dtype=dtype, num_gpu_blocks_override=20_000, **limits)
    found = {}
    for kind, run in every_request(runner, rows, tokens):
        compiled.clear()
        run()
        found[kind] = list(compiled)
    compiled.clear()
    _probe[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), VALUE=rows)
    assert [name.rsplit(".", 1)[-1] for name in compiled] == ["_probe"], "the hook does not fire"
    assert not any(found.values()), {kind: names for kind, names in found.items() if names}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", MODELS)
def test_the_engine_finds_every_kernel_compiled(tmp_path: Path, model: str) -> None:
    """With empty caches: cubins, what launches them, and Triton's own library. tests/kernels/test_compile.py shows
    the same for more models, as far as it can be without a GPU."""
    family, changes = MODELS[model]
    folder = save_model(tmp_path / "model", make_config(family, **changes), scale=0.08)
    command = [sys.executable, "-m", "tests.gpu.compiled_aside", str(folder)]
    caches = environment(TRITON_CACHE_DIR=str(tmp_path / "cache"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=caches)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "multi-threaded" not in done.stderr, "Python warns: a process that forks has threads"
    found = json.loads(done.stdout)
    assert sum(name.endswith(".cubin") for name in found["aside"]) > 20
    assert any(name.startswith("cuda_utils") for name in found["aside"])
    assert not found["own"] and not found["later"] and not found["processes"]
