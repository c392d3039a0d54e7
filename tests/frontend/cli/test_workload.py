"""Work for `wavecore bench`: the same for the same arguments, or what a file says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from wavecore.frontend.cli.workload import Span, WorkItem, open_work, random_work
from wavecore.transport.errors import ValidationError


def test_ragged_lengths_fill_their_range() -> None:
    work = random_work(2000, (5, 9), (5, 9))
    for lengths in ([len(item.prompt) for item in work], [item.max_tokens for item in work]):
        counts = Counter(lengths)
        assert set(counts) == {5, 6, 7, 8, 9}
        assert min(counts.values()) > 300  # 400 each on average


def test_a_seed_gives_the_same_work_and_another_seed_other_work() -> None:
    for make in (
        lambda seed: random_work(3, (5, 90), (1, 90), seed=seed),
        lambda seed: random_work(2, (8, 8), (4, 4), seed=seed),
        lambda seed: random_work(3, (4, 8), (2, 4), top=512, seed=seed),
    ):
        assert make(1) == make(1) != make(2)


@pytest.mark.parametrize(
    ("count", "inputs", "outputs"), [(0, (8, 8), (8, 8)), (1, (0, 8), (8, 8)), (1, (8, 8), (-1, 8))]
)
def test_work_of_nothing_is_refused(count: int, inputs: Span, outputs: Span) -> None:
    with pytest.raises(ValidationError, match="at least one request, and one token"):
        random_work(count, inputs, outputs)


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(json.dumps([{"prompt_token_ids": [5, 6], "max_tokens": 3}, {"prompt": "a", "max_tokens": 2}]))
    assert open_work(str(path)) == [WorkItem([5, 6], 3), WorkItem("a", 2)]
    for content in ("{}", "[]", "[5]", "[{}]", "x"):
        path.write_text(content)
        with pytest.raises(ValidationError, match=r"work\.json holds no list of requests"):
            open_work(str(path))
    for strange in (str(tmp_path), "/dev/zero"):
        with pytest.raises(ValidationError, match="holds no list of requests"):
            open_work(strange)
