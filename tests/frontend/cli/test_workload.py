"""The named workloads: how many requests, how long, and the same for everybody."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from wavecore.frontend.cli.workload import (
    WORKLOADS,
    WorkItem,
    open_work,
    random_work,
    shared_prefix_work,
    span,
)
from wavecore.transport.errors import ValidationError

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
    work = open_work(name)
    assert (len(work), sum(len(item.prompt) for item in work), sum(item.max_tokens for item in work)) == SIZES[name]
    assert all(10 <= token < 10_000 for item in work for token in prompt(item))
    assert {item.temperature for item in work} == ({0.6} if name.startswith("ragged") else {0.0})


def test_ragged_lengths_fill_their_range() -> None:
    work = random_work(2000, (5, 9), (5, 9))
    for lengths in ([len(item.prompt) for item in work], [item.max_tokens for item in work]):
        counts = Counter(lengths)
        assert set(counts) == {5, 6, 7, 8, 9}
        assert min(counts.values()) > 300  # 400 each on average


def test_a_shared_prefix_is_shared_by_its_group_alone() -> None:
    work = shared_prefix_work(3, 4, prefix_len=10, tail_len=5, output_len=2)
    heads = [tuple(prompt(item)[:10]) for item in work]
    assert sorted(Counter(heads).values()) == [4, 4, 4]
    assert len({tuple(prompt(item)) for item in work}) == 12
    changes = sum(a != b for a, b in pairwise(heads))
    assert changes > 2, "the groups come one after the other"
    assert {(len(item.prompt), item.max_tokens) for item in work} == {(15, 2)}


def test_a_seed_gives_the_same_work_and_another_seed_other_work() -> None:
    for make in (
        lambda seed: random_work(3, (5, 90), (1, 90), seed=seed),
        lambda seed: random_work(2, (8, 8), (4, 4), seed=seed),
        lambda seed: shared_prefix_work(2, 2, 8, 4, 2, seed=seed),
        lambda seed: random_work(3, span(8, 0.5), span(4, 0.5), top=512, seed=seed),
    ):
        assert make(1) == make(1) != make(2)


def test_a_span_goes_down_from_the_longest_length() -> None:
    assert (span(8, 0.0), span(8, 0.5), span(1, 0.9)) == ((8, 8), (4, 8), (1, 1))
    for longest, ratio in ((0, 0.0), (8, 1.0), (8, -0.1)):
        with pytest.raises(ValidationError, match="range_ratio"):
            span(longest, ratio)


def test_a_name_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(json.dumps([{"prompt_token_ids": [5, 6], "max_tokens": 3}, {"prompt": "a", "max_tokens": 2}]))
    assert open_work(str(path)) == [WorkItem([5, 6], 3), WorkItem("a", 2)]
    for name in ("ragged-255", str(tmp_path)):
        with pytest.raises(ValidationError, match=r"ragged-256, .*single-in8192-out16"):
            open_work(name)
