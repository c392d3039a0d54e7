"""The shapes of real models in bfloat16, teacher-forced, against transformers on the same GPU.

Logits may be as far from float32's as those of transformers in bfloat16, and a little: that shows a wrong epsilon or
scale, which argmaxes hide. And argmaxes agree with transformers' as often as those of its two implementations of
attention with each other, but for one point. Weights are N(0, 0.02), the checkpoints of the benchmarks.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from make_checkpoint import make
from tests.gpu.allocator import give_back_memory
from tests.gpu.teacher_forced import distance, our_logits, their_logits
from tests.support.model_driver import load
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

ROWS, LENGTH = 8, 384
LONG, FIRST, CHUNK = 8704, 8448, 1088
"""The last tokens lie past the original positions of Llama, where the scaling of its frequencies shows most."""


@pytest.fixture(params=["qwen3-0.6b", "llama-3.1-8b"])
def checkpoint(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="wavecore-test-", dir="/dev/shm"))
    try:
        make(request.param, folder)
        give_back_memory()
        yield request.param, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_as_close_to_float32_as_transformers(checkpoint: tuple[str, Path]) -> None:
    name, folder = checkpoint
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(100_000, (ROWS, LENGTH), generator=draw)
    long = torch.randint(100_000, (1, LONG), generator=draw)
    exact, sdpa, eager, long_exact, long_sdpa = _references(folder, ids, long)

    runner = load(
        folder, device="cuda", dtype="bfloat16", block_size=64, max_model_len=LONG, num_gpu_blocks_override=512,
        max_num_seqs=ROWS, max_num_batched_tokens=8192,
    )  # fmt: skip
    between, theirs, long_theirs = _agreement(eager, sdpa), distance(sdpa, exact), distance(long_sdpa, long_exact)
    ours = {how: our_logits(runner, ids, chunk) for how, chunk in (("prefill", LENGTH), ("decode", 1))}
    far = {how: distance(logits, exact) / theirs for how, logits in ours.items()}
    far["long"] = distance(our_logits(runner, long, 4 * CHUNK, FIRST), long_exact) / long_theirs
    agree = {how: _agreement(logits, sdpa) for how, logits in ours.items()}
    del runner
    give_back_memory()
    print(f"\n{name}: distance from float32 {theirs:.4f}, long {long_theirs:.4f}; ours, relative to that, {far}")
    print(f"{name}: sdpa and eager agree on {between:.2%} of argmaxes; with sdpa, ours {agree}")
    assert max(far.values()) <= 1.15, far
    assert min(agree.values()) >= between - 0.01, (between, agree)


def _references(folder: Path, ids: Tensor, long: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of ids: float32, sdpa, eager; of the last tokens of `long`, in chunks, for scores of all pairs take memory:
    float32, sdpa."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
    )
    sdpa, long_sdpa = their_logits(model, ids), their_logits(model, long, FIRST, CHUNK)
    model.set_attn_implementation("eager")
    eager = their_logits(model, ids)
    model.set_attn_implementation("sdpa")
    model.float()
    exact, long_exact = their_logits(model, ids), their_logits(model, long, FIRST, CHUNK)
    del model
    give_back_memory()
    return exact, sdpa, eager, long_exact, long_sdpa


def _agreement(a: Tensor, b: Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())
