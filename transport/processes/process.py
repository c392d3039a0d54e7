"""One child process: spawned from a module name, watched by pidfd, heard through two pipes.

Not multiprocessing: no fork of a process that holds threads, and no re-import of the user's `__main__`, so plain
scripts and notebooks work. The config travels on an inherited descriptor, so no secret is in argv or the environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wavecore.transport.processes.death import oom_kills
from wavecore.transport.processes.progress import ProgressPage

TAIL_LINES = 100
MAX_LINE = 2000
_CHUNK = 1 << 16
_MAX_UNENDED = 1 << 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: for people: "engine 0".
        module: run as `python -m module`.
        config: text that the child reads first, usually JSON.
        env: added to the environment.
    """

    name: str
    module: str
    config: str
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running child. Owned by the thread that made it; ends at latest with that thread (see child.ChildLife).

    Args:
        spec: what to run.
        argv: further arguments of the module.

    Attributes:
        pid: of the child, also its process group and session.
        pidfd: readable when it has ended.
        status_fd, log_fd: non-blocking read ends: status lines; standard output and error together.
        progress: see transport.progress.
        oom_kills: the kernel's count at the start, to tell later whether memory ran out.
    """

    def __init__(self, spec: ChildSpec, argv: Sequence[str] = ()) -> None:
        self.oom_kills = oom_kills()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            config = _give(theirs, os.memfd_create("wavecore-config"))
            os.write(config, spec.config.encode())
            os.lseek(config, 0, os.SEEK_SET)
            progress = _give(theirs, ProgressPage.create_fd())
            parent = _give(theirs, os.pidfd_open(os.getpid()))  # unlike a pipe, no stray fork keeps it open
            self.status_fd, status = _pipe(ours, theirs)
            self.log_fd, log = _pipe(ours, theirs)
            self.progress = ProgressPage(progress)
            ours.callback(self.progress.close)
            fds = {"config": config, "status": status, "parent": parent, "progress": progress}
            arguments = [word for name, fd in fds.items() for word in (f"--{name}-fd", str(fd))]
            self._process = subprocess.Popen(
                # -P: the current folder is no place to import from, it may hold a module of any name
                [sys.executable, "-P", "-m", spec.module, *arguments, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(fds.values()),
                env=_environment(spec.env),
                start_new_session=True,  # a terminal's Ctrl-C is the supervisor's business
            )
            self.pid = self._process.pid
            ours.callback(self._process.wait)
            ours.callback(self.kill)
            self.pidfd = os.pidfd_open(self.pid)
            self._ours = ours.pop_all()

    def signal(self, number: int) -> None:
        """Send a signal; a child that has ended already is no error."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End the child and everything that it started. Nothing after `reap`, which frees the process id."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the end; exit status, or minus the signal. Closes everything."""
        code = self._process.wait()
        os.close(self.pidfd)
        self._ours.close()
        return code


class LineReader:
    """Cuts what a non-blocking pipe gives into lines; remembers the last ones."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def read(self) -> list[str] | None:
        """The lines that arrived, None at the end of the pipe (a last line without its newline is given first)."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return []
        if not data and not self._rest:
            return None
        # a progress bar rewrites its line with \r; a line without an end may not grow for ever
        *lines, rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if not data or len(rest) > _MAX_UNENDED:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        texts = [line.decode(errors="replace") for line in lines if line]
        self.tail.extend(text[:MAX_LINE] for text in texts)
        return texts


def _give(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    _give(theirs, write)
    os.set_blocking(_give(ours, read), False)
    return read, write


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours plus `extra`; a package that runs from a source tree stays importable in the child."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
    root = Path(__file__).absolute().parents[3]
    if root.name not in ("site-packages", "dist-packages"):  # those are on the path already, behind the stdlib
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(root), env.get("PYTHONPATH", "")) if p)
    return env
