"""The named workloads: how many requests, how long, and the same for everybody."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from bench_workloads import WORKLOADS, shared_prefix_work, work_named

from wavecore.frontend.cli.workload import WorkItem

SIZES = {  # requests, prompt tokens, output tokens
    "ragged-256": (256, 142_507, 139_062),
    "ragged-1024": (1024, 563_941, 570_487),
    "in1024-out256-x512": (512, 512 * 1024, 512 * 256),
    "decode-heavy-x256": (256, 256 * 32, 256 * 512),
    "prefill-heavy-x128": (128, 128 * 4096, 128 * 8),
    "shared-prefix-16x32": (512, 512 * 2112, 512 * 64),
    "single-in128-out256": (1, 128, 256),
    "single-in8192-out16": (1, 8192, 16),
}


def prompt(item: WorkItem) -> list[int]:
    assert isinstance(item.prompt, list)
    return item.prompt


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes_are_those_of_the_published_table(name: str) -> None:
    work = work_named(name)
    assert (len(work), sum(len(item.prompt) for item in work), sum(item.max_tokens for item in work)) == SIZES[name]
    assert all(10 <= token < 10_000 for item in work for token in prompt(item))
    assert {item.temperature for item in work} == ({0.6} if name.startswith("ragged") else {0.0})


def test_a_shared_prefix_is_shared_by_its_group_alone() -> None:
    work = shared_prefix_work(3, 4, prefix_len=10, tail_len=5, output_len=2)
    heads = [tuple(prompt(item)[:10]) for item in work]
    assert sorted(Counter(heads).values()) == [4, 4, 4]
    assert len({tuple(prompt(item)) for item in work}) == 12
    changes = sum(a != b for a, b in pairwise(heads))
    assert changes > 2, "the groups come one after the other"
    assert {(len(item.prompt), item.max_tokens) for item in work} == {(15, 2)}
    assert work == shared_prefix_work(3, 4, prefix_len=10, tail_len=5, output_len=2)
    assert work != shared_prefix_work(3, 4, prefix_len=10, tail_len=5, output_len=2, seed=1)
