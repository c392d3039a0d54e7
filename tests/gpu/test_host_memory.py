"""Swap space is pinned, to the byte: copies to and from it run beside the program."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.gpu.scenarios import sleep
from tests.gpu.steps import make
from tests.support.checkpoints import make_config, save_model


def test_swap_space_is_pinned_and_not_from_torchs_rounded_blocks(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner = make(folder, swap_space_gib=0.01)
    blocks = runner.info.num_host_blocks
    assert blocks > 100 and runner.info.swap_block_seconds > 0
    runner.kv_cache[0].normal_()
    assert runner._time_swap() > 0
    assert torch.equal(runner.host_kv_cache[0], runner.kv_cache[0].cpu()), "what was timed is a copy from the device"
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    runner.allocate_swap_space(3 * blocks + 1)
    assert runner.host_kv_cache.is_pinned() and runner.host_kv_cache[1].is_pinned()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert runner.host_kv_cache.nbytes == (3 * blocks + 1) * runner.block_bytes


def test_copies_to_swap_space_do_not_wait(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner = make(folder, swap_space_gib=0.01)
    runner.kv_cache[3].normal_()
    sleep()
    runner.host_kv_cache[1].copy_(runner.kv_cache[3], non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    assert not done.query(), "the copy waited for the device"
    torch.cuda.synchronize()
    assert torch.equal(runner.host_kv_cache[1], runner.kv_cache[3].cpu())
