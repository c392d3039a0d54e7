"""One logging set-up for every process of ours, and lines written by a thread that nobody waits for.

A log sink may block (a paused terminal, a full pipe) or break (a closed pipe, a full disk). Neither may stop an engine,
so lines go through a bounded queue: what does not fit is dropped, counted and reported once there is room again.
"""

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import TextIO

import setproctitle

FORMAT = "%(asctime)s %(levelname)s [%(process)d {process}] %(name)s: %(message)s"
MAX_LINE = 4096  # characters


def set_up(process: str) -> None:
    """Log warnings and errors of this whole process to stderr and name it, for programs of ours.

    Args:
        process: "engine 0", "client", ...; part of each line and of the title in `ps`.
    """
    setproctitle.setproctitle(f"wavecore {process}")
    logging.basicConfig(handlers=[_StderrHandler(process)], force=True)


def show(level: str) -> None:
    """What of this package's lines a user's program shows: those of `level` ("debug" ... "error") and above.

    A program with logging of its own gets them there, any other on stderr. At "warning" nothing is changed: that is
    what Python shows of a library by itself.
    """
    logger = logging.getLogger("wavecore")
    if level == "warning":
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        logger.addHandler(_StderrHandler("client"))


class LineWriter:
    """Writes lines to a stream from its own thread. `put` never blocks, never raises and takes no lock: libraries log
    in finalisers, so the collector may run it in the middle of itself.

    Args:
        stream: asked at each write, because notebooks and test runners replace sys.stderr.
        limit: lines waiting, about, at most.
    """

    def __init__(self, stream: Callable[[], TextIO | None], limit: int = 1000) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._limit = limit
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        if self._queue.qsize() < self._limit:
            self._queue.put(line[:MAX_LINE])
        else:
            self._dropped += 1

    def close(self, timeout: float = 1.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                line = f"({dropped} log lines dropped: the log's reader is too slow)\n{line}"
            stream = self._stream()
            if stream is None:  # pythonw, daemons
                continue
            # A log that cannot be written is no reason to stop serving: OSError is a full disk or closed pipe,
            # ValueError a stream that its owner closed.
            with contextlib.suppress(OSError, ValueError):
                stream.write(line + "\n")
                stream.flush()


class _StderrHandler(logging.Handler):
    """Closed by `logging` at the end of the program, which so waits for the last lines."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._writer = LineWriter(lambda: sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT.format(process=process)))

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(self.format(record))

    def close(self) -> None:
        super().close()
        self._writer.close()
