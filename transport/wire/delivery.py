"""Exactly once over a wire that loses without a word: the two ends of one numbered stream. Pure state, clock given.

Sender (`Outbox`): number from 1, keep the frames until the peer has acknowledged them, send again what it misses.
Receiver (`Inbox`): take exactly the next number, drop the rest, say how far it got. (The field's name: go-back-N.)

When to send again is decided only when word comes from the peer: a peer that is stopped gets nothing, so a pipe to it
cannot fill up with copies.
"""

from __future__ import annotations

from collections import deque

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.codec import Frames, total_bytes

REPEAT_SECONDS = 1.0
REPORT_MESSAGES = 32
REPORT_BYTES = 1 << 20


class Outbox:
    """The sending end. The owner transmits what `peek` gives and then calls `advance`.

    Args:
        max_messages, max_bytes: `full` from here on. One message may pass max_bytes, so that a large one can leave.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._kept: deque[tuple[Frames, int]] = deque()  # unacknowledged; the first has number `_seen + 1`
        self._seen = 0
        self._cursor = 0  # index into _kept of the next to transmit
        self._waiting_since = 0.0  # when progress was last made or the stream was last sent again
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        return len(self._kept) >= self._max_messages or self.bytes >= self._max_bytes

    @property
    def last_number(self) -> int:
        """Number of the newest message, 0 before the first. The next message must be encoded with the one after."""
        return self._seen + len(self._kept)

    def append(self, frames: Frames, now: float) -> None:
        """Take over message `last_number + 1`."""
        if not self._kept:
            self._waiting_since = now
        size = total_bytes(frames)
        self._kept.append((frames, size))
        self.bytes += size

    def peek(self) -> Frames | None:
        """The next message to transmit, or None."""
        return self._kept[self._cursor][0] if self._cursor < len(self._kept) else None

    def advance(self) -> None:
        self._cursor += 1

    def rewind(self, now: float) -> None:
        """The connection is new: all that is unacknowledged goes out again."""
        self._cursor = 0
        self._waiting_since = now

    def acknowledge(self, seen: int, gap: bool, now: float) -> bool:
        """The peer received everything up to `seen`; `gap` = it got a later message but not the next one.

        Returns:
            Whether this freed messages.

        Raises:
            ProtocolError: `seen` was never sent. (An old value is no error: reports may overtake each other.)
        """
        if seen > self.last_number:
            raise ProtocolError(f"peer acknowledges message {seen}, the last one was {self.last_number}")
        freed = seen - self._seen
        for _ in range(freed):
            self.bytes -= self._kept.popleft()[1]
        if freed > 0:
            self._seen = seen
            self._cursor = max(0, self._cursor - freed)
            self._waiting_since = now
        if self._cursor and (gap or now - self._waiting_since >= REPEAT_SECONDS):
            self.rewind(now)
        return freed > 0


class Inbox:
    """The receiving end."""

    def __init__(self) -> None:
        self.seen = 0
        self._unreported = 0
        self._unreported_bytes = 0
        self._gap = False
        self._gap_reported_at = -1

    def accept(self, number: int, size: int) -> bool:
        """Whether this is the next message (then it counts as received); `size` = its bytes."""
        self._unreported += 1
        self._unreported_bytes += size
        if number == self.seen + 1:
            self.seen = number
            self._gap = False
            return True
        if number > self.seen:
            # One hole is reported once at once: every later message of a burst would otherwise ask again.
            self._gap = self._gap_reported_at != self.seen
        return False

    @property
    def report_due(self) -> bool:
        """Whether the sender should hear now, not at the next heartbeat."""
        return self._gap or self._unreported >= REPORT_MESSAGES or self._unreported_bytes >= REPORT_BYTES

    def report(self) -> tuple[int, bool]:
        """(seen, gap) for the sender."""
        gap = self._gap
        if gap:
            self._gap_reported_at = self.seen
        self._gap = False
        self._unreported = self._unreported_bytes = 0
        return self.seen, gap
