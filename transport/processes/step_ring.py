"""A ring in the memory of a group: every other rank gets every record of rank 0, in order.

    word 0      bytes written so far; word RANK: bytes that this rank has read
    the ring    pieces [position, checksum, length, kind, last | bytes], none of which wraps around the end

A record of any length passes in pieces, so one that is longer than the ring passes while it is read.

Memory need not show another process's stores in their order (ARM), and Python has no fence. So a piece carries its
position and a checksum over all of it: one that is seen too early is looked at again.
"""

import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Protocol

from wavecore.transport.processes.group_memory import RING_BYTES, GroupMemory
from wavecore.transport.processes.stall import ProgressPage

Buffer = bytes | memoryview
MAX_PIECE = 1 << 20
OWN_WORDS = 16
_PIECE = struct.Struct("<QIIHH4x")
_CHECKSUM = slice(8, 12)


class StepChannel(Protocol):
    """What the ranks of an engine have between them: a `StepRing` on one host, an `io.step_link.StepLink` over several.
    Each rank uses it from one thread.

    Attributes:
        rank, ranks: this one, and how many there are.
        words: uint64; each rank writes its `own_words`, and rank 0 sees them.
        progress: where this rank shows that it moves.
    """

    rank: int
    ranks: int
    words: memoryview
    progress: ProgressPage

    def write(self, kind: int, parts: Iterable[Buffer]) -> None:
        """Send a record of rank 0's to every other rank.

        Args:
            kind: up to the user, below 65,536.
            parts: the record's bytes, in pieces of any size.
        """

    def has_room(self, parts: Iterable[Buffer]) -> bool:
        """Whether `write` of these waits for no reader."""

    @property
    def has_more(self) -> bool:
        """Whether `read` will find the beginning of a record."""

    def read(self) -> tuple[int, bytes]:
        """The next record, of another rank than 0: its kind and its bytes. Waits for it."""

    def ring(self, rank: int) -> None:
        """Have that rank, 0, look at what this one wrote into its words."""

    def wait_until(self, is_so: Callable[[], bool], peer: int | None = None) -> None:
        """Return when it is so, by what that other rank, or any, does."""


def own_words(rank: int, ranks: int) -> slice:
    """Those of a rank's that are for the users of the channel."""
    first = ranks + OWN_WORDS * rank
    return slice(first, first + OWN_WORDS)


class StepRing(StepChannel):
    """In the memory of one host. `write` waits while a reader is a whole ring behind."""

    def __init__(self, memory: GroupMemory) -> None:
        self.rank, self.ranks, self.words, self.progress = memory.rank, memory.ranks, memory.words, memory.progress
        self._memory = memory
        self._at = 0  # bytes written, or read

    def ring(self, rank: int) -> None:
        self._memory.ring(rank)

    def wait_until(self, is_so: Callable[[], bool], peer: int | None = None) -> None:
        self._memory.wait_until(is_so, peer)

    def write(self, kind: int, parts: Iterable[Buffer]) -> None:
        rest = memoryview(b"".join(parts))
        while True:
            room = RING_BYTES - self._at % RING_BYTES
            if room <= _PIECE.size:
                self._at += room
                continue
            piece = rest[: min(MAX_PIECE, room - _PIECE.size)]
            rest = rest[len(piece) :]
            self._put(kind, piece, last=not rest)
            if not rest:
                return

    def has_room(self, parts: Iterable[Buffer]) -> bool:
        size = sum(map(len, parts))
        heads = size // MAX_PIECE + 3  # one more, and room that is skipped, at the ring's end
        end = self._at + size + heads * _PIECE.size
        return all(end - self._memory.words[reader] <= RING_BYTES for reader in range(1, self._memory.ranks))

    def _put(self, kind: int, piece: memoryview, last: bool) -> None:
        memory, end, begin = self._memory, self._at + _PIECE.size + len(piece), self._at % RING_BYTES
        readers = range(1, memory.ranks)
        for reader in readers:
            memory.wait_until(lambda reader=reader: end - memory.words[reader] <= RING_BYTES, reader)  # type: ignore[misc]
        checksum = zlib.crc32(piece, zlib.crc32(_PIECE.pack(self._at, 0, len(piece), kind, last)))
        memory.records[begin + _PIECE.size : begin + _PIECE.size + len(piece)] = piece
        _PIECE.pack_into(memory.records, begin, self._at, checksum, len(piece), kind, last)
        self._at = memory.words[0] = end
        for reader in readers:
            memory.ring(reader)

    @property
    def has_more(self) -> bool:
        return self._memory.words[0] > self._at

    def read(self) -> tuple[int, bytes]:
        memory, pieces = self._memory, list[bytes]()
        while True:
            if (room := RING_BYTES - self._at % RING_BYTES) <= _PIECE.size:
                self._at += room
            memory.wait_until(lambda: self.has_more)
            found = self._piece()
            if found is None:
                continue
            kind, last, piece = found
            pieces.append(piece)
            self._at += _PIECE.size + len(piece)
            memory.words[memory.rank] = self._at
            memory.ring(0)
            if last:
                return kind, b"".join(pieces)

    def _piece(self) -> tuple[int, bool, bytes] | None:
        """The piece here; None while not all of it is to be seen."""
        begin, records = self._at % RING_BYTES, self._memory.records
        head = bytearray(records[begin : begin + _PIECE.size])
        position, checksum, length, kind, last = _PIECE.unpack(head)
        if position != self._at or length > MAX_PIECE:
            return None
        piece = bytes(records[begin + _PIECE.size : begin + _PIECE.size + length])
        head[_CHECKSUM] = bytes(4)
        return (kind, bool(last), piece) if zlib.crc32(piece, zlib.crc32(head)) == checksum else None
