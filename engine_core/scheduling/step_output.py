"""Collects what one step tells the clients and makes one `StepTokens` a client, with numpy and no loop over rows.

Two sources: the rows of a step (columns already) and single events (errors, aborts, deadlines). Extras are sparse: what
few rows have to say beside their token. Tensors among them are lists of frames, moved to `StepTokens.frames` at last.
"""

from typing import Any

import numpy as np

from wavecore.engine_core.plan import I32, U8, Index, RowLogprobs
from wavecore.transport.wire.messages import U32, FinishReason, StepTokens, TensorFrame
from wavecore.transport.wire.step_tokens import FRAME_LISTS, merge
from wavecore.transport.wire.tensors import from_numpy

RowExtras = dict[str, Any]


_End = tuple[int, FinishReason, RowExtras]
"""A request ended without a token of its own: its handle, how, and what is told."""


class Outputs:
    """Output of the step in the making, true while there are ends. `rows` is called at most once a step, which then
    calls `take`."""

    def __init__(self) -> None:
        self._rows: tuple[I32, U32, I32, U8] | None = None  # client number, handle, token, finish code
        self._extras: dict[int, RowExtras] = {}
        self._ends: dict[bytes, list[_End]] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def rows(self, client: I32, handle: U32, token: I32, finish: U8) -> dict[int, RowExtras]:
        """One token each, at least one row; returns the rows' extras, by row, to be filled in."""
        assert self._rows is None, "rows of two steps in one output"
        self._rows = client, handle, token, finish
        return self._extras

    def end(self, client: bytes, handle: int, finish: FinishReason, extras: RowExtras) -> None:
        """A request ended without a token of its own."""
        self._ends.setdefault(client, []).append((handle, finish, extras))

    def take(self, clients: list[bytes]) -> dict[bytes, StepTokens]:
        """Everything collected; `clients` names the client numbers of the rows."""
        parts: dict[bytes, StepTokens] = {}
        if self._rows is not None:
            numbers, handles, tokens, finish = self._rows
            if (numbers == numbers[0]).all():
                parts[clients[numbers[0]]] = self._step_tokens(slice(None), handles, tokens, finish)
            else:
                order = np.argsort(numbers, kind="stable")
                starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
                for rows in np.split(order, starts[1:]):
                    parts[clients[numbers[rows[0]]]] = self._step_tokens(rows, handles, tokens, finish)
            self._rows, self._extras = None, {}
        for client, ends in self._ends.items():
            ended = _ended(ends)
            parts[client] = merge(parts[client], ended) if client in parts else ended
        self._ends = {}
        return parts

    def _step_tokens(self, rows: Index | slice, handles: U32, tokens: I32, finish: U8) -> StepTokens:
        frames: list[TensorFrame] = []
        extras: dict[int, RowExtras] = {}
        if self._extras:
            for place, row in enumerate(np.arange(len(handles))[rows].tolist()):
                if row in self._extras:
                    extras[place] = _with_frames(self._extras[row], frames)
        own = handles[rows]
        return StepTokens(own, np.ones_like(own), tokens[rows], finish[rows], extras, tuple(frames))


def _ended(ends: list[_End]) -> StepTokens:
    """A row without a token for each."""
    frames: list[TensorFrame] = []
    handles, finish, told = zip(*ends, strict=True)
    extras = {i: _with_frames(extra, frames) for i, extra in enumerate(told) if extra}
    rows, codes = np.array(handles, np.uint32), np.array(finish, np.uint8)
    return StepTokens(rows, np.zeros_like(rows), np.zeros(0, np.int32), codes, extras, tuple(frames))


def _with_frames(extras: RowExtras, frames: list[TensorFrame]) -> RowExtras:
    """A row's extras as they go on the wire: its frames are appended to the client's, and named by their places."""
    placed = dict(extras)
    for name in FRAME_LISTS:
        if name in extras:
            placed[name] = list(range(len(frames), len(frames) + len(extras[name])))
            frames.extend(extras[name])
    return placed


def logprob_frames(values: RowLogprobs) -> list[TensorFrame]:
    """In the order in which a client reads them: ids, log-probabilities, ranks."""
    return [from_numpy(column) for column in values]


def join_logprobs(parts: list[RowLogprobs]) -> RowLogprobs:
    """Those of consecutive positions as one."""
    return RowLogprobs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
