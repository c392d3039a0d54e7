"""SamplingParams: what scripts for vLLM do with them, and a typed error for everything else."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavecore.engine_core.api.bounds import shown
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.transport.errors import NotSupportedError, ValidationError

FIELDS = [f.name for f in SamplingParams.__dataclass_fields__.values()]
STRANGE = [5, -1, 1.5, "x", "", b"x", True, None, [], [1], ["a"], {}, {1: 2}, {"a": 1}, [[1]], object(), float("nan")]
HUGE = [
    float("inf"),
    10**400,
    10**5000,
    1 << 63,
    -(1 << 64),
    [1 << 40],
    ["x" * 300],
    ["x"] * 999,
    np.array([1]),
    np.array(1.5),
]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [*STRANGE, *HUGE], ids=shown)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        params = SamplingParams(**{name: value})
    except ValidationError as error:
        assert error.field in (name, "min_tokens", "bad_words")
        return
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_numbers_of_numpy_become_plain() -> None:
    params = SamplingParams(temperature=np.float64(0.5), max_tokens=np.int64(5), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, max_tokens=5, stop_token_ids=[1, 2])
    assert type(params.temperature) is float
    assert type(params.max_tokens) is int


def test_assignment_checks_again() -> None:
    params = SamplingParams()
    params.max_tokens = 100  # type: ignore[misc]
    params.stop = "x"  # type: ignore[misc]
    assert params == SamplingParams(max_tokens=100, stop=["x"])
    for name, value in (("n", 0), ("maxtokens", 5)):
        with pytest.raises(ValidationError, match=name):
            setattr(params, name, value)
    assert params == SamplingParams(max_tokens=100, stop=["x"])


def test_copies_are_apart() -> None:
    params = SamplingParams(logit_bias={"5": 1})  # type: ignore[dict-item]
    for other in (params.clone(), copy(params)):
        assert other == params
        other.n = 2  # type: ignore[misc]
        assert params.n == 1


@pytest.mark.parametrize("name", ["best_of", "guided_decoding", "structured_outputs", "logits_processors"])
def test_features_of_vllm_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        SamplingParams(**{name: 7})
    assert SamplingParams(**{name: None}) == SamplingParams()  # type: ignore[arg-type]


def test_unknown_and_unnamed_values() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="n=1"):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(ValidationError, match="no_such"):
        SamplingParams.from_wire({"no_such": 1})


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(plain, lambda v: st.lists(v, max_size=4) | st.dictionaries(plain, v, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5))
def test_what_comes_from_a_wire_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_wire(fields)
    except ValidationError:
        return
    assert SamplingParams.from_wire(params.to_wire()) == params
