"""The child's end of supervision: its config, a pipe for what it has to say, and a watch on its parent."""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from wavecore.transport.errors import MORE_MEMORY, as_wavecore_error
from wavecore.transport.processes.deployment import Cause
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage

STACKS_SIGNAL = signal.SIGUSR1  # all threads' stacks to stderr, even when native code holds the GIL
MAX_REPORT = 16384  # characters of a message or a traceback
_PR_SET_PDEATHSIG = 1
_PHASE_SECONDS = 0.1


def parser(program: str) -> argparse.ArgumentParser:
    """The arguments that `process.Child` gives every child; a program adds its own."""
    parser = argparse.ArgumentParser(program)
    for name in ("config", "status", "parent", "progress"):
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--memory-fd", type=int)
    parser.add_argument("--store-fd", type=int)
    parser.add_argument("--bell-fd", type=int, action="append")
    return parser


class SupervisedChild:
    """This process as a supervisor's child. Made once, first thing in the main thread; from here on the child cannot
    outlive its parent.

    Args:
        args: of `parser`.
        memory_advice: told when memory runs out: what to lower or to raise.

    Attributes:
        config: the text that the parent gave.
        progress: the page on which the main loop shows that it moves.
        rank: in its group.
        group: what it shares with the other ranks; None where it is alone.
        phase: name of what is being done now.
        conclude: of an error that ends this process, the one that does so; see `HostLink.conclude`.
        pass_on: what a worker does about a signal to stop; nothing, where its rank 0 gets one, too.
        introduce: of what is told when it is ready, all that is; see `StepLink.introduce`.
    """

    def __init__(self, args: argparse.Namespace, memory_advice: str = MORE_MEMORY) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a program's thread may block what its children shall hear
        die_with_parent()
        threading.Thread(target=end_with, args=(args.parent_fd,), name="parent watch", daemon=True).start()
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL)
        with os.fdopen(args.config_fd, encoding="utf-8") as file:
            self.config = file.read()
        self.progress = ProgressPage(args.progress_fd)
        os.close(args.progress_fd)
        for fd in (args.status_fd, args.parent_fd):
            os.set_inheritable(fd, False)
        self.rank = args.rank
        alone = args.memory_fd is None
        shared = args.memory_fd, args.store_fd, args.bell_fd
        self.group = None if alone else GroupMemory(args.rank, *shared, self.progress)
        self.phase = "start"
        self._memory_advice = memory_advice
        self._status_fd = args.status_fd
        self._lock = threading.Lock()
        self._reported = 0.0
        self._failed: Cause | None = None
        self.conclude: Callable[[BaseException], BaseException] = lambda error: error
        self.pass_on: Callable[[int], object] = lambda _number: None
        self.introduce: Callable[[dict[str, Any]], dict[str, Any]] = lambda ready: ready

    def report_phase(self, phase: str, fraction: float) -> None:
        """Tell how far the start is; call it as often as you like, from any thread.

        Args:
            phase: "load", "warm_up", "kv_cache", ...; it may come back to one.
            fraction: of this phase, 0 to 1.
        """
        now = time.monotonic()
        if phase == self.phase and now - self._reported < _PHASE_SECONDS and fraction < 1.0:
            return
        self.phase, self._reported = phase, now
        self._say({"phase": phase, "fraction": round(min(max(fraction, 0.0), 1.0), 4)})

    def report_ready(self, values: Mapping[str, Any]) -> None:
        ready = self.introduce(dict(values))
        self.phase = "serve"
        self._say({"ready": ready})

    def report_failure(self, error: BaseException) -> Cause:
        """The last report of a child that ends: the error as the parent will raise it, and as clients may hear it.

        Of several, in whatever threads, only the first is one.
        """
        error = self.conclude(error)
        if self._failed is not None:
            return self._failed
        known = as_wavecore_error(error, self._memory_advice)
        text = "".join(traceback.format_exception(error))
        cause = Cause(known.code, str(known)[:MAX_REPORT], self.phase, self.rank, traceback=text[-MAX_REPORT:])
        if self.group is not None:
            cause = cause.located(f"rank {self.rank}: ")
        self._failed = cause
        self._say({"failed": asdict(cause)})
        return cause

    def _say(self, line: dict[str, Any]) -> None:
        data = json.dumps({**line, "at": time.monotonic()}).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # a dead parent hears nothing
            while data:
                data = data[os.write(self._status_fd, data) :]


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, however stuck this one may be.

    It does so when the *thread* that spawned us ends: the supervisor spawns from its own, which outlives its children.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with(parent_fd: int) -> None:
    """Sleep until the parent is gone (a pidfd turns readable, a pipe hangs up), then end with everything we started.

    Args:
        parent_fd: of the parent.
    """
    poll = select.poll()
    poll.register(parent_fd, select.POLLIN | select.POLLHUP)
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
