"""SamplingParams: frozen, plain and bounded, and a typed error for every value out of bounds."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import shown

FIELDS = [f.name for f in SamplingParams.__dataclass_fields__.values()]
STRANGE = [5, -1, 1.5, "x", "", b"x", True, None, [], [1], ["a"], {}, {1: 2}, {"a": 1}, [[1]], Ellipsis, float("nan")]
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


def test_clone_checks_again() -> None:
    params = SamplingParams(logit_bias={"5": 1})  # type: ignore[dict-item]
    assert params.clone() == params
    other = params.clone(max_tokens=100, stop="x")
    assert other == SamplingParams(logit_bias={5: 1.0}, max_tokens=100, stop=["x"])
    assert params.max_tokens == 16
    with pytest.raises(ValidationError, match="n: must be a whole number from 1 to 128, not 0"):
        params.clone(n=0)
    with pytest.raises(ValidationError, match="min_tokens: 5 is above max_tokens 3"):
        params.clone(min_tokens=5, max_tokens=3)


def test_it_is_a_plain_frozen_dataclass() -> None:
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.max_tokens = 100  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="maxtokens"):
        params.clone(maxtokens=5)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[misc]


def test_an_unknown_name_from_the_wire_is_refused() -> None:
    for name in ("no_such", "best_of", 5):
        with pytest.raises(ValidationError, match=f"{name}: is no field of SamplingParams"):
            SamplingParams.from_wire({name: 1})  # type: ignore[dict-item]


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(plain, lambda v: st.lists(v, max_size=4) | st.dictionaries(plain, v, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5))
def test_what_comes_from_a_wire_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_wire(fields)
    except ValidationError:
        return
    assert SamplingParams.from_wire(params.to_wire()) == params


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_true_asks_for_one_alternative_and_false_for_none(name: str) -> None:
    assert getattr(SamplingParams(**{name: True}), name) == 1
    assert getattr(SamplingParams(**{name: False}), name) is None


def test_minus_one_stands_for_all_alternatives_of_a_model() -> None:
    asked = SamplingParams(logprobs=-1, prompt_logprobs=3)
    assert asked.logprobs == -1, "as it was given, until a model is known"
    assert asked.of_model(500) == SamplingParams(logprobs=500, prompt_logprobs=3)
    assert SamplingParams(n=2).of_model(500) == SamplingParams(n=2)


def test_a_seed_of_minus_one_is_random() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2
