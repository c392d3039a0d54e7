"""One page of memory that a child's main loop writes and its supervisor reads: is there work, and does it move?

A write costs well under a microsecond and needs neither a thread nor the GIL to be seen, so a child that hangs inside
native code is still judged by what its loop did last.
"""

from __future__ import annotations

import mmap
import os

PAGE_BYTES = mmap.PAGESIZE
_BEATS, _BUSY, _FIRST_HELPER = 0, 1, 2
_MAX_HELPERS = 16


class ProgressPage:
    """Words of 8 bytes: beats, busy, then the thread ids whose CPU time says nothing about progress.

    Args:
        fd: a file of at least one page, usually a memfd; the page keeps its own mapping and not the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create_fd() -> int:
        """An anonymous file for one page; it has no name, so nothing can be left behind."""
        fd = os.memfd_create("wavecore-progress")
        os.ftruncate(fd, PAGE_BYTES)
        return fd

    def beat(self) -> None:
        """Something got done."""
        self._words[_BEATS] += 1

    def busy(self, busy: bool) -> None:
        """Whether there is work that should move; an idle child is never stuck."""
        self._words[_BUSY] = busy

    def helper(self, thread_id: int) -> None:
        """Leave a thread (native id) out of the judgement: IO threads run on while the main loop hangs."""
        for i in range(_FIRST_HELPER, _FIRST_HELPER + _MAX_HELPERS):
            if not self._words[i]:
                self._words[i] = thread_id
                return

    @property
    def beats(self) -> int:
        return self._words[_BEATS]

    @property
    def is_busy(self) -> bool:
        return bool(self._words[_BUSY])

    @property
    def helpers(self) -> set[int]:
        return set(self._words[_FIRST_HELPER : _FIRST_HELPER + _MAX_HELPERS]) - {0}

    def close(self) -> None:
        self._words.release()
        self._map.close()
