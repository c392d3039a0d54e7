"""Collects what one step tells the clients and makes one `Columns` per client of it, with numpy and no loop over rows.

Two sources: the rows of a step (columns already) and single events (errors, aborts, deadlines).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.plan import RowLogprobs
from wavecore.transport.wire.messages import Columns, FinishReason, TensorFrame

I32 = npt.NDArray[np.int32]


class Outputs:
    """Output of the step in the making. `rows` is called at most once per `take`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._client: I32 = np.zeros(0, np.int32)
        self._handle: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._token: I32 = np.zeros(0, np.int32)
        self._finish: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._extras: dict[int, dict[str, Any]] = {}
        self._tensors: dict[int, dict[str, list[TensorFrame]]] = {}
        self._ends: list[tuple[bytes, int, FinishReason, dict[str, Any], dict[str, list[TensorFrame]]]] = []

    def __bool__(self) -> bool:
        return bool(len(self._handle) or self._ends)

    def rows(
        self, client: I32, handle: npt.NDArray[np.uint32], token: I32, finish: npt.NDArray[np.uint8]
    ) -> dict[int, dict[str, Any]]:
        """One token each; returns the rows' sparse extras, by row, to be filled in."""
        assert not len(self._handle), "rows of two steps in one output"
        self._client, self._handle, self._token, self._finish = client, handle, token, finish
        return self._extras

    def row_logprobs(self, row: int, name: str, values: RowLogprobs) -> None:
        self._tensors.setdefault(row, {})[name] = logprob_frames(values)

    def end(
        self,
        client: bytes,
        handle: int,
        finish: FinishReason,
        extras: dict[str, Any],
        tensors: dict[str, list[TensorFrame]] | None = None,
    ) -> None:
        """A request ended without a token of its own."""
        self._ends.append((client, handle, finish, extras, tensors or {}))

    def take(self, clients: list[bytes]) -> dict[bytes, Columns]:
        """Everything collected; `clients` names the client numbers of the rows."""
        if not self:
            return {}
        parts: dict[bytes, Columns] = {}
        if len(self._handle):
            numbers = self._client
            if (numbers == numbers[0]).all():
                parts[clients[numbers[0]]] = self._columns(np.arange(len(numbers)), identity=True)
            else:
                order = np.argsort(numbers, kind="stable")
                starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
                for rows in np.split(order, starts[1:]):
                    parts[clients[numbers[rows[0]]]] = self._columns(rows)
        ends: dict[bytes, list[tuple[int, FinishReason, dict[str, Any], dict[str, list[TensorFrame]]]]] = {}
        for client, *end in self._ends:
            ends.setdefault(client, []).append(tuple(end))  # type: ignore[arg-type]
        for client, some in ends.items():
            parts[client] = _append(parts.get(client), some)
        self._clear()
        return parts

    def _columns(self, rows: npt.NDArray[np.int64], identity: bool = False) -> Columns:
        extras: dict[int, dict[str, Any]] = {}
        frames: list[TensorFrame] = []
        if self._extras or self._tensors:
            place = {int(row): i for i, row in enumerate(rows)}
            for row in self._extras.keys() | self._tensors.keys():
                if row in place:
                    extra = extras[place[row]] = dict(self._extras.get(row, {}))
                    _attach(extra, self._tensors.get(row, {}), frames)
        return Columns(
            handles=self._handle if identity else self._handle[rows],
            counts=np.ones(len(rows), np.uint32),
            tokens=self._token if identity else self._token[rows],
            finish=self._finish if identity else self._finish[rows],
            extras=extras,
            frames=tuple(frames),
        )


def logprob_frames(values: RowLogprobs) -> list[TensorFrame]:
    """In the order in which a client reads them: ids, log-probabilities, ranks."""
    return [frame("int32", values.token_ids), frame("float32", values.logprobs), frame("int32", values.ranks)]


def join_logprobs(parts: list[RowLogprobs]) -> RowLogprobs:
    """Those of consecutive positions as one."""
    return RowLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def frame(dtype: str, array: npt.NDArray[Any]) -> TensorFrame:
    """A copy of the array for the wire, as `dtype`."""
    return TensorFrame(dtype, array.shape, array.astype(dtype, copy=False).tobytes())


def _attach(extra: dict[str, Any], tensors: dict[str, list[TensorFrame]], frames: list[TensorFrame]) -> None:
    for name, some in tensors.items():
        extra[name] = list(range(len(frames), len(frames) + len(some)))
        frames.extend(some)


def _append(
    base: Columns | None, ends: list[tuple[int, FinishReason, dict[str, Any], dict[str, list[TensorFrame]]]]
) -> Columns:
    """`base` and one row without a token for each of `ends`."""
    extras = dict(base.extras) if base else {}
    frames = list(base.frames) if base else []
    start = len(base.handles) if base else 0
    for i, (_, _, extra, tensors) in enumerate(ends, start):
        if extra or tensors:
            extras[i] = dict(extra)
            _attach(extras[i], tensors, frames)
    handles = np.array([handle for handle, *_ in ends], np.uint32)
    finish = np.array([finish for _, finish, *_ in ends], np.uint8)
    zero = np.zeros(len(ends), np.uint32)
    return Columns(
        handles=np.concatenate((base.handles, handles)) if base else handles,
        counts=np.concatenate((base.counts, zero)) if base else zero,
        tokens=base.tokens if base else np.zeros(0, np.int32),
        finish=np.concatenate((base.finish, finish)) if base else finish,
        extras=extras,
        frames=tuple(frames),
    )
