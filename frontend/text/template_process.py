"""The processes in which chat templates run, one a template: started at its first use, kept warm, killed when too slow.

A process ends with this program, because its socket closes then, and earlier when others were used since or `close` is
called: the next chat starts it again. A signal handler may close, so nothing on that way takes a lock.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from threading import Semaphore
from typing import Any, Self

from wavecore.transport import forks
from wavecore.transport.errors import ResourceError
from wavecore.transport.processes.process import python_path

MAX_SECONDS = 3  # for one answer, with compiling the template
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_BYTES = 16 << 20  # of an answer
READ = 1 << 16  # bytes at once; larger buffers are mapped and unmapped for each answer
MAX_BUSY, MAX_IDLE = 8, 4  # processes
START_SECONDS = 60.0
PROGRAM = "wavecore.frontend.text.template_child"
# What Python needs beside its path, and the time zone. The rest is not for a template's eyes: it may hold secrets.
ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")

Answer = tuple[str, Any]
"""A kind that says what the other is: the "text" in pieces (see `special_text`), or as a string why there is none: the
conversation is "invalid", the template "failed" or is "broken" (it does not compile), or its process is "gone"."""


class TemplateProcess:
    """One process.

    Args:
        template: [source, special tokens] in JSON; told once, as both are long.

    Raises:
        ResourceError: the machine cannot start a process just now.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self._started = False
        kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with contextlib.ExitStack() as undo:
            try:
                self._socket, theirs = map(undo.enter_context, socket.socketpair())
                self.process = subprocess.Popen(
                    # -P: the program's own folder is no place to import from
                    [sys.executable, "-P", "-m", PROGRAM, str(MAX_SECONDS), str(MAX_MEMORY)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={**kept, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))},
                    start_new_session=True,  # a terminal's Ctrl-C is not for it
                )
            except OSError as error:
                raise ResourceError(f"the process of a chat template could not be started: {error}") from error
            undo.pop_all()
        theirs.close()

    def ask(self, conversation: str) -> Answer:
        """What the template makes of a conversation in JSON. Of no use any more when the answer is "gone".

        Raises:
            ResourceError: it did not start.
        """
        if not self._started:
            if self._ask(b"", START_SECONDS)[0] == "gone":
                raise ResourceError(f"{sys.executable} -m {PROGRAM} did not start; does it find jinja2?")
            if (answer := self._ask(f"{self.template}\n".encode(), MAX_SECONDS))[0] != "text":
                return answer
            self._started = True
        return self._ask(f"{conversation}\n".encode(), MAX_SECONDS)

    def end(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def forked(self) -> None:
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
                line += self._socket.recv(READ) or b"it ended\n"
                if len(line) > MAX_BYTES:
                    return "gone", f"it made more than {MAX_BYTES} bytes of text"
            kind, answer = json.loads(line)
            return kind, answer
        except TimeoutError:
            return "gone", f"it took more than {seconds:g} s"
        except (OSError, ValueError, TypeError, RecursionError):
            return "gone", f"it needed more than {MAX_MEMORY >> 20} MiB of memory, crashed or was ended"


class TemplateProcesses:
    """Those of one tokenizer. They end when it is collected."""

    def __init__(self) -> None:
        self._turns, self._closed = Semaphore(MAX_BUSY), 0
        self._busy, self._idle = set[TemplateProcess](), deque[TemplateProcess]()
        forks.tell(self)
        weakref.finalize(self, _end, self._idle, 0)

    def ask(self, template: str, conversation: str) -> Answer:
        """What a template makes of a conversation within seconds, whatever it does; ResourceError as above."""
        with self._turns:
            closed, answer = self._closed, ("gone", "")
            process = self._take(template) or TemplateProcess(template)
            self._busy.add(process)
            try:
                answer = process.ask(conversation)
            finally:
                self._busy.discard(process)
                if answer[0] in ("gone", "broken"):
                    process.end()
                else:
                    self._idle.append(process)
                _end(self._idle, MAX_IDLE if closed == self._closed else 0)
        return answer

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy of the tokenizer, also in another process, has its own

    def close(self) -> None:
        """End them all; who waits for one hears that it is gone."""
        self._closed += 1
        for process in list(self._busy):
            process.process.kill()
        _end(self._idle, 0)

    def forked(self) -> None:
        """In a fork: the processes are the parent's, and so are the threads that wait for them."""
        for process in (*self._idle, *self._busy):
            process.forked()
        self._turns = Semaphore(MAX_BUSY)
        self._idle.clear()
        self._busy.clear()

    def _take(self, template: str) -> TemplateProcess | None:
        with contextlib.suppress(IndexError):  # another thread was quicker
            for _ in range(len(self._idle)):
                process = self._idle.popleft()
                if process.template != template:
                    self._idle.append(process)
                elif process.process.poll() is None:
                    return process
                else:
                    process.end()
        return None


def _end(idle: deque[TemplateProcess], most: int) -> None:
    """Until so many are left, those first that were used least recently."""
    with contextlib.suppress(IndexError):  # another thread was quicker
        while len(idle) > most:
            idle.popleft().end()
