"""Does a function do what a twin does? Compares results, and the arguments that it may have changed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from wavecore.kernels.examples import EXAMPLES

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference allowed, relative to the twin's largest magnitude."""


class DidNotRun(ValueError):
    """The function raised, so nothing is known of its results: it may be for another device."""


def check_op(name: str, fn: Callable[..., Any], twin: Callable[..., Any], like: Tensor) -> None:
    """Compare fn with the twin of operation `name` on a small example of `like`'s dtype and device.

    Raises:
        ValueError: a result or a changed argument differs.
        DidNotRun: fn raised.
    """
    try:
        complaint = compare(fn, twin, EXAMPLES[name](like))
    except DidNotRun as error:
        raise DidNotRun(f"{name}: with {like.dtype} on {like.device} {error}") from error.__cause__
    if complaint is not None:
        with_what = f"{twin.__module__}.{name} does with {like.dtype} on {like.device}"
        raise ValueError(f"{name}: the function does not do what {with_what}: {complaint}")


def compare(fn: Callable[..., Any], twin: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Run fn and the twin on copies of args; None if they agree, else what differs.

    Raises:
        DidNotRun: fn raised.
    """
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    expected = twin(*ours)
    try:
        result = fn(*theirs)
    except Exception as error:
        raise DidNotRun(f"it raised {type(error).__name__}: {error}") from error
    got = dict(_tensors((result, *theirs), "result"))
    for where, want in _tensors((expected, *ours), "result"):
        complaint = _difference(got.get(where), want)
        if complaint:
            return f"{where} {complaint}"
    return None


def _tensors(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{where}[{i}]")
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name), f"{where}.{f.name}")


def _difference(got: Tensor | None, want: Tensor) -> str | None:
    if got is None:
        return "is missing"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    if not want.is_floating_point():
        return None if torch.equal(got, want) else "differs"
    if not torch.equal(torch.isnan(got), torch.isnan(want)) or not torch.equal(torch.isinf(got), torch.isinf(want)):
        return "has NaN or infinity in other places"
    finite = torch.isfinite(want)
    if not bool(finite.any()):
        return None
    error = float((got[finite].double() - want[finite].double()).abs().max())
    bound = TOLERANCE.get(want.dtype, 1e-4) * max(1.0, float(want[finite].double().abs().max()))
    return f"differs by up to {error:.3g}, allowed is {bound:.3g}" if error > bound else None
