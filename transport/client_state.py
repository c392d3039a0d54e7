"""What the output thread holds for one client: its numbered stream, and the output that waits for room in it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wavecore.transport.codec import Frames, encode
from wavecore.transport.columns import finish_columns, merge, size_of
from wavecore.transport.delivery import Outbox
from wavecore.transport.errors import ProtocolError, WavecoreError
from wavecore.transport.messages import Columns, FinishReason, Result, Step, TensorFrame

STEP_BYTES = 1 << 20  # merged output leaves in messages of about this size
CHUNK_BYTES = 8 << 20
MERGE_EVERY = 64  # merging each step would copy all that waits each time

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what an engine holds for its clients.

    Attributes:
        clients: attached at once.
        messages, bytes: sent to one client and not acknowledged; more waits, merged.
        waiting_bytes: merged output that waits; a client that needs more is dropped.
        absent_ticks, silent_ticks, stalled_ticks: a client is dropped after so many seconds without a connection,
            without a word, without acknowledging anything while output waits.
    """

    clients: int = 1000
    messages: int = 256
    bytes: int = 32 << 20
    waiting_bytes: int = 256 << 20
    absent_ticks: int = 5
    silent_ticks: int = 10
    stalled_ticks: int = 10


class ClientState:
    def __init__(self, epoch: bytes, limits: Limits) -> None:
        self._epoch = epoch
        self._limits = limits
        self._outbox = Outbox(limits.messages, limits.bytes)
        self._columns: list[Columns] = []
        self._columns_merged = 0  # how many parts of _columns the last merge left
        self._load = (0, 0, 0)
        self._results: deque[Result] = deque()
        self._waiting_bytes = 0
        self._silent_ticks = 0
        self._absent_ticks = 0
        self._stalled_ticks = 0

    @property
    def last_number(self) -> int:
        return self._outbox.last_number

    @property
    def has_output(self) -> bool:
        """Whether something was not transmitted yet."""
        return bool(self._columns or self._results or self._outbox.peek() is not None)

    @property
    def overflows(self) -> bool:
        return self._waiting_bytes > self._limits.waiting_bytes

    def heard(self) -> None:
        self._silent_ticks = 0

    def acknowledge(self, seen: int, gap: bool, now: float) -> None:
        if self._outbox.acknowledge(seen, gap, now):
            self._stalled_ticks = 0

    def tick(self, connected: bool) -> str:
        """One second went by. Returns why the client must be dropped, or nothing."""
        self._silent_ticks += 1
        self._absent_ticks = 0 if connected else self._absent_ticks + 1
        self._stalled_ticks = self._stalled_ticks + 1 if self._outbox.full else 0
        if self._absent_ticks > self._limits.absent_ticks:
            return f"it disconnected and did not come back for {self._limits.absent_ticks} s"
        if self._silent_ticks > self._limits.silent_ticks:
            return f"it was silent for {self._limits.silent_ticks} s"
        if self._stalled_ticks > self._limits.stalled_ticks:
            return f"it read nothing for {self._limits.stalled_ticks} s while output waited"
        return ""

    def put(self, columns: Columns, load: tuple[int, int, int]) -> None:
        self._columns.append(columns)
        self._load = load
        self._waiting_bytes += size_of(columns)
        if len(self._columns) - self._columns_merged >= MERGE_EVERY:
            self._columns = [merge(*group) for group in _groups(self._columns)]
            self._columns_merged = len(self._columns)
            self._count_waiting()

    def put_result(self, call: int, value: Any, frames: Sequence[TensorFrame], error: WavecoreError | None) -> None:
        """Queue the chunks of a utility call's answer; frames of about 8 MiB a chunk, the value in the last."""
        code, text = (error.code, str(error)) if error else ("", "")
        chunk: list[TensorFrame] = []
        size = 0
        for frame in frames:
            if chunk and size + len(frame.buffer) > CHUNK_BYTES:
                self._results.append(Result(self._epoch, 0, call, False, "", "", None, tuple(chunk)))
                chunk, size = [], 0
            chunk.append(frame)
            size += len(frame.buffer)
        self._results.append(Result(self._epoch, 0, call, True, code, text, value, tuple(chunk)))
        self._count_waiting()

    def next_frames(self, now: float) -> Frames | None:
        """The next message to transmit, encoded when its turn comes; None: nothing, or no room in the window."""
        frames = self._outbox.peek()
        while frames is None and not self._outbox.full and (self._columns or self._results):
            if self._results:
                self._append_result(now)
            else:
                self._append_columns(now)
            self._count_waiting()
            frames = self._outbox.peek()
        return frames

    def advance(self) -> None:
        self._outbox.advance()

    def _append_columns(self, now: float) -> None:
        group = next(_groups(self._columns))
        del self._columns[: len(group)]
        self._columns_merged = max(0, self._columns_merged - len(group))
        columns = merge(*group)
        try:
            frames = self._encode_step(columns)
        except ProtocolError as error:  # too large, or a bug: these requests end with the reason, the others go on
            log.exception("output of %d requests cannot travel", len(columns.handles))
            frames = self._encode_step(
                finish_columns(columns.handles.tolist(), FinishReason.ERROR, error.code, str(error))
            )
        self._outbox.append(frames, now)

    def _encode_step(self, columns: Columns) -> Frames:
        return encode(Step(self._epoch, self._outbox.last_number + 1, columns, self._load))

    def _append_result(self, now: float) -> None:
        result = self._results.popleft()
        number = self._outbox.last_number + 1
        try:
            frames = encode(_numbered(result, number))
        except ProtocolError as error:
            log.exception("result of call %d cannot travel", result.call)
            while self._results and self._results[0].call == result.call:
                self._results.popleft()
            frames = encode(Result(self._epoch, number, result.call, True, error.code, str(error)))
        self._outbox.append(frames, now)

    def _count_waiting(self) -> None:
        self._waiting_bytes = sum(map(size_of, self._columns)) + sum(
            len(frame.buffer) for result in self._results for frame in result.frames
        )


def _numbered(result: Result, number: int) -> Result:
    return Result(
        result.epoch, number, result.call, result.last, result.error_code, result.error, result.value, result.frames
    )


def _groups(parts: list[Columns]) -> Iterator[list[Columns]]:
    """Neighbours that fit into one message together."""
    group: list[Columns] = []
    size = 0
    for part in parts:
        if group and size + size_of(part) > STEP_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += size_of(part)
    if group:
        yield group
