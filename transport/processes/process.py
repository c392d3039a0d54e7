"""One child process: spawned from a module name, watched by pidfd, heard through two pipes, its end explained.

Not multiprocessing: no fork of a process that holds threads, and no re-import of the user's `__main__`, so plain
scripts and notebooks work. The config travels on an inherited descriptor, so no secret is in argv or the environment.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wavecore.transport.errors import MORE_MEMORY
from wavecore.transport.processes.stall import ProgressPage

TAIL_LINES = 100
TAIL_LINE_CHARS = 2000
_CHUNK = 1 << 16
_MAX_UNENDED = 1 << 20
_STAT_FLAGS, _PF_EXITING = 5, 0x4  # place behind the state in /proc/PID/stat, proc(5); include/linux/sched.h
_NAMES = {number.value: number.name for number in signal.Signals}
_SIGNALS: dict[int, str] = {
    signal.SIGILL: "it ran an instruction that this CPU lacks: a wheel built for a newer CPU",
    signal.SIGBUS: "a mapped file shrank or shared memory is full: check the model files and /dev/shm",
    signal.SIGSEGV: "native code crashed; the stack, if any, is in its last output",
    signal.SIGABRT: "native code gave up; its reason, if any, is in its last output",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGINT: "somebody interrupted it",
}
_LIBRARY = re.compile(r"(?:error while loading shared libraries: )?(\S+\.so[.\d]*): cannot open shared object file")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: for people: "engine 0".
        module: run as `python -m module`.
        config: text that the child reads first, usually JSON.
        env: added to the environment.
        memory_advice, slow_start_advice: told when memory runs out and when it is not ready in time: what to change,
            from whoever knows the config.
        argv: further arguments of the module.
        fds: (name, descriptor) of what it inherits besides; it hears the numbers as `--NAME-fd NUMBER`.
        device: what it computes on, for people.
        serves: clients connect to this rank of its group, as they do to rank 0: it is an engine of the deployment.
        stage: see `deployment.EngineEntry`.
        first_rank: number of the group's first rank here, where other hosts have those before it.
    """

    name: str
    module: str
    config: str
    env: Mapping[str, str] = field(default_factory=dict)
    memory_advice: str = MORE_MEMORY
    slow_start_advice: str = ""
    argv: Sequence[str] = ()
    fds: Sequence[tuple[str, int]] = ()
    device: str = ""
    serves: bool = False
    stage: str = ""
    first_rank: int = 0


class Child:
    """A running child. Owned by the thread that made it, and ends with that thread (see child.SupervisedChild).

    Args:
        spec: what to run.

    Attributes:
        pid: of the child, also its process group and session.
        pidfd: readable when it has ended.
        status_fd, log_fd: non-blocking read ends: status lines; standard output and error together.
        progress: see stall.ProgressPage.
        oom_kills: Linux's count at the start, for `explain_end`.
    """

    def __init__(self, spec: ChildSpec) -> None:
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
            fds = [("config", config), ("status", status), ("parent", parent), ("progress", progress), *spec.fds]
            arguments = [word for name, fd in fds for word in (f"--{name}-fd", str(fd))]
            env = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.env}
            self._process = subprocess.Popen(
                # -P: the current folder is no place to import from, it may hold a module of any name
                [sys.executable, "-P", "-m", spec.module, "--name", spec.name, *arguments, *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd for _, fd in fds],
                env={**env, "PYTHONPATH": python_path(env.get("PYTHONPATH", ""))},
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

    @property
    def is_ending(self) -> bool:
        """Linux takes it down just now, or has done so; `pidfd` says only the latter."""
        with contextlib.suppress(OSError, IndexError):
            state, *rest = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return state in ("Z", "X") or bool(int(rest[_STAT_FLAGS]) & _PF_EXITING)
        return False

    def kill(self) -> None:
        """End the child and everything that it started. Nothing after `reap`, which frees the process id."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Wait for the end. Closes everything.

        Returns:
            Exit status, or minus the signal. None where nobody can know: the program that embeds us ignores SIGCHLD, or
            waits for all of its children.
        """
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            code: int | None = self._process.wait()
        except ChildProcessError:
            self._process.wait()
            code = None
        os.close(self.pidfd)
        self._ours.close()
        return code


class LineReader:
    """Cuts what a non-blocking pipe gives into lines; remembers the last ones."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False  # the pipe has no writer any more
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def read(self) -> list[str]:
        """The lines that arrived; at the end of the pipe also a last one without its newline."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return []
        self.ended = not data
        # a progress bar rewrites its line with \r; a line without an end may not grow for ever
        *lines, rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if self.ended or len(rest) > _MAX_UNENDED:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        texts = [line.decode(errors="replace") for line in lines if line]
        self.tail.extend(text[:TAIL_LINE_CHARS] for text in texts)
        return texts


def _give(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    _give(theirs, write)
    os.set_blocking(_give(ours, read), False)
    return read, write


def python_path(inherited: str) -> str:
    """The PYTHONPATH of a child: a package that runs from a source tree stays importable there, and paths given as from
    this folder mean the same in others."""
    root = Path(__file__).absolute().parents[3]
    # Where packages are installed is on the path already, behind the stdlib.
    own = "" if root.name in ("site-packages", "dist-packages") else str(root)
    given = map(os.path.abspath, inherited.split(os.pathsep)) if inherited else ()
    return os.pathsep.join((*filter(None, (own,)), *given))


def oom_kills() -> int:
    """How many processes Linux has killed for lack of memory since boot; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def explain_end(spec: ChildSpec, pid: int, returncode: int | None, output: Sequence[str], oom_kills_before: int) -> str:
    """One or two sentences about a child that ended without a report of its own.

    Args:
        returncode: of `Child.reap`.
        output: its last lines.
        oom_kills_before: `oom_kills()` when it was started.
    """
    if returncode is None:
        return f"{spec.name} (pid {pid}) ended; this program ignores SIGCHLD, which hides how{_hint(output)}"
    if returncode >= 0:
        return f"{spec.name} (pid {pid}) exited with status {returncode}{_hint(output)}"
    number = -returncode
    what = f"{spec.name} (pid {pid}) was ended by signal {number} ({_NAMES.get(number, 'a real-time signal')})"
    if number == signal.SIGKILL:
        if oom_kills() > oom_kills_before:
            return f"{what}: the kernel ran out of memory and killed it; {spec.memory_advice}"
        return f"{what}: somebody killed it, or a container's memory limit did (see dmesg and the container's events)"
    return f"{what}: {_SIGNALS[number]}" if number in _SIGNALS else what


def _hint(output: Sequence[str]) -> str:
    text = "\n".join(output)
    if found := _LIBRARY.search(text):
        return f": the library {found[1]} is missing or not on the loader's path (LD_LIBRARY_PATH)"
    if found := _MODULE.search(text):
        return f": the Python package {found[1]} is not installed for the interpreter that started it"
    fatal = [line for line in output if line.startswith("Fatal Python error")]  # faulthandler's, before the stacks
    last = next((line for line in (*fatal, *reversed(output)) if line.strip()), "")
    return f"; its last line was: {last[:300]}" if last else " without a word"
