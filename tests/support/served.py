"""A server as a user starts it, in a process of its own, and a client that sees every byte."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.support.environment import environment
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "wavecore.frontend.cli.main", "serve"]


@dataclass
class Served:
    """A running server.

    Attributes:
        runtime_dir: of its engines.
    """

    process: subprocess.Popen[str]
    url: str
    runtime_dir: Path
    client: httpx.Client

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def events(self, path: str, body: Mapping[str, Any], **more: Any) -> list[Any]:
        """The events of a stream; the mark of its end is checked and left out."""
        answer = self.post(path, {**body, "stream": True}, **more)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        """A connection, for what no client would send."""
        found = socket.socket()
        found.settimeout(20)
        if receive_buffer:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        found.connect((self.client.base_url.host, self.client.base_url.port))
        return found

    def process_named(self, name: str) -> psutil.Process:
        """One of the processes that it started."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if f"wavecore {name}" in " ".join(child.cmdline()):
                        return child
            return None

        found: psutil.Process = until(find, name)
        return found

    def is_idle(self) -> bool:
        return bool(self.get("/load").json()["server_load"] == 0)


@contextlib.contextmanager
def served(*flags: str, **more: str) -> Iterator[Served]:
    """Start one at a port that is free, and end it in order."""
    command, env = [*COMMAND, "--port", "0", *flags], environment(**more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"serving at (\S+); runtime directory: (.+)\n", line)
            assert found, line + process.stderr.read()
            with httpx.Client(base_url=found[1], timeout=30, verify=False) as client:
                yield Served(process, found[1], Path(found[2]), client)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
