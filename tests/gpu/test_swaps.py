"""Swaps on CUDA run beside the steps on a stream of their own, and steps that are told to wait behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.checkpoints import make_config, save_model
from tests.models.driver import Driver, Sequence_, load
from tests.models.test_equality_families import prompts

HOLD = 4_000_000_000  # cycles: two seconds, a step takes a hundredth of one


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    return load(folder, device="cuda", dtype="float32", block_size=16, swap_space_gib=0.01)


@contextmanager
def held(runner: Any) -> Iterator[None]:
    """Copies that are started meanwhile begin only when the stream is let go."""
    with torch.cuda.stream(runner.swaps.stream):
        torch.cuda._sleep(HOLD)
    yield


def started(driver: Driver) -> Sequence_:
    sequence = driver.add(prompts(1)[0] * 3, 24, 0)
    for _ in range(3):
        driver.step([sequence])
    return sequence


def test_a_swap_out_reads_what_was_there_when_it_began(runner: Any) -> None:
    """Steps go on meanwhile; whoever gets the blocks writes behind it."""
    driver = Driver(runner)
    blocks = started(driver).blocks
    content = runner.pages[blocks].cpu()
    with held(runner):
        driver.after = -1
        assert driver.move(swap_out=[(block, i) for i, block in enumerate(blocks)]).transferred == -1
        swap = driver.step_id - 1
        other = driver.add(prompts(2)[1], 4, 1)
        driver.run([other])
        assert runner.swaps.poll() == -1, "the steps waited for the copies"
        driver.after = swap
        free = driver.next_block
        driver.move(copies=[(free, block) for block in blocks])
    torch.cuda.synchronize()
    assert torch.equal(runner.host_pages[: len(blocks)], content)
    assert torch.equal(runner.pages[blocks].cpu(), runner.pages[[free] * len(blocks)].cpu())
    assert runner.swaps.poll() == swap


def test_a_swapped_in_sequence_goes_on_behind_the_copy(runner: Any) -> None:
    driver = Driver(runner)
    whole = driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    sequence = started(driver)
    blocks, count = sequence.blocks, len(sequence.blocks)
    driver.move(swap_out=[(block, i) for i, block in enumerate(blocks)])
    fresh = list(range(driver.next_block, driver.next_block + count))
    driver.next_block += count
    runner.pages[blocks] = 7.0
    with held(runner):
        driver.move(swap_in=list(enumerate(fresh)), table=[(0, i, block) for i, block in enumerate(fresh)])
        sequence.blocks = fresh
        assert driver.run([sequence]) == whole
