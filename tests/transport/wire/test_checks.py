"""The one checker of values: plain values out, or the error that its layer chose."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavecore.transport.errors import ConfigError, ProtocolError, ValidationError
from wavecore.transport.wire.checks import MAX_DEPTH, MAX_TEXT, Checker, plain, shown, table, text

CHECK = Checker(ValidationError)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_plain(value: Any) -> None:
    found = CHECK.whole("n", value, 3, 3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, 2, 5, 10**5000, np.array([3]), np.bool_(True)], ids=shown)
def test_what_is_no_whole_number_in_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="n: must be a whole number from 3 to 4, not "):
        CHECK.whole("n", value, 3, 4)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2)])
def test_numbers_become_plain(value: Any) -> None:
    found = CHECK.real("x", value, 0.5, 1)
    assert found == 0.5 and type(found) is float
    assert type(CHECK.real("x", 1, 0.0, math.inf)) is float
    assert CHECK.real("x", math.inf, 0.0, math.inf) == math.inf


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -0.5, 10**400, np.array(0.5)], ids=shown)
def test_what_is_no_number_in_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="x: must be a number of at least 0 and at most 1, not "):
        CHECK.real("x", value, 0.0, 1.0)


def test_the_least_may_be_too_little() -> None:
    assert CHECK.real("x", 1e-300, 0.0, math.inf, above=True) > 0
    with pytest.raises(ValidationError, match="x: must be a number above 0, not 0"):
        CHECK.real("x", 0, 0.0, math.inf, above=True)


def test_lists_are_measured_before_their_entries_are_looked_at() -> None:
    assert CHECK.token_ids("ids", np.array([1, 2]), 2) == (1, 2)
    assert CHECK.texts("stop", ["a"], 1, 1) == ("a",)
    with pytest.raises(ValidationError, match="at most 2 entries, not 3 entries"):
        CHECK.token_ids("ids", ["no id"] * 3, 2)
    for value in (5, "ab", b"ab", {1: 2}, np.array(1), iter([1])):
        with pytest.raises(ValidationError, match="ids: must be a list of at most 9 entries, not "):
            CHECK.token_ids("ids", value, 9)
    for entry in (-1, 1 << 31, 1.0, "1"):
        with pytest.raises(ValidationError, match="ids: must be a whole number"):
            CHECK.token_ids("ids", [1, entry], 9)
    for entry in ("", "ab", 1):
        with pytest.raises(ValidationError, match="stop: each entry must be text of 1 to 1 characters"):
            CHECK.texts("stop", [entry], 9, 1)


def test_each_layer_raises_its_own_error() -> None:
    settings = Checker(lambda name, reason: ConfigError(f"--{name} {reason}"))
    with pytest.raises(ConfigError, match="--device must be one of a, b, not 'c'"):
        settings.one_of("device", "c", ["a", "b"])
    with pytest.raises(ConfigError, match="--tqdm must be true or false, not 1"):
        settings.flag("tqdm", 1)
    with pytest.raises(ConfigError, match="--ops must be a mapping of texts, not"):
        settings.text_map("ops", {"a": 1})


def test_paths_are_what_users_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert CHECK.path("config", "~/run") == Path("/home/me/run")
    assert CHECK.path("config", Path("a b/ü")) == Path("a b/ü")
    for value in ("", "a\0b", "\udcff\ud800", b"/tmp", 5, None, "~nobody of this name/run"):
        with pytest.raises(ValidationError, match="config: must be a path, not"):
            CHECK.path("config", value)


def test_a_value_that_cannot_be_printed_is_named_by_its_type() -> None:
    assert shown(10**5000) == "such int"
    assert len(shown("x" * 10**6)) == 80


@pytest.mark.parametrize(
    "value", [1 << 64, -(1 << 63) - 1, {1 << 64: 1}, {1.5: 1}, object(), np.int64(1), "\ud800", {"\ud800": 1}, {1, 2}]
)
def test_what_cannot_travel_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        plain([value])


def test_what_can_travel_does() -> None:
    value = {"a": [1, (1 << 64) - 1, -(1 << 63), 0.5, math.nan, None, True, b"x", ("ü",)], 5: {}}
    assert plain(value) is value
    nested: Any = []
    for _ in range(MAX_DEPTH + 1):
        nested = [nested]
    with pytest.raises(ProtocolError, match="nested deeper"):
        plain(nested)
    with pytest.raises(ProtocolError, match="text keys"):
        table({"a": 1, 5: 2})
    with pytest.raises(ProtocolError, match=f"at most {MAX_TEXT} characters"):
        text("x" * (MAX_TEXT + 1))


def test_texts_that_cannot_travel_are_refused_and_made_plain() -> None:
    with pytest.raises(ValidationError, match="salt: must be text without lone surrogates"):
        CHECK.text("salt", "a\ud800", 1, 9)
    assert type(CHECK.text("salt", np.str_("é"), 1, 9)) is str


@pytest.mark.parametrize("value", [None, 5, b"a", "a\0b", "\ud800", ["a"]])
def test_paths(value: Any) -> None:
    assert CHECK.path("path", "a/b") == CHECK.path("path", Path("a/b")) == Path("a/b")
    with pytest.raises(ValidationError, match="path: must be a path, not "):
        CHECK.path("path", value)


def test_what_is_shown_is_short_however_much_a_value_holds() -> None:
    bomb: Any = [1]
    for _ in range(40):
        bomb = [bomb] * 10
    for value in (bomb, "a" * 1000, 10**5000, list(range(10**6)), {"a": bomb}):
        assert len(shown(value)) <= 80
