"""Steps of ranks in lockstep on one device: padded to the agreed size, run without a plan, and then without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_core.execution.test_pinned_copies import plan
from tests.support.model_driver import load

from wavecore.engine_core.execution.step_shape import MAX_BUCKET, Bucket, Buckets, StepShape
from wavecore.engine_core.plan import LeastSize, StepPlan, int_table

BUCKETS = Buckets(4 * MAX_BUCKET, 64)


@pytest.mark.parametrize(
    "sizes",
    [
        [(3, 3, 1), (64, 64, 1)],  # decode on both
        [(3, 3, 1), (2, 90, 60)],  # prompts on one
        [(0, 0, 0), (2, 90, 60)],  # nothing on one
        [(64, 64, 1), (1, 2000, 2000)],
        [(0, 0, 0), (1, 1, 1)],
    ],
    ids=str,
)
def test_ranks_meet_in_one_bucket(sizes: list[tuple[int, int, int]]) -> None:
    least = LeastSize(*(max(column) for column in zip(*sizes, strict=True)))
    shapes = []
    for rows, tokens, longest in sizes:
        lens = [1] * rows if tokens == rows else [1] * (rows - 1) + [longest]
        lens = lens if sum(lens) == tokens else [*lens[:-2], tokens - longest - (rows - 2), longest]
        shapes.append(StepShape(plan(list(range(rows)), lens), BUCKETS, least))
    first, second = (shape.bucket for shape in shapes)
    assert first == second and first in BUCKETS.graphs and all(shape.has_graph for shape in shapes)
    assert first.tokens >= least.tokens and first.rows >= least.rows


def test_above_the_largest_bucket_each_rank_has_its_own_and_none_a_graph() -> None:
    least = LeastSize(3, MAX_BUCKET + 1, MAX_BUCKET - 1)
    large = StepShape(plan([0, 1, 2], [1, 1, MAX_BUCKET - 1]), BUCKETS, least)
    small = StepShape(plan([0, 1], [1, 1]), BUCKETS, least)
    none = StepShape(StepPlan.empty(), BUCKETS, least)
    assert large.bucket.tokens == MAX_BUCKET + 1 and small.bucket.tokens == 2 and none.bucket.tokens == 1
    assert not any(shape.has_graph for shape in (large, small, none))


@pytest.mark.parametrize("buckets", [Buckets(4 * MAX_BUCKET, 4096), None], ids=["padded", "as they are"])
@pytest.mark.parametrize("lens", [[1] * 3000, [1, 1, 5000], [1, 7]], ids=["decode", "prompt", "small"])
def test_engines_that_exchange_tokens_have_as_many(buckets: Buckets | None, lens: list[int]) -> None:
    """Whatever the size: above the largest bucket, too, and where nothing is padded."""
    least = LeastSize(len(lens), sum(lens), max(lens))
    plans = plan(list(range(len(lens))), lens), plan([0, 1], [1, 1]), StepPlan.empty()
    shapes = [StepShape(each, buckets, least, exchanges=True) for each in plans]
    assert len({(s.bucket.tokens, s.bucket.rows, s.bucket.max_query_len, s.has_graph) for s in shapes}) == 1
    assert shapes[0].bucket.tokens >= sum(lens)


def test_without_padding_a_step_has_its_own_size_and_at_least_a_row() -> None:
    assert StepShape(plan([0, 1], [1, 7]), None, LeastSize(64, 64, 1)).bucket == Bucket(8, 2, 1, 7)
    assert StepShape(StepPlan.empty(), None, LeastSize(64, 64, 1)).bucket == Bucket(1, 1, 1, 1)
    assert StepShape(StepPlan.empty(), None).bucket == Bucket(0, 0, 0, 0)


def test_a_dummy_changes_no_block_and_a_plan_without_rows_does_what_it_says(tiny_llama: Path) -> None:
    runner: Any = load(tiny_llama, swap_space_gib=0.001)
    least = LeastSize(3, 9, 7)
    runner.kv_cache.copy_(torch.randn_like(runner.kv_cache))
    before = runner.kv_cache.clone()
    result = runner.launch(None, least).wait()
    assert torch.equal(runner.kv_cache, before) and not len(result.tokens)
    forwards = []
    forward, runner.forward = runner.forward, lambda *args: forwards.append(args) or forward(*args)
    swaps = StepPlan(
        0, *(np.zeros(0, kind) for kind in (np.intp, np.int32, np.int32, np.bool_)), swap_out=int_table(((3, 1),), 2)
    )
    result = runner.launch(swaps, least).wait()
    assert torch.equal(runner.kv_cache, before) and torch.equal(runner.host_kv_cache[1], before[3])
    assert result.transferred == 0 and not len(result.tokens)
    assert len(forwards) == 1, "without rows there is a forward pass, too"
    runner.launch(swaps).wait()
    assert len(forwards) == 1, "but not of a rank that is alone"
