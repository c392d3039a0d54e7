"""A load: what memory or the kernels cannot hold is refused, and float32 means float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.support.environment import environment
from tests.support.model_driver import load

from wavecore.engine_core.startup import loader
from wavecore.engine_core.startup.memory_budget import GIB
from wavecore.transport.errors import ConfigError, ModelError, ResourceError


def test_a_refusal_ends_the_load_with_the_models_name(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(loader, "refusal", lambda *args: asked.append(args) or "it is too large")
    with pytest.raises(ModelError, match=r"model: it is too large"):
        load(tiny_llama)
    assert asked == [(6, 2, 64, torch.device("cpu"))]


def test_float32_is_exact_where_a_container_says_otherwise(tiny_llama: Path) -> None:
    code = (
        "import sys, torch; from tests.support.model_driver import load;"
        "load(sys.argv[1], dtype='bfloat16'); before = torch.backends.cuda.matmul.fp32_precision;"
        "load(sys.argv[1], dtype='float32'); print(before, torch.backends.cuda.matmul.fp32_precision)"
    )
    command = [sys.executable, "-c", code, tiny_llama]
    says = environment(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    out = subprocess.run(command, env=says, capture_output=True, text=True, check=False)
    assert out.stdout.split() == ["tf32", "ieee"], out.stderr


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host(available: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=64 * GIB))

    host(1000)
    monkeypatch.setattr("wavecore.engine_core.models.weights.partial", lambda *_: None)  # nothing can be read
    with pytest.raises(ResourceError, match=r"weights of .*model take .* GiB as float32, and of cpu's 64 GiB only"):
        load(tiny_llama)
    half = sum(t.numel() for t in load_file(tiny_llama / "model.safetensors").values()) * 2
    host(half)
    with pytest.raises(ConfigError, match=r"as float32, .* would fit with dtype bfloat16"):
        load(tiny_llama)
    monkeypatch.undo()
    assert load(tiny_llama, dtype="bfloat16").info.dtype == "bfloat16"
    host(half - 1)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ResourceError, match="no setting makes room"):
            load(tiny_llama, dtype=dtype)


def test_weights_that_do_not_fit_after_all(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "fill", short)
    with pytest.raises(ConfigError, match=r"model do not fit into memory: CUDA out of memory; .* dtype bfloat16"):
        load(tiny_llama)
    with pytest.raises(ResourceError, match="no setting makes room"):
        load(tiny_llama, dtype="bfloat16")


@pytest.mark.parametrize("part", ["Decoder", "ModelRunner"])
def test_tables_that_do_not_fit(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Rotary tables, and those of requests."""

    def short(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 34359738368 bytes.")

    monkeypatch.setattr(loader, part, short)
    with pytest.raises(ConfigError) as error:
        load(tiny_llama)
    start, end = (
        "the tables of all requests do not fit into memory: ",
        "; lower max_num_batched_tokens and max_num_seqs",
    )
    assert str(error.value).startswith(start) and str(error.value).endswith(f"allocate 34359738368 bytes.{end}")


def test_bytes_of_the_weights_are_those_of_the_parameters(tiny_llama: Path) -> None:
    runner: Any = load(tiny_llama)
    model, rotary = runner.model, sum(table.nbytes for table in runner.model.tables)
    assert model.spec.num_parameters * 4 == runner.memory_stats()["weights_bytes"] - rotary
