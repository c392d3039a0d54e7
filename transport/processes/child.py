"""The child's end of supervision: its config, a pipe for what it has to say, and a watch on its parent."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wavecore.transport.errors import ResourceError, WavecoreError
from wavecore.transport.processes.progress import ProgressPage

STACKS_SIGNAL = signal.SIGUSR1  # all threads' stacks to stderr, even when native code holds the GIL
MAX_TEXT = 16384
_PR_SET_PDEATHSIG = 1
_PHASE_SECONDS = 0.1
_RESOURCE_ERRNOS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def parser(program: str) -> argparse.ArgumentParser:
    """The arguments that `process.Child` gives every child; a program adds its own."""
    parser = argparse.ArgumentParser(program)
    for name in ("config", "status", "parent", "progress"):
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    return parser


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a child ends; the fields of messages.Dead."""

    code: str
    message: str
    phase: str
    rank: int
    traceback: str


class ChildLife:
    """Made once, first thing in a child's main thread. From here on the child cannot outlive its parent.

    Attributes:
        config: the text that the parent gave.
        progress: the page on which the main loop shows that it moves.
        phase: name of what is being done now.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        # The kernel's own watch works even if the GIL is stuck. It fires when the *thread* that spawned us ends:
        # the supervisor spawns from its own thread, which lives as long as its children.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=_end_with, args=(args.parent_fd,), name="parent watch", daemon=True).start()
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL)
        with os.fdopen(args.config_fd, encoding="utf-8") as file:
            self.config = file.read()
        self.progress = ProgressPage(args.progress_fd)
        os.close(args.progress_fd)
        for fd in (args.status_fd, args.parent_fd):
            os.set_inheritable(fd, False)
        self.phase = "start"
        self._status_fd = args.status_fd
        self._lock = threading.Lock()
        self._reported = 0.0

    def report_phase(self, phase: str, fraction: float) -> None:
        """Tell how far the start is; call it as often as you like, from any thread.

        Args:
            phase: "load", "kv_cache", "warmup", ...
            fraction: of this phase, 0 to 1.
        """
        now = time.monotonic()
        if phase == self.phase and now - self._reported < _PHASE_SECONDS and fraction < 1.0:
            return
        self.phase, self._reported = phase, now
        self._say({"phase": phase, "fraction": round(min(max(fraction, 0.0), 1.0), 4)})

    def report_ready(self, values: Mapping[str, Any]) -> None:
        self.phase = "serve"
        self._say({"ready": dict(values)})

    def report_failure(self, error: BaseException, rank: int = 0) -> LastWords:
        """Last words: the error as the parent will raise it, and as clients may hear it."""
        known = as_wavecore_error(error)
        text = "".join(traceback.format_exception(error))
        words = LastWords(known.code, str(known)[:MAX_TEXT], self.phase, rank, text[-MAX_TEXT:])
        self._say({"failed": asdict(words)})
        return words

    def _say(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # a dead parent hears nothing; its watch ends us
            while data:
                data = data[os.write(self._status_fd, data) :]


def as_wavecore_error(error: BaseException) -> WavecoreError:
    """Any exception as one of the tree: what the machine refused is a ResourceError, a surprise is internal."""
    if isinstance(error, WavecoreError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        return ResourceError(f"out of memory ({error}); lower kv_cache_memory_gib or max_num_seqs")
    if getattr(error, "errno", None) in _RESOURCE_ERRNOS:
        return ResourceError(text)
    return WavecoreError(text)


def _end_with(parent_fd: int) -> None:
    """Sleep until the parent is gone (a pidfd turns readable, a pipe hangs up), then end with everything we started."""
    poll = select.poll()
    poll.register(parent_fd, select.POLLIN | select.POLLHUP)
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
