"""The runner's own promises: settings, memory, custom kernels, swapped blocks, and failing steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import custom_ops
from tests.support.model_driver import ModelDriver, load
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.block_copies import _runs
from wavecore.engine_core.execution.step_shape import Buckets, bucket
from wavecore.engine_core.models.decoder import Decoder
from wavecore.transport.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[i, 2 * i, 7] for i in range(1, 9)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    return ModelEngine(tiny_llama).generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"device": "tpu"}, 'give "auto", "cpu"'),
        ({"device": "meta"}, 'give "auto", "cpu"'),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"device": "cuda:256"}, "CUDA devices"),  # torch keeps eight bits of it
        ({"device": "cpu:256"}, "give"),
        ({"max_model_len": 300}, "max_model_len 300 is above the 256"),
        ({"device": "cpu:3"}, 'give "auto", "cpu"'),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_gib": 1e-6}, "fit with kv_cache_memory_gib"),
        ({"custom_ops": {"silu_mul": "no_such_module:f"}}, "no_such_module"),
        (
            {"custom_ops": {"silu_mul": "tests.support.broken_module:f"}},
            "silu_mul.*RuntimeError.*no device of that kind",
        ),
        ({"custom_ops": {"silly_mul": "tests.support.custom_ops:silu_mul"}}, "silly_mul"),
        ({"custom_ops": {"silu_mul": "tests.support.custom_ops:doubled"}}, "silu_mul"),
    ],
)
def test_settings_that_cannot_work(tiny_llama: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(tiny_llama, **settings)


@pytest.mark.usefixtures("own_ops")
def test_a_kernel_replaced_by_name_is_used(tiny_llama: Path, expected: list[list[int]]) -> None:
    engine = ModelEngine(tiny_llama, custom_ops={"silu_mul": "tests.support.custom_ops:silu_mul"})
    custom_ops.calls = 0
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert custom_ops.calls > 0


def test_cache_size_and_memory_stats(tiny_llama: Path) -> None:
    runner = load(tiny_llama, num_gpu_blocks_override=None, kv_cache_memory_gib=0.001, swap_space_gib=0.0005)
    token_bytes = 3 * 2 * 2 * 64 * 4
    assert runner.info.num_blocks == int(0.001 * 2**30) // (4 * token_bytes)
    assert runner.info.num_host_blocks == int(0.0005 * 2**30) // (4 * token_bytes)
    assert runner.info.swap_block_seconds > 0
    stats = runner.memory_stats()  # type: ignore[attr-defined]
    assert stats["kv_cache_bytes"] == runner.info.num_blocks * 4 * token_bytes
    assert stats["weights_bytes"] > 100_000


def test_bfloat16_runs(tiny_llama: Path) -> None:
    engine = ModelEngine(tiny_llama, dtype="bfloat16")
    assert engine.runner.info.dtype == "bfloat16"
    assert all(len(tokens) == 12 for tokens in engine.generate(PROMPTS, GREEDY))


def test_swapped_and_copied_blocks_keep_their_contents(tiny_llama: Path, expected: list[list[int]]) -> None:
    runner = load(tiny_llama, num_gpu_blocks_override=40, swap_space_gib=0.001)
    driver = ModelDriver(runner)
    sequence = driver.add(PROMPTS[0], 12, 0)
    for _ in range(6):
        driver.step([sequence])
    held = list(sequence.blocks)
    swapped = driver.move(swap_out=[(block, i) for i, block in enumerate(held)])
    assert swapped.transferred == driver.step_id - 1, "on a CPU it is done at once"
    runner.kv_cache[held] = 7.0  # type: ignore[attr-defined]
    fresh = [30 + i for i in range(len(held))]
    driver.move(swap_in=[(i, block) for i, block in enumerate(fresh)])
    runner.host_kv_cache.fill_(9.0)  # type: ignore[attr-defined]
    last = [35 + i for i in range(len(held))]
    driver.move(copies=list(zip(fresh, last, strict=True)), table=[(0, i, block) for i, block in enumerate(last)])
    runner.kv_cache[fresh] = 7.0  # type: ignore[attr-defined]
    sequence.blocks = last
    driver.next_block = 20
    assert driver.run([sequence]) == expected[:1]


def test_preemption_by_swapping_through_the_engine(tiny_llama: Path, expected: list[list[int]]) -> None:
    engine = ModelEngine(tiny_llama, num_gpu_blocks_override=14, swap_space_gib=0.001, max_num_seqs=8)
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_a_step_out_of_memory_is_computed_again(
    tiny_llama: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ModelEngine(tiny_llama)
    forward, failures = Decoder.forward, [MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
    calls = 0

    def failing(self: Decoder, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 7):
            raise failures.pop()
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", failing)
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert not failures


def test_padding_never_reaches_the_null_block(tiny_llama: Path) -> None:
    engine = ModelEngine(tiny_llama, num_gpu_blocks_override=30)
    engine.generate(PROMPTS, GREEDY)
    assert not torch.count_nonzero(engine.runner.kv_cache[0])  # type: ignore[attr-defined]
    assert np.isfinite(engine.runner.kv_cache.numpy()).all()  # type: ignore[attr-defined]


def test_padded_steps_give_the_same_tokens(tiny_llama: Path, expected: list[list[int]]) -> None:
    """Buckets are for CUDA; here a CPU runs them, with chunks, preemption and logprobs."""
    engine = ModelEngine(tiny_llama, max_num_batched_tokens=19, max_num_seqs=11, num_gpu_blocks_override=30)
    engine.runner.buckets = Buckets(19, 11)  # type: ignore[attr-defined]
    assert engine.generate(PROMPTS, replace(GREEDY, logprobs=2)) == expected
    assert not torch.count_nonzero(engine.runner.kv_cache[0])  # type: ignore[attr-defined]
    assert all(len(out.logprobs) == 12 for out in engine.outputs.values())


def test_buckets_are_few_and_close() -> None:
    sizes = sorted({bucket(n, 2048) for n in range(1, 2049)})
    assert sizes[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert len(sizes) < 90
    assert all(n <= bucket(n, 2048) <= n + max(0, n // 8) for n in range(1, 2049))
    assert bucket(250, 251) == 251


def test_neighbours_swap_in_one_copy() -> None:
    pairs = np.array([(3, 0), (4, 1), (5, 2), (7, 3), (8, 9), (2, 10)], np.int32)
    assert list(_runs(pairs)) == [(3, 0, 3), (7, 3, 1), (8, 9, 1), (2, 10, 1)]
    assert list(_runs(pairs[:0])) == []
