"""RequestOptions: bounded wherever they are made, and the same behind the wire."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavecore.engine_core.api.request_options import DEADLINE, DEADLINES, MIN_SECONDS, RequestOptions
from wavecore.transport.errors import ValidationError

seconds = st.none() | st.floats(DEADLINE.low, DEADLINE.high)
options = st.builds(
    RequestOptions,
    priority=st.integers(-(1 << 20), 1 << 20),
    timeout=seconds,
    queue_timeout=seconds,
    first_token_timeout=seconds,
    data_parallel_rank=st.none() | st.integers(1, 1023),
    cache_salt=st.none() | st.text(min_size=1, max_size=256),
    pooling=st.sampled_from([None, "mean", "last"]),
    emitted=st.integers(0, 1000),
)


@given(options)
def test_the_wire_carries_what_differs_from_the_defaults(given: RequestOptions) -> None:
    wire = given.to_wire()
    assert RequestOptions.from_wire(wire) == given
    assert all(value is not None and value != 0 for value in wire.values())


def test_nothing_asked_is_nothing_on_the_wire() -> None:
    assert RequestOptions().to_wire() == {}
    assert RequestOptions.from_wire({}) == RequestOptions()


def test_numbers_become_plain() -> None:
    found: Any = RequestOptions(priority=np.int32(2), timeout=5)  # type: ignore[arg-type]
    assert found == RequestOptions(priority=2, timeout=5.0)
    assert type(found.priority) is int and type(found.timeout) is float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("priority", value) for value in (1.5, True, 1 << 40, None, "1")],
        *[(name, value) for name in DEADLINES for value in (0, 0.0009, -1.0, math.inf, math.nan, 1e9, "1", True)],
        *[("cache_salt", value) for value in (3, "", "x" * 257, b"x")],
        *[("data_parallel_rank", value) for value in (-1, 1024, 1.0, True, "0")],
        *[("pooling", value) for value in ("max", "", 1)],
        *[("emitted", value) for value in (-1, 1.0, 1 << 31, None)],
        *[("colour", value) for value in (1, None)],
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        RequestOptions.from_wire({field: value})
    assert error.value.field == field


def test_they_are_frozen_and_checked_again_in_copies() -> None:
    made = RequestOptions(timeout=5.0)
    with pytest.raises(FrozenInstanceError):
        made.timeout = 6.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match=r"timeout: must be a number of at least 0.001 .* \(or None\), not 0.0"):
        replace(made, timeout=0.0)
    with pytest.raises(TypeError, match="colour"):
        RequestOptions(colour=1)  # type: ignore[call-arg]


def test_deadlines_go_on_when_a_request_is_sent_again() -> None:
    made = RequestOptions(priority=1, timeout=5.0, first_token_timeout=2.0)
    assert made.deadlines == {"timeout": 5.0, "first_token_timeout": 2.0}
    later = made.after(3.0)
    assert later == RequestOptions(priority=1, timeout=2.0, first_token_timeout=MIN_SECONDS)
    assert made.after(0.0) == made
