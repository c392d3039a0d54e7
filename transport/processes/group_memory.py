"""What the ranks of a group share: memory, and a bell each. The supervisor makes both new for each life of the group
and passes them on, so nothing of an old life can be read or rung. What lies where is the ranks' own affair.

Anonymous memory (memfd) and eventfds: they have no name, need no room in /dev/shm, and end with the last process.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Self

from wavecore.transport.processes.stall import ProgressPage

WORDS_BYTES, RING_BYTES = 1 << 16, 4 << 20
SECTION_BYTES = WORDS_BYTES + RING_BYTES  # taken page by page, when they are first written
SPIN_SECONDS = 50e-6


def create(ranks: int, until: ExitStack) -> list[tuple[str, int]]:
    """The descriptors for `ranks` processes to inherit, as (name, descriptor), in the order of `GroupMemory`.

    Args:
        until: closes them here, once all ranks have them.

    Raises:
        OSError: there are no descriptors left, or no memory.
    """
    memory, store = os.memfd_create("wavecore-group"), os.memfd_create("wavecore-store")
    until.callback(os.close, memory)
    until.callback(os.close, store)
    os.ftruncate(memory, SECTION_BYTES * (1 + ranks))
    bells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(ranks)]
    for bell in bells:
        until.callback(os.close, bell)
    return [("memory", memory), ("store", store), *(("bell", bell) for bell in bells)]


class GroupMemory:
    """One rank's hold on what its group shares: a section of memory of all, and one for each part of the group.

    Args:
        rank: who this is.
        memory_fd: closed here; the mapping stays.
        store_fd: an empty file, in which ranks may find each other; it stays open.
        bell_fds: of each rank; they stay open.
        progress: where this rank shows that it moves.

    Attributes:
        rank, ranks: this one, and how many there are; of a part, counted in it.
        life: another number for each life of a group.
        words: uint64 [WORDS_BYTES / 8], zero when the life began. A write is seen whole; each word has one writer.
        records: RING_BYTES bytes, of step_ring.py.
    """

    def __init__(
        self, rank: int, memory_fd: int, store_fd: int, bell_fds: Sequence[int], progress: ProgressPage
    ) -> None:
        self.rank, self.ranks, self.store_fd = rank, len(bell_fds), store_fd
        self._members: Sequence[int] = range(self.ranks)
        self._memory = memoryview(mmap.mmap(memory_fd, SECTION_BYTES * (1 + self.ranks)))
        self._use_section(0)
        self.life = os.fstat(memory_fd).st_ino
        os.close(memory_fd)
        self.progress, self._bells = progress, tuple(bell_fds)
        self._own_bell = select.poll()
        self._own_bell.register(bell_fds[rank], select.POLLIN)
        self._attended: dict[int, Callable[[], object]] = {}
        for fd in (store_fd, *bell_fds):
            os.set_inheritable(fd, False)

    @classmethod
    def alone(cls, progress: ProgressPage) -> Self:
        """Of a rank that shares its group with those of other hosts only: it has a bell."""
        with ExitStack() as until:
            (_, memory), (_, store), (_, bell) = create(1, until)
            return cls(0, os.dup(memory), os.dup(store), [os.dup(bell)], progress)

    def part(self, size: int) -> GroupMemory:
        """This rank's hold on what it shares with its neighbours alone, where each `size` ranks are a part."""
        first = self.rank // size * size
        return self._among(range(first, first + size), 1 + first)

    def heads(self, size: int) -> GroupMemory:
        """That of the first rank of such a part on what it shares with the first ranks of all others."""
        return self._among(range(0, self.ranks, size), 0)

    def _among(self, members: Sequence[int], section: int) -> GroupMemory:
        among = copy(self)
        among._members, among.rank, among.ranks = members, members.index(self.rank), len(members)
        among._use_section(section)
        return among

    def _use_section(self, section: int) -> None:
        own = self._memory[SECTION_BYTES * section : SECTION_BYTES * (section + 1)]
        self.words, self.records = own[:WORDS_BYTES].cast("Q"), own[WORDS_BYTES:]

    def wait_for(self, rank: int | None) -> None:
        """Tell the supervisor which rank keeps this one, which has work, from going on: it will not blame this one.
        None: nobody does."""
        self.progress.wait_for(None if rank is None else self._members[rank])

    def attend(self, fd: int, call: Callable[[], object]) -> None:
        """From now on this rank's sleeps make the call when the descriptor turns readable, and look again."""
        self._own_bell.register(fd, select.POLLIN)
        self._attended[fd] = call

    def ring(self, rank: int) -> None:
        """Wake that rank, or keep it from its next sleep. After the write that it may wait for, so that none is
        missed."""
        os.eventfd_write(self._bells[self._members[rank]], 1)

    def sleep_until(self, is_so: Callable[[], bool], peer: int | None = None, seconds: float | None = None) -> None:
        """Return when `is_so`, which is looked at whenever this rank's bell has rung; or when the time is over.

        Args:
            peer: see `wait_for`.
            seconds: None for any time.
        """
        self.wait_for(peer)
        self.sleep(is_so, seconds)
        self.wait_for(None)

    def wait_until(self, is_so: Callable[[], bool], peer: int | None = None) -> None:
        """`sleep_until`, but first look again and again for a moment: at the pace of steps that is often enough."""
        if is_so():  # as a rule, and then no clock is read
            return
        until = time.perf_counter() + SPIN_SECONDS
        while not is_so():
            if time.perf_counter() > until:
                self.sleep_until(is_so, peer)

    def sleep(self, is_so: Callable[[], bool], seconds: float | None = None) -> None:
        """The same, for who tells the supervisor himself."""
        until = None if seconds is None else time.monotonic() + seconds
        while not is_so():
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            ready = self._own_bell.poll(left)
            if not ready:
                break
            for fd, _ in ready:
                if fd in self._attended:
                    self._attended[fd]()
                else:
                    os.read(fd, 8)
