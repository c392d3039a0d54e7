"""Exactly once over a wire that loses without a word: the two ends of one numbered stream. Pure state without a clock.

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

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.codec import MAX_MESSAGE_BYTES, Buffer, Frames, decode, encode, numbered, total_bytes
from wavecore.transport.wire.messages import U32, Down, Mark, Numbered, Piece, TensorFrame, Up

PIECE_BYTES = 256 << 10
WINDOW_MESSAGES = 256
WINDOW_BYTES = 2 << 20  # for which a small message waits: 0.4 s on a link of 5 MB/s; 2 ms on one of 10 Gbit/s
REPORT_MESSAGES = 32
REPORT_BYTES = 2 * PIECE_BYTES  # a part of the window, so that a link does not run dry
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
        epoch, client_id: of the session.
        window: messages and bytes that may be in flight: transmitted and not acknowledged.

    Attributes:
        bytes: of all that was appended and is not acknowledged.
    """

    def __init__(
        self, epoch: bytes, client_id: bytes, window: tuple[int, int] = (WINDOW_MESSAGES, WINDOW_BYTES)
    ) -> None:
        self.epoch, self.client_id = epoch, client_id
        self._window_messages, self._window_bytes = window
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
            return encode(Mark(self.epoch, self.client_id, self._seen + self._cursor, self._attempt))
        if self._cursor == len(self._kept) and not self.full and any(self._lanes):
            self._number_next()
        return self._kept[self._cursor][0] if self._cursor < len(self._kept) else None

    def advance(self) -> None:
        """What `peek` gave was transmitted."""
        if self._mark_due:
            self._mark_due = False
        else:
            self._cursor += 1

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
        return encode(Piece(self.epoch, self.client_id, 0, lane, sizes, TensorFrame("uint8", (len(data),), data)))


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

    def take(self, message: Numbered | Mark, size: int) -> Up | Down | None:
        """Take what the stream carries, of `size` bytes. Returns the whole message, if this is its turn and its end.

        Raises:
            ProtocolError: a piece that does not fit the pieces before it, or makes no message of this session. It
                counts as received.
        """
        if isinstance(message, Mark):
            if message.attempt > self._attempt:
                self._attempt = message.attempt
                self._gap = self._gap_reported = False
            self._gap = self._gap or message.sent > self.seen
            return None
        if not self.accept(message.number, size):
            return None
        if not isinstance(message, Piece):
            return message
        frames = self._joins[message.lane].add(message)
        if frames is None:
            return None
        whole = decode(frames)
        client_id = getattr(whole, "client_id", message.client_id)
        if not isinstance(whole, Up | Down) or (whole.epoch, client_id) != (message.epoch, message.client_id):
            raise ProtocolError(f"{type(whole).__name__} in pieces, or of another session")
        return whole

    def accept(self, number: int, size: int) -> bool:
        """Whether this is the next message; then it counts as received, whatever is in it."""
        self._unreported += 1
        self._unreported_bytes += size
        if number == self.seen + 1:
            self.seen = number
            return True
        if number > self.seen and not self._gap_reported:
            self._gap = True
        return False

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
    """Puts the pieces of one message together, each as it comes: what is large is never held twice."""

    def __init__(self) -> None:
        self._frames: list[memoryview] = []
        self._open: deque[memoryview] = deque()  # what remains to be filled

    def add(self, piece: Piece) -> Frames | None:
        data = piece.data.buffer
        if len(piece.sizes) or not data:  # the message before it, if it is not whole, does not come
            if piece.sizes.sum() > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"pieces of a message of {piece.sizes.sum()} bytes, {MAX_MESSAGE_BYTES} at most")
            self._frames = [np.empty(size, np.uint8).data for size in piece.sizes.tolist()]
            self._open = deque(filter(len, self._frames))
        if not data:
            return None
        room = self._open.popleft() if self._open else memoryview(b"")
        if len(data) > len(room):
            raise ProtocolError(f"a piece of {len(data)} bytes where {len(room)} are missing")
        room[: len(data)] = data
        if len(data) < len(room):
            self._open.appendleft(room[len(data) :])
        if self._open:
            return None
        frames, self._frames = self._frames, []
        return [*frames]
