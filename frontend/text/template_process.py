"""The processes in which chat templates run, one a template: started at its first use, kept warm, killed when too slow.

All clients in this program share them. A process ends with this program, because its socket closes then, and earlier
when others were used since or an `LLM` shuts down: the next chat starts it again. A signal handler may shut down, so
nothing on that way takes a lock. A fork of this program lets go of its parent's processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from threading import Semaphore

from wavecore.transport.errors import ResourceError

MAX_SECONDS = 3  # for one answer, with compiling the template
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_BYTES = 32 << 20  # of what is sent to a template, and of its answer
MAX_BUSY, MAX_IDLE = 8, 4  # processes
START_SECONDS = 60.0
PROGRAM = str(Path(__file__).with_name("template_child.py"))
# What Python needs to find jinja2, and the time zone. The rest is not for a template's eyes: it may hold secrets.
ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ")


Answer = tuple[str, str]
"""A kind that says what the string is: the rendered "text", or why there is none: the template "refused" its variables,
"failed", is "broken" (it does not compile), or its process is "gone"."""


class TemplateProcess:
    """One process.

    Args:
        source: of its template.

    Attributes:
        process: of the operating system.

    Raises:
        ResourceError: the machine cannot start a process just now.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        with contextlib.ExitStack() as undo:
            try:
                self._socket, theirs = map(undo.enter_context, socket.socketpair())
                self.process = subprocess.Popen(
                    # -P: the program's own folder is no place to import from
                    [sys.executable, "-P", PROGRAM, str(MAX_SECONDS), str(MAX_MEMORY)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # a terminal's Ctrl-C is not for it
                )
            except OSError as error:
                raise ResourceError(f"the process of a chat template could not be started: {error}") from error
            undo.pop_all()
        theirs.close()
        if self._ask(b"", START_SECONDS)[0] == "gone":
            self.end()
            raise ResourceError(f"{sys.executable} {PROGRAM} did not start; does it find jinja2?")

    def ask(self, variables: str) -> Answer:
        """What the template makes of variables in JSON. Of no use any more when the answer is "gone"."""
        return self._ask(f"[{json.dumps(self.source)}, {variables}]\n".encode(), MAX_SECONDS)

    def end(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """In a fork: the process is the parent's."""
        self._socket.close()
        self.process.returncode = 0

    def _ask(self, question: bytes, seconds: float) -> Answer:
        """The next line that it says, whatever has become of it."""
        until, line = time.monotonic() + seconds, bytearray()
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(question)
            while not line.endswith(b"\n"):
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                line += self._socket.recv(1 << 20) or b"it ended\n"
                if len(line) > MAX_BYTES:
                    return "gone", f"it made more than {MAX_BYTES} bytes of text"
            kind, text = json.loads(line)
            return str(kind), str(text)
        except TimeoutError:
            return "gone", f"it took more than {seconds:g} s"
        except (OSError, ValueError, TypeError, RecursionError):
            return "gone", f"it needed more than {MAX_MEMORY >> 20} MiB of memory, or crashed"


class TemplateProcesses:
    """Those of this program."""

    def __init__(self) -> None:
        self._begin()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def render(self, source: str, variables: str) -> Answer:
        """What a template makes of variables in JSON, within seconds whatever it does; ResourceError as above."""
        with self._busy:
            process = self._take(source) or TemplateProcess(source)
            kind, text = "gone", ""
            try:
                kind, text = process.ask(variables)
            finally:
                if kind in ("gone", "broken"):
                    process.end()
                else:
                    self._idle.append(process)
        self.close(MAX_IDLE)
        return kind, text

    def close(self, most: int = 0) -> None:
        """End idle ones until so many are left, those first that were used least recently."""
        with contextlib.suppress(IndexError):  # another thread was quicker
            while len(self._idle) > most:
                self._idle.popleft().end()

    def _take(self, source: str) -> TemplateProcess | None:
        with contextlib.suppress(IndexError):
            for _ in range(len(self._idle)):
                process = self._idle.popleft()
                if process.source != source:
                    self._idle.append(process)
                elif process.process.poll() is None:
                    return process
                else:
                    process.end()
        return None

    def _begin(self) -> None:
        self._busy, self._idle = Semaphore(MAX_BUSY), deque[TemplateProcess]()

    def _forget(self) -> None:
        for process in self._idle:
            process.forget()
        self._begin()


PROCESSES = TemplateProcesses()
