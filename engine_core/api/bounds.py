"""Values of a request, checked and made plain: whole numbers, numbers, lists of token ids, strings.

Every function takes the field's name, which the ValidationError then says, and gives the plain Python value: numpy's
numbers and arrays are welcome where Python's are. A bool is no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from wavecore.transport.errors import ValidationError

MAX_TOKEN_ID = (1 << 31) - 1


def shown(value: Any) -> str:
    """A value in an error message: short, and whatever its `repr` does."""
    try:
        return f"{value!r:.80}"
    except Exception:  # Python refuses to print whole numbers of more than 4,300 digits
        return f"such {type(value).__name__}"


def whole(name: str, value: Any, low: int, high: int) -> int:
    number = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if number and low <= value <= high:
        return int(value)
    raise ValidationError(name, f"must be a whole number from {low} to {high}, not {shown(value)}")


def real(name: str, value: Any, low: float, high: float) -> float:
    number = type(value) in (float, int) or (isinstance(value, Real) and not isinstance(value, bool))
    if number and low <= value <= high:  # not true of NaN
        return float(value)
    raise ValidationError(name, f"must be a number from {low} to {high}, not {shown(value)}")


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValidationError(name, f"must be true or false, not {shown(value)}")
    return value


def token_ids(name: str, ids: Any, limit: int) -> tuple[int, ...]:
    return tuple([whole(name, i, 0, MAX_TOKEN_ID) for i in entries(name, ids, limit)])


def strings(name: str, values: Any, limit: int, longest: int) -> tuple[str, ...]:
    found = entries(name, values, limit)
    for value in found:
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise ValidationError(name, f"each entry must be a string of 1 to {longest} characters, not {shown(value)}")
    return tuple(found)


def entries(name: str, values: Any, limit: int) -> list[Any]:
    """The entries of a list; its length is known before any entry is looked at."""
    try:
        count = -1 if isinstance(values, str | bytes | Mapping) else len(values)
        if 0 <= count <= limit:
            return list(values)
    except TypeError:
        count = -1
    found = f"{count} entries" if count >= 0 else shown(values)
    raise ValidationError(name, f"must be a list of at most {limit} entries, not {found}")


def biases(name: str, bias: Any, limit: int) -> dict[int, float]:
    if not isinstance(bias, Mapping) or len(bias) > limit:
        raise ValidationError(name, f"must map at most {limit} token ids to numbers")
    found: dict[int, float] = {}
    for token, value in bias.items():
        try:
            number = int(token) if isinstance(token, str) else token
        except ValueError:
            raise ValidationError(name, f"{shown(token)} is not a token id") from None
        found[whole(name, number, 0, MAX_TOKEN_ID)] = real(name, value, -100.0, 100.0)
    return found
