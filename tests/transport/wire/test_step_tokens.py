"""What a step gives one client: built, checked, measured, and merged in any order with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.transport.wire.strategies import same, step_tokens

from wavecore.transport.wire.messages import FinishReason, StepTokens
from wavecore.transport.wire.step_tokens import check_step_tokens, finish_rows, merge, rows_of, size_of

NOTHING = StepTokens(*(np.empty(0, t) for t in (np.uint32, np.uint32, np.int32, np.uint8)))


def told(*parts: StepTokens) -> dict[int, dict[str, Any]]:
    """What a reader of these parts knows in the end, request by request, slowly."""
    known: dict[int, dict[str, Any]] = {}
    for part in parts:
        start = 0
        for row, handle in enumerate(part.handles.tolist()):
            one = known.setdefault(handle, {"tokens": [], "finish": 0, "logprobs": []})
            stop = start + int(part.counts[row])
            one["tokens"] += part.tokens[start:stop].tolist()
            start = stop
            one["finish"] = int(part.finish[row]) or one["finish"]
            extra = dict(part.extras.get(row, {}))
            one["logprobs"] += [part.frames[position] for position in extra.pop("logprobs", [])]
            one.update(extra)
    return known


@given(st.lists(step_tokens(), min_size=1, max_size=5))
def test_merged_output_tells_the_same_story(parts: list[StepTokens]) -> None:
    merged = merge(*parts)
    assert same(told(merged), told(*parts))
    if len(parts) > 1:
        assert len(set(merged.handles.tolist())) == len(merged.handles)
        assert list(told(merged)) == list(told(*parts))  # in order of first appearance
    for name in ("handles", "counts", "tokens", "finish"):
        assert getattr(merged, name).dtype == getattr(parts[0], name).dtype


@given(st.lists(step_tokens(), min_size=3, max_size=5))
def test_merging_is_associative(parts: list[StepTokens]) -> None:
    assert same(told(merge(merge(*parts[:2]), *parts[2:])), told(merge(*parts)))


@given(step_tokens(), st.integers(0, 6))
def test_parts_of_the_rows_tell_the_same_story(output: StepTokens, at: int) -> None:
    keep = np.arange(len(output.handles)) < at
    first, second = rows_of(output, keep), rows_of(output, ~keep)
    check_step_tokens(first)
    check_step_tokens(second)
    assert same(told(first, second), told(output))


def test_merge_of_nothing_to_say() -> None:
    assert len(merge(NOTHING, NOTHING).handles) == 0


def test_finish_rows() -> None:
    ends = finish_rows([4, 5], FinishReason.ERROR, "timeout", "too late")
    assert ends.handles.tolist() == [4, 5]
    assert ends.finish.tolist() == [FinishReason.ERROR] * 2
    assert ends.extras == {i: {"code": "timeout", "message": "too late"} for i in range(2)}
    assert finish_rows([1], FinishReason.ABORT).extras == {}


def test_size_counts_frames() -> None:
    assert size_of(NOTHING) == 0
    assert size_of(StepTokens(*(np.zeros(3, t) for t in (np.uint32, np.uint32, np.int32, np.uint8)))) == 39
