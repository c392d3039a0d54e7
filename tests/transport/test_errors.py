"""The tree of exceptions: each says when it is raised and what to do, and keeps its code over the wire."""

from __future__ import annotations

import errno

import pytest

import wavecore
from wavecore.transport import errors
from wavecore.transport.errors import ResourceError, ValidationError, WavecoreError, as_wavecore_error, from_code

TREE = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, WavecoreError)]


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_each_has_a_docstring_of_its_own(error: type[WavecoreError]) -> None:
    text = vars(error)["__doc__"]
    when, _, what_to_do = text.partition("\n\n")
    assert when.strip() and what_to_do.strip()
    assert [other.__name__ for other in TREE if other.__doc__ == text] == [error.__name__]


def test_the_tree_of_the_docstring_is_the_tree() -> None:
    drawn = [line.split("+-- ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "+-- " in line]
    assert sorted(drawn) == sorted(error.__name__ for error in TREE if error is not WavecoreError)
    public = {name for name in wavecore.__all__ if isinstance(getattr(wavecore, name), type)}
    assert {error.__name__ for error in TREE} - public == {"MessageTooLarge", "NotSupportedName"}, (
        "their bases to programs"
    )


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_codes_travel(error: type[WavecoreError]) -> None:
    known = from_code(error.code, "field: what is wrong")
    assert type(known) is error
    assert str(known) == "field: what is wrong"
    if isinstance(known, ValidationError):
        assert known.field == "field"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.EMFILE])
def test_what_the_machine_refuses_is_a_resource(number: int) -> None:
    found = as_wavecore_error(OSError(number, "no", "/a/file"))
    assert type(found) is ResourceError
    assert "/a/file" in str(found)


@pytest.mark.parametrize("kind", ["ConfigError", "ModelError", "ValidationError", "NotSupportedError"])
def test_what_refuses_a_value_is_a_value_error(kind: str) -> None:
    """As in vLLM: programs write `except ValueError` around whatever takes their values."""
    assert issubclass(getattr(errors, kind), ValueError)
