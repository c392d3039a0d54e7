"""Hypothesis strategies for every message, and equality that understands arrays."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wavecore.transport.wire import messages as m
from wavecore.transport.wire.tensors import DTYPES

token16 = st.binary(min_size=16, max_size=16)
number = st.integers(0, (1 << 63) - 1)
count = st.integers(0, (1 << 64) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | text
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.integers(0, 99), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
table = st.dictionaries(text, plain, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, large: bool = True) -> m.TensorFrame:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    if large and draw(st.integers(0, 9)) == 0:
        shape = (*shape[:1], 70_000)
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
    fill = draw(st.binary(min_size=1, max_size=7))
    return m.TensorFrame(dtype, shape, (fill * (size // len(fill) + 1))[:size])


@st.composite
def step_tokens(draw: st.DrawFn) -> m.StepTokens:
    rows = draw(st.integers(0, 6))
    counts = draw(hnp.arrays(np.uint32, rows, elements=st.integers(0, 3)))
    frames = tuple(draw(st.lists(tensors(large=False), max_size=4)))
    extra = st.fixed_dictionaries(
        {},
        optional={
            "code": text,
            "seed": count,
            "logprobs": st.lists(st.integers(0, len(frames) - 1), max_size=3) if frames else st.just([]),
        },
    )
    return m.StepTokens(
        handles=draw(hnp.arrays(np.uint32, rows, elements=st.integers(0, 20), unique=True)),
        counts=counts,
        tokens=draw(hnp.arrays(np.int32, int(counts.sum()))),
        finish=draw(hnp.arrays(np.uint8, rows, elements=st.integers(0, 5))),
        extras=draw(st.dictionaries(st.integers(0, rows - 1), extra, max_size=3)) if rows else {},
        frames=frames,
    )


frames = st.lists(tensors(), max_size=4).map(tuple)
rank = st.integers(0, 1 << 16)
sizes = hnp.arrays(np.uint32, st.integers(0, 4))

messages = st.one_of(
    st.builds(
        m.Add, token16, token16, number, st.integers(0, (1 << 32) - 1), tensors(), table, table, st.none() | tensors()
    ),
    st.builds(m.Abort, token16, token16, number, hnp.arrays(np.uint32, st.integers(0, 9))),
    st.builds(m.Utility, token16, token16, number, count, text, table),
    st.builds(m.Hello),
    st.builds(m.Ping, token16, number, st.booleans(), number),
    st.builds(m.Ready, token16, table),
    st.builds(m.Step, token16, number, step_tokens(), st.builds(m.Load, count, count, count)),
    st.builds(m.Result, token16, number, count, text, text, plain, frames),
    st.builds(m.Heartbeat, token16, number, st.builds(m.Load, count, count, count), st.booleans(), number),
    st.builds(m.UnknownClient, token16),
    st.builds(m.Dead, token16, text, text, text),
    st.builds(m.Bye, token16),
    st.builds(m.Piece, token16, token16, number, st.integers(0, 1), sizes, tensors()),
    st.builds(m.Mark, token16, token16, number, number),
    st.builds(m.Join, rank, text, text),
    st.builds(m.Votes, token16, count, st.dictionaries(rank, st.tuples(*[count] * m.VOTE_NUMBERS), max_size=4)),
    st.builds(m.StepRecord, token16, number, rank, st.booleans(), tensors()),
    st.builds(m.Words, token16, st.lists(count, max_size=16)),
)  # fmt: skip


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, arrays and buffers by their bytes; a tuple equals the list that it travels as."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, bytes | memoryview):
        return isinstance(right, bytes | memoryview) and bytes(left) == bytes(right)
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
        )
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return isinstance(right, list | tuple) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)
