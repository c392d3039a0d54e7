"""Fields of a frozen dataclass, checked and made plain as their annotations say, and written on the wire."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import MAX_TEXT, Checker

Check = Callable[[str, Any], Any]


class Bounds(NamedTuple):
    """The least and the most of a number, or of a text's characters; with `above`, the least itself is too little."""

    low: float
    high: float
    above: bool = False


def field_checks(cls: type, checker: Checker) -> Mapping[str, Check]:
    """A check for each field: takes its name and a value, gives the plain value or raises the checker's error.

    Numbers and texts have their bounds in the annotation, as in `Annotated[int | None, Bounds(1, 9)]`, and so have the
    entries of a list of numbers; a bool, a Literal of texts and a dict of texts need none. A field of another kind may
    have its whole check there, `Annotated[Sequence[str] | None, _stop]`; without one it is left out.
    """
    or_none = Checker(lambda name, reason: checker.error(name, reason.replace(", not ", " (or None), not ", 1)))
    found: dict[str, Check] = {}
    hints = get_type_hints(cls, include_extras=True)
    for name in defaults(cls):
        hint = hints[name]
        hint, bounds = get_args(hint) if get_origin(hint) is Annotated else (hint, Bounds(0, MAX_TEXT))
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        optional = NoneType in kinds
        check = bounds if callable(bounds) else _check_of(kinds[0], bounds, or_none if optional else checker)
        if check:
            found[name] = partial(_or_none, check) if optional else check
    return found


def _check_of(kind: Any, bounds: Bounds, checker: Checker) -> Check | None:
    if get_origin(kind) is Literal:
        return partial(checker.one_of, choices=get_args(kind))
    span: dict[str, Any] = {"low": bounds.low, "high": bounds.high}
    checks: dict[Any, Check] = {
        int: partial(checker.whole, **span),
        float: partial(checker.real, **span, above=bounds.above),
        str: partial(checker.text, **span),
        bool: checker.flag,
        dict[str, str]: checker.text_map,
        list[int]: partial(checker.numbers, **span),
    }
    return checks.get(kind)


def _or_none(check: Check, name: str, value: Any) -> Any:
    """None stays None, and so becomes what asks for nothing either: an empty tuple or mapping."""
    plain = None if value is None else check(name, value)
    return None if plain in ((), {}) else plain


def make_plain(instance: object, checks: Mapping[str, Check]) -> None:
    """Check all fields of an instance, in its `__post_init__`, and put their plain values in place."""
    for name, check in checks.items():
        value = getattr(instance, name)
        plain = check(name, value)
        if plain is not value:
            object.__setattr__(instance, name, plain)


def defaults(cls: Any) -> Mapping[str, Any]:
    """The fields of a dataclass with their defaults."""
    return _defaults(cls)  # mypy takes no `type[Self]` for what a cached function wants, a Hashable


@cache
def _defaults(cls: Any) -> Mapping[str, Any]:
    return {field.name: field.default for field in fields(cls)}


class WireFields:
    """Of a dataclass that travels to an engine: only what differs from the defaults does."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain msgpack values."""
        own = defaults(type(self)).items()
        return {name: value for name, default in own if (value := getattr(self, name)) != default}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild from `to_wire`.

        Raises:
            ValidationError: on an unknown field or a value out of bounds.
        """
        for name in values.keys() - defaults(cls).keys():
            raise ValidationError(str(name)[:64], f"is no field of {cls.__name__}")
        return cls(**values)
