"""Votes of ranks in lockstep: numbers that each rank writes into the group's memory, and all others read.

    words of rank r, 28 from 28 r on:   pid  ...  |  k  v v v v v v v  check  k  |  k  v v v v v v v  check  k
                                                      even agreements               odd agreements

A rank publishes vote k + 2 only when it has read all votes k + 1, so two places are enough. Processors other than x86
may show a write of another core before an earlier one, and Python has no fence: a vote counts when its number stands at
both ends and its checksum is right; what was read too early, or half written, is read again.
"""

import os
import select
import struct
import time
import zlib
from collections.abc import Sequence

from wavecore.transport.errors import EngineDead
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.wire.messages import VOTE_NUMBERS

SPIN_SECONDS = 50e-6  # waiting ranks are that far apart while all have work
MAX_NAP_SECONDS = 1e-3
_WORDS, _FIRST, _SLOT, _BYTES = 28, 8, 10, 8
_COUNTED, _VOTE = struct.Struct(f"={1 + VOTE_NUMBERS}Q"), struct.Struct(f"={1 + VOTE_NUMBERS + 2}Q")


class VoteBoard:
    """One rank's access to the votes of its group. All but `ring_others` belong to one thread.

    Args:
        group: what the ranks share; nothing else may lie in its memory.
    """

    def __init__(self, group: GroupMemory) -> None:
        self._group, self._bytes = group, group.words.cast("B")
        assert len(group.words) >= _WORDS * group.ranks, "a group of more ranks than its memory has room for"
        group.words[_WORDS * group.rank] = os.getpid()
        self._deaths: dict[int, select.poll] = {}

    def publish(self, agreement: int, vote: Sequence[int]) -> None:
        """Show this rank's vote: VOTE_NUMBERS numbers from 0 on. The number of the agreement is written last."""
        at, words = self._slot(self._group.rank, agreement), self._group.words
        check = zlib.crc32(_COUNTED.pack(agreement, *vote))
        _COUNTED.pack_into(self._bytes, (at + 1) * _BYTES, *vote, check)
        words[at + _SLOT - 1] = agreement
        words[at] = agreement

    def read(self, rank: int, agreement: int) -> tuple[int, ...] | None:
        """A rank's vote in an agreement; None while it is not there. Not for agreements of long ago."""
        number, *vote, check, again = _VOTE.unpack_from(self._bytes, self._slot(rank, agreement) * _BYTES)
        if number != agreement or again != agreement or check != zlib.crc32(_COUNTED.pack(agreement, *vote)):
            return None
        return tuple(vote)

    def has_begun(self, agreement: int) -> bool:
        """Whether another rank has voted in it."""
        ranks = range(self._group.ranks)
        return any(self.read(rank, agreement) is not None for rank in ranks if rank != self._group.rank)

    def ring_others(self) -> None:
        """Wake the other ranks, or keep them from their next sleep: after `publish`."""
        for rank in range(self._group.ranks):
            if rank != self._group.rank:
                self._group.ring(rank)

    def wait(self, agreement: int) -> list[tuple[int, ...]]:
        """The votes of all ranks in an agreement, when all are there.

        Raises:
            EngineDead: a rank has ended without its vote.
        """
        return [self._wait(rank, agreement) for rank in range(self._group.ranks)]

    def _wait(self, rank: int, agreement: int) -> tuple[int, ...]:
        started = time.monotonic()
        while (vote := self.read(rank, agreement)) is None:
            waited = time.monotonic() - started
            if waited < SPIN_SECONDS:
                time.sleep(0)  # lets other threads of this process run
                continue
            self._group.wait_for(rank)
            self._check_alive(rank, agreement)
            time.sleep(min(waited / 8, MAX_NAP_SECONDS))  # an eighth late at most
        self._group.wait_for(None)
        return vote

    def _check_alive(self, rank: int, agreement: int) -> None:
        pid = self._group.words[_WORDS * rank]
        if pid and rank not in self._deaths:  # without a pid, it has not started yet
            self._deaths[rank] = select.poll()
            try:
                self._deaths[rank].register(os.pidfd_open(pid), select.POLLIN)
            except ProcessLookupError:
                self._lost(rank, pid, agreement)
        # A vote may have come right before the death.
        if rank in self._deaths and self._deaths[rank].poll(0) and self.read(rank, agreement) is None:
            self._lost(rank, pid, agreement)

    def _lost(self, rank: int, pid: int, agreement: int) -> None:
        raise EngineDead(f"rank {rank} (pid {pid}) ended before its vote in agreement {agreement}")

    @staticmethod
    def _slot(rank: int, agreement: int) -> int:
        return _WORDS * rank + _FIRST + _SLOT * (agreement % 2)
