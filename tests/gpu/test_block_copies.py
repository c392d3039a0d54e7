"""Block copies and uploads on CUDA have streams of their own: what must wait for them waits, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.allocator import grow_allocator
from tests.gpu.scenarios import assert_same
from tests.gpu.steps import recorded
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_driver import DrivenSequence, ModelDriver, load

HOLD = 4_000_000_000  # cycles: two seconds, a step takes a hundredth of one


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    return load(folder, device="cuda", dtype="float32", block_size=16, swap_space_gib=0.01)


def hold(stream: torch.cuda.Stream) -> None:
    """What is queued on the stream from here on begins only after two seconds."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HOLD)


def started(driver: ModelDriver) -> DrivenSequence:
    sequence = driver.add(prompts(1)[0] * 3, 24, 0)
    for _ in range(3):
        driver.step([sequence])
    return sequence


def test_a_swap_out_reads_what_was_there_when_it_began(runner: Any) -> None:
    """Steps go on meanwhile; whoever gets the blocks writes behind it."""
    driver = ModelDriver(runner)
    blocks = started(driver).blocks
    content = runner.kv_cache[blocks].cpu()
    hold(runner.copies.swaps)
    driver.after = -1
    assert driver.move(swap_out=[(block, i) for i, block in enumerate(blocks)]).transferred == -1
    swap = driver.step_id - 1
    other = driver.add(prompts(2)[1], 4, 1)
    driver.run([other])
    assert runner.copies.poll() == -1, "the steps waited for the copies"
    driver.after = swap
    free = driver.next_block
    driver.move(copies=[(free, block) for block in blocks])
    torch.cuda.synchronize()
    assert torch.equal(runner.host_kv_cache[: len(blocks)], content)
    assert torch.equal(runner.kv_cache[blocks].cpu(), runner.kv_cache[[free] * len(blocks)].cpu())
    assert runner.copies.poll() == swap


def test_a_swapped_in_sequence_goes_on_behind_the_copy(runner: Any) -> None:
    driver = ModelDriver(runner)
    whole = driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    sequence = started(driver)
    blocks, count = sequence.blocks, len(sequence.blocks)
    driver.move(swap_out=[(block, i) for i, block in enumerate(blocks)])
    fresh = list(range(driver.next_block, driver.next_block + count))
    driver.next_block += count
    runner.kv_cache[blocks] = 7.0
    hold(runner.copies.swaps)
    driver.move(swap_in=list(enumerate(fresh)), table=[(0, i, block) for i, block in enumerate(fresh)])
    sequence.blocks = fresh
    assert driver.run([sequence]) == whole


def moved(driver: ModelDriver, sequence: DrivenSequence) -> None:
    """Copy the sequence's blocks to fresh ones; the old ones lose their content behind the copies."""
    old, count = sequence.blocks, len(sequence.blocks)
    fresh = list(range(driver.next_block, driver.next_block + count))
    driver.next_block += count
    table = [(sequence.slot, i, block) for i, block in enumerate(fresh)]
    driver.move(copies=list(zip(old, fresh, strict=True)), table=table)
    for block in old:  # by slices: an index would come from the host, and the host would wait
        driver.runner.kv_cache[block] = 7.0  # type: ignore[attr-defined]
    sequence.blocks = fresh


def test_rows_wait_for_the_copies_within_the_device(runner: Any) -> None:
    driver = ModelDriver(runner)
    whole = driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    sequence = started(driver)
    hold(runner.copies.cow)
    moved(driver, sequence)
    assert not runner.copies.cow.query(), "the host waited for the copies"
    assert driver.run([sequence]) == whole


def test_copies_within_the_device_read_what_earlier_steps_wrote(runner: Any) -> None:
    driver = ModelDriver(runner)
    whole = driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    sequence = started(driver)
    content = runner.kv_cache[sequence.blocks].clone()
    runner.kv_cache[sequence.blocks] = 7.0
    hold(torch.cuda.current_stream())
    for block, saved in zip(sequence.blocks, content, strict=True):
        runner.kv_cache[block] = saved
    moved(driver, sequence)
    assert not torch.cuda.current_stream().query(), "the host waited"
    assert driver.run([sequence]) == whole


def test_copies_within_the_device_do_not_queue_up_behind_swaps(runner: Any) -> None:
    driver = ModelDriver(runner)
    whole = driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    sequence = started(driver)
    hold(runner.copies.swaps)
    driver.after = -1
    driver.move(swap_out=[(block, i) for i, block in enumerate(sequence.blocks)])
    moved(driver, sequence)
    assert driver.run([sequence]) == whole
    assert runner.copies.poll() == -1, "the steps waited for the swaps"


def test_a_step_waits_for_its_prompt(runner: Any) -> None:
    driver = ModelDriver(runner)
    with recorded(runner) as steps:
        driver.run([driver.add(prompts(1)[0] * 3, 24, 0)])
    runner.state.token_table.zero_()  # the prompt is not there yet
    grow_allocator(runner)
    hold(runner.state.uploads.stream)
    for plan, want in steps:
        pending = runner.launch(plan)
        if plan.new_requests:
            assert not runner.state.uploads.stream.query(), "the host waited for the upload"
        assert_same(pending.wait(), want)
