"""A plan that went over to another rank is the plan that was sent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import LeastSize, NewRequest, StepPlan, int_table
from wavecore.engine_core.tensor_parallel.plan_codec import decode, encode

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    max_tokens=st.none() | st.integers(0, 1 << 20),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 50_000), st.floats(-50, 50), max_size=4),
    logprobs=st.none() | st.integers(0, 5),
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def table(width: int) -> Any:
        entries = rng.integers(0, 1 << 31, (draw(st.integers(0, 5)), width))
        return int_table([tuple(entry) for entry in entries.tolist()], width)

    new = []
    for slot in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 50))
        embeds = rng.normal(size=(length, 8)).astype(np.float32) if draw(st.booleans()) else None
        ids = rng.integers(0, 1 << 31, length).astype(np.int32)
        pooling = draw(st.sampled_from(["", "mean", "last"]))
        new.append(NewRequest(slot, ids, draw(st.integers(1, length)), draw(PARAMS), slot % 3, embeds, pooling))
    return StepPlan(
        draw(st.integers(0, 1 << 50)),
        rng.permutation(rows) - draw(st.integers(0, 1)),
        rng.integers(0, 1 << 30, rows).astype(np.int32),
        rng.integers(0, 1 << 20, rows).astype(np.int32),
        rng.integers(0, 2, rows).astype(np.bool_),
        tuple(new),
        table(2),
        table(2),
        table(2),
        table(3),
        draw(st.integers(-1, 1 << 50)),
        draw(st.booleans()),
    )


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape, field.name
            np.testing.assert_array_equal(a, b)
        elif field.name == "new_requests":
            assert len(a) == len(b)
            for mine, its in zip(a, b, strict=True):
                assert_equal(mine, its)
        else:
            assert a == b, field.name


@example(StepPlan.empty(), None)
@given(plans(), st.none() | st.builds(LeastSize, *[st.integers(1, 1 << 30)] * 3, st.booleans()))
def test_a_plan_is_the_same_on_the_other_side(plan: StepPlan, least: LeastSize | None) -> None:
    got, got_least = decode(b"".join(encode(plan, least)))
    assert_equal(got, plan)
    assert got_least == least
