"""Is a rank stuck? It is when it has work and neither moves nor computes.

The child's main loop tells by a page of shared memory whether there is work and whether it moves. Time alone cannot
tell a hang from a long prefill, a starved core or a debugger, so what Linux says about the child's threads counts
too: a thread that runs, waits for a core or reads a disk is alive. Such a child gets `step_seconds`, or ten times what
it expects its step to take, if that is more; one whose threads all sleep gets `idle_seconds`. Ticks are counted, not
seconds, so a supervisor that was itself stopped or starved does not blame the child for the gap.

In a group a rank may wait for a peer, and says on its page for whom: then the peer has work, whatever it says itself,
and the one who waits is not stuck. So the verdict falls on the end of the chain. Only ranks that wait for each other in
a circle are judged as if they did not wait: that is a deadlock. Waiting for a rank of another host (ELSEWHERE) is none.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

TICK_SECONDS = 0.5
COMPUTING_SHARE = 0.05  # of one core; a hung process still sends a heartbeat now and then
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
EXPECTED_TIMES = 10  # a step may take so many times what the child expected
ELSEWHERE = 1 << 32
"""A rank of another host, for whoever waits for it: others watch that rank, and the link between the hosts."""


class _Words(ctypes.Structure):
    """`helper`: the id of a thread that says nothing about progress. `waits_for`: a rank, counted from 1."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("beats", "busy", "expected_ms", "helper", "waits_for"))


class ProgressPage:
    """What a rank shows of its progress.

    The child writes, its supervisor reads. A write costs well under a microsecond and needs neither a thread nor the
    GIL to be seen, so what the loop did last is known even of a child that hangs inside native code.

    Args:
        fd: a file of at least one page, usually a memfd; the page keeps its own mapping and not the descriptor.

    Attributes:
        words: as they are now.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self.words = _Words.from_buffer(self._map)

    @staticmethod
    def create_fd() -> int:
        """An anonymous file for one page; it has no name, so nothing can be left behind."""
        fd = os.memfd_create("wavecore-progress")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def beat(self) -> None:
        """Something got done."""
        self.words.beats += 1

    def busy(self, busy: bool) -> None:
        """Whether there is work that should move; an idle child is never stuck."""
        self.words.busy = busy

    def expect(self, seconds: float) -> None:
        """What is computed now should take about so long; 0 for unknown."""
        self.words.expected_ms = int(min(seconds, 1e9) * 1000)

    def helper(self, thread_id: int) -> None:
        """Do not count this thread (native id) as computing: it runs on while the main loop hangs."""
        self.words.helper = thread_id

    def wait_for(self, rank: int | None) -> None:
        """The work cannot go on before this rank of the group does something; None: it can."""
        self.words.waits_for = 0 if rank is None else rank + 1

    @property
    def waits_for(self) -> int | None:
        """The rank that keeps this one, which has work, from going on."""
        return self.words.waits_for - 1 if self.words.busy and self.words.waits_for else None

    def close(self) -> None:
        del self.words
        self._map.close()


class GroupWatch:
    """Watches the ranks of a group, one `tick` every TICK_SECONDS.

    Args:
        ranks: the process id and the progress page of each.
        idle_seconds, step_seconds: see `StallWatch`.
    """

    def __init__(self, ranks: Sequence[tuple[int, ProgressPage]], idle_seconds: float, step_seconds: float) -> None:
        self._pages = [page for _, page in ranks]
        self._watches = [StallWatch(pid, page, idle_seconds, step_seconds) for pid, page in ranks]

    def tick(self) -> tuple[int, str] | None:
        """None, or a rank that is stuck, and why."""
        said = [page.waits_for for page in self._pages]
        waits = [peer if peer in range(len(self._pages)) else None for peer in said]
        stuck = None
        stopped = {rank for rank, watch in enumerate(self._watches) if watch.is_stopped}
        for rank, watch in enumerate(self._watches):  # all of them: each counts its ticks
            circle = _circle(rank, waits)
            circle = [] if stopped.intersection(circle) else circle  # it may open when that rank goes on
            works = waits[rank] is None and said[rank] != ELSEWHERE and (self._pages[rank].words.busy or rank in waits)
            reason = watch.tick(has_work=bool(works or circle))
            if reason is not None and stuck is None:
                ranks = ", ".join(map(str, sorted(circle)))
                stuck = rank, f"ranks {ranks} wait for each other, a deadlock: {reason}" if circle else reason
        return stuck


def _circle(rank: int, waits: Sequence[int | None]) -> list[int]:
    """The ranks that wait for each other, beginning with this one; none if it is no part of such a circle."""
    chain = [rank]
    while (peer := waits[chain[-1]]) is not None and peer not in chain:
        chain.append(peer)
    return chain if peer == rank else []


class StallWatch:
    """Watches one rank, one `tick` every TICK_SECONDS.

    Args:
        pid: its process.
        page: its progress page.
        idle_seconds: limit for a child with work whose threads all sleep, or that is stopped.
        step_seconds: limit for a child that computes without finishing a step that it expected to be short.
    """

    def __init__(self, pid: int, page: ProgressPage, idle_seconds: float, step_seconds: float) -> None:
        self._pid, self._page = pid, page
        self._idle_seconds, self._step_seconds = idle_seconds, step_seconds
        self._beats = -1
        self._cpu_seconds: float | None = None  # at the last tick without a beat
        self._idle = self._computing = 0

    @property
    def is_stopped(self) -> bool:
        return _read_stat(Path(f"/proc/{self._pid}/stat"))[1] in ("T", "t")

    def tick(self, has_work: bool) -> str | None:
        """None, or why the rank counts as stuck."""
        stopped = self.is_stopped
        if not stopped and (not has_work or self._page.words.beats != self._beats):
            self._beats = self._page.words.beats
            self._idle = self._computing = 0
            self._cpu_seconds = None
            return None
        if not stopped and self._is_computing():
            self._computing += 1
            self._idle = 0
        else:
            self._idle += 1
        seconds = self._idle * TICK_SECONDS
        if self._idle and seconds >= self._idle_seconds:
            if stopped:
                return f"it has been stopped (SIGSTOP or a debugger) for {seconds:.1f} s"
            return f"it has work but did nothing for {seconds:.1f} s: every thread sleeps (stacks are in the log)"
        seconds = self._computing * TICK_SECONDS
        if self._computing and seconds >= max(self._step_seconds, EXPECTED_TIMES * self._page.words.expected_ms / 1000):
            return f"one step has computed for {seconds:.1f} s without an end (stacks are in the log)"
        return None

    def _is_computing(self) -> bool:
        alive, cpu, pids, tasks = False, 0.0, [self._pid], list[Path]()
        with suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(self._pid).children(recursive=True)]
        for pid in pids:  # a step may wait for a compiler that it started
            with suppress(OSError):
                tasks += Path(f"/proc/{pid}/task").iterdir()
        for task in tasks:
            name, state, seconds = _read_stat(task / "stat")
            if int(task.name) != self._page.words.helper and not name.startswith("ZMQbg"):
                alive |= state in ("R", "D")
                cpu += seconds
        grew = self._cpu_seconds is not None and cpu - self._cpu_seconds > COMPUTING_SHARE * TICK_SECONDS
        self._cpu_seconds = cpu
        return alive or grew


def _read_stat(path: Path) -> tuple[str, str, float]:
    """(name, state letter, CPU seconds) of a /proc stat file; proc(5)."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "", "", 0.0
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
