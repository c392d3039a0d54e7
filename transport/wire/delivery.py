"""Exactly once over a wire that loses without a word: the two ends of one numbered stream. Pure state, clock given.

    append -> two lanes of messages -> pieces, numbered as they leave -> window -> socket -> Inbox -> messages

Sender (`Outbox`): number from 1 what leaves, keep it until the peer has acknowledged it, send again what the peer
misses (the field's name: go-back-N). Receiver (`Inbox`): take exactly the next number, drop the rest, say how far it
got.

*What is lost* is never guessed by a clock, since a slow link may hold a message for minutes. A socket keeps the order
of what it carries, so a number that arrives ahead of its turn shows a hole. Behind the last message nothing comes that
could show it: when the peer spoke and had got no further, a `Mark` follows, which names the last number that went out
ahead of it. A hole is filled by an *attempt*: a Mark, and all that is unacknowledged once more. A hole is reported with
the attempt that it was seen in, so what was on its way before cannot ask twice.

Word from the peer is the only cause of all that: a peer that is stopped gets nothing, so a pipe to it cannot fill up.

*What is large* cannot hold up what is small: messages above PIECE_BYTES leave as `Piece`s, the lanes take turns, and
the window bounds what lies in the buffers of sockets, where nothing can be overtaken any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import numpy as np

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.codec import MAX_MESSAGE_BYTES, Buffer, Frames, encode, numbered, total_bytes
from wavecore.transport.wire.messages import U32, Mark, Piece, TensorFrame

PIECE_BYTES = 256 << 10
WINDOW_MESSAGES = 256
WINDOW_BYTES = 2 << 20  # in flight at first; doubled while a full window takes less than 50 ms, halved above 200 ms
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES = 1 << 20, 32 << 20
FAST_SECONDS, SLOW_SECONDS = 0.05, 0.2
REPORT_MESSAGES = 32
REPORT_BYTES = PIECE_BYTES
_NO_SIZES = np.empty(0, np.uint32)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message in a lane: `rest` is what remains of it, with sizes; `left` its bytes; `handle` is for `withdraw`."""

    rest: Iterator[tuple[int, Frames]]
    left: int
    handle: int | None


class Outbox:
    """The sending end. The owner transmits what `peek` gives and then calls `advance`.

    Args:
        epoch, client_id: of the session, for the messages that the stream itself needs.
        window: messages and, at first, bytes that may be in flight: transmitted and not acknowledged.
        clock: monotonic seconds. It decides how wide the window is, never what is lost.

    Attributes:
        bytes: of all that was appended and is not acknowledged.
    """

    def __init__(
        self,
        epoch: bytes,
        client_id: bytes,
        window: tuple[int, int] = (WINDOW_MESSAGES, WINDOW_BYTES),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = (epoch, client_id)
        self._window_messages, self._window_bytes = window
        self._clock = clock
        self._timed: tuple[int, float] | None = None  # a number whose acknowledgement is timed, and when it left
        self._lanes: tuple[deque[_Waiting], deque[_Waiting]] = (deque(), deque())
        self._lead = 0  # bytes that lane 0 sent since lane 1 last had its turn
        self._kept: deque[tuple[Frames, int]] = deque()  # numbered and unacknowledged; the first has `_seen + 1`
        self._in_flight = 0  # bytes of _kept
        self._seen = 0
        self._cursor = 0  # index into _kept of the next to transmit
        self._attempt = 0
        self._mark_due = False
        self.bytes = 0

    def __len__(self) -> int:
        """Messages and pieces that are not acknowledged; a message that waits counts once."""
        return len(self._kept) + len(self._lanes[0]) + len(self._lanes[1])

    @property
    def sent(self) -> int:
        """The last number that was given; 0 before the first."""
        return self._seen + len(self._kept)

    @property
    def full(self) -> bool:
        """Whether nothing new may leave before the peer acknowledges."""
        return len(self._kept) >= self._window_messages or self._in_flight >= self._window_bytes

    @property
    def has_unsent(self) -> bool:
        return self._cursor < len(self._kept) or any(self._lanes)

    def append(self, frames: Frames, lane: int = 0, handle: int | None = None) -> None:
        """Take over an encoded message. Those of one lane arrive in order; the lanes take turns by bytes."""
        size = total_bytes(frames)
        rest = self._cut(frames, lane) if size > PIECE_BYTES else iter([(size, frames)])
        self._lanes[lane].append(_Waiting(rest, size, handle))
        self.bytes += size

    def withdraw(self, handles: Container[int]) -> None:
        """Send no more of the messages in lane 1 that have one of these handles."""
        for waiting in self._lanes[1]:
            if waiting.handle in handles:
                self.bytes -= waiting.left
                waiting.left, waiting.rest = 0, iter([(0, self._piece(1, _NO_SIZES, b""))])

    def peek(self) -> Frames | None:
        """The next message to transmit, or None: there is none, or no room in the window."""
        if self._mark_due:
            return encode(Mark(*self._names, self._seen + self._cursor, self._attempt))
        if self._cursor == len(self._kept) and not self.full and any(self._lanes):
            self._number_next()
        return self._kept[self._cursor][0] if self._cursor < len(self._kept) else None

    def advance(self) -> None:
        """What `peek` gave was transmitted."""
        if self._mark_due:
            self._mark_due = False
        else:
            self._cursor += 1
            self._timed = self._timed or (self._seen + self._cursor, self._clock())

    def probe(self) -> None:
        """Ask the peer what it misses of all that went out."""
        self._mark_due = self._mark_due or self._cursor > 0

    def acknowledge(self, seen: int, gap: bool, attempt: int) -> bool:
        """The peer received everything up to `seen`; `gap` = something behind it was lost in this attempt.

        Returns:
            Whether this freed messages.

        Raises:
            ProtocolError: `seen` was never sent. (An old value is no error: reports may overtake each other.)
        """
        if seen > self.sent:
            raise ProtocolError(f"peer acknowledges message {seen}, the last one was {self.sent}")
        if self._timed is not None and seen >= self._timed[0]:
            self._adjust_window(self._clock() - self._timed[1])
            self._timed = None
        freed = seen - self._seen
        for _ in range(freed):
            size = self._kept.popleft()[1]
            self._in_flight -= size
            self.bytes -= size
        if freed > 0:
            self._seen = seen
            self._cursor = max(0, self._cursor - freed)
        if gap and attempt == self._attempt:
            self._cursor = 0
            self._attempt += 1
            self._mark_due = True
        elif freed <= 0:
            self.probe()
        return freed > 0

    def _adjust_window(self, seconds: float) -> None:
        """What was in flight took so long."""
        if self.full and seconds < FAST_SECONDS:
            self._window_bytes = min(2 * self._window_bytes, MOST_WINDOW_BYTES)
        elif self.full and seconds > SLOW_SECONDS:
            self._window_bytes = max(self._window_bytes // 2, LEAST_WINDOW_BYTES)

    def _number_next(self) -> None:
        """The next message or piece leaves its lane and gets a number."""
        lane = 1 if self._lanes[1] and (not self._lanes[0] or self._lead >= PIECE_BYTES) else 0
        waiting = self._lanes[lane][0]
        size, frames = next(waiting.rest)
        waiting.left -= size
        if not waiting.left:
            self._lanes[lane].popleft()
        self._lead = self._lead + size if self._lanes[1] and not lane else 0
        self._kept.append((numbered(frames, self.sent + 1), size))
        self._in_flight += size

    def _cut(self, frames: Frames, lane: int) -> Iterator[tuple[int, Frames]]:
        """Pieces with the bytes that they carry; none spans two frames, so that none is copied."""
        sizes = np.array([len(frame) for frame in frames], np.uint32)
        for frame in frames:
            view = memoryview(frame)
            for start in range(0, len(view), PIECE_BYTES):
                data = view[start : start + PIECE_BYTES]
                yield len(data), self._piece(lane, sizes, data)
                sizes = _NO_SIZES

    def _piece(self, lane: int, sizes: U32, data: Buffer) -> Frames:
        return encode(Piece(*self._names, 0, lane, sizes, TensorFrame("uint8", (len(data),), data)))


class Inbox:
    """The receiving end."""

    def __init__(self) -> None:
        self.seen = 0
        self._attempt = 0
        self._gap = False  # a hole is to be reported
        self._gap_reported = False  # in this attempt: every later message of a burst would otherwise ask again
        self._unreported = 0
        self._unreported_bytes = 0
        self._joins = (_Join(), _Join())

    def accept(self, number: int, size: int) -> bool:
        """Whether this is the next message (then it counts as received); `size` = its bytes."""
        self._unreported += 1
        self._unreported_bytes += size
        if number == self.seen + 1:
            self.seen = number
            return True
        if number > self.seen and not self._gap_reported:
            self._gap = True
        return False

    def join(self, piece: Piece) -> Frames | None:
        """Take an accepted piece. Returns the frames of the message that it completes.

        Raises:
            ProtocolError: it does not fit the pieces before it.
        """
        return self._joins[piece.lane].add(piece)

    def mark(self, sent: int, attempt: int) -> None:
        """A Mark arrived."""
        if attempt > self._attempt:
            self._attempt = attempt
            self._gap = self._gap_reported = False
        self._gap = self._gap or sent > self.seen

    @property
    def report_due(self) -> bool:
        """Whether the sender should hear now, not at the next heartbeat."""
        return self._gap or self._unreported >= REPORT_MESSAGES or self._unreported_bytes >= REPORT_BYTES

    def report(self) -> tuple[int, bool, int]:
        """(seen, gap, attempt) for the sender."""
        gap, self._gap = self._gap, False
        self._gap_reported = self._gap_reported or gap
        self._unreported = self._unreported_bytes = 0
        return self.seen, gap, self._attempt


class _Join:
    """Puts the pieces of one message together."""

    def __init__(self) -> None:
        self._sizes, self._parts, self._missing = _NO_SIZES, list[Buffer](), 0

    def add(self, piece: Piece) -> Frames | None:
        data = piece.data.buffer
        if len(piece.sizes) or not data:
            self._sizes, self._parts, self._missing = piece.sizes, [], int(piece.sizes.sum())
        if not len(data) <= self._missing <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a piece of {len(data)} bytes where {self._missing} are missing")
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing or not data:
            return None
        parts, self._parts = iter(self._parts), []
        return [_take(parts, size) for size in self._sizes.tolist()]


def _take(parts: Iterator[Buffer], size: int) -> bytes:
    """The next frame: as many parts as it needs."""
    frame: list[Buffer] = []
    while size > 0:
        frame.append(next(parts))
        size -= len(frame[-1])
    if size:
        raise ProtocolError("a piece of two frames")
    return b"".join(frame)
