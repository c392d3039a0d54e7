"""Kernels compile while the engine starts, never while it serves: a compilation in a step costs seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from tests.models.checkpoints import VOCAB, make_config, save_model
from tests.models.driver import Driver, load

from wavecore.engine_core.sampling_params import SamplingParams


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels compiled from here on."""
    names: list[str] = []

    def hook(*_args: Any, **details: Any) -> None:
        names.append(details["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = hook
    yield names
    triton.knobs.runtime.jit_post_compile_hook = None


def test_nothing_compiles_after_the_start(tmp_path: Path, compiled: list[str]) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama", head_dim=128))
    runner = load(
        folder,
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=0.3,
    )
    compiled.clear()
    draw = random.Random(1)
    driver = Driver(runner)
    kinds = [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=10, seed=2),
    ]
    for count in (1, 3, 7, 32):
        asked = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))] for _ in range(count)]
        driver.next_block = 1
        driver.run(
            [driver.add(p, draw.randint(2, 9), i, draw.choice(kinds)) for i, p in enumerate(asked)],
            chunk=draw.choice([9, 1000]),
        )
    assert compiled == []
