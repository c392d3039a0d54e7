"""One API process: attaches to the engines, listens at a socket that it was given, and ends in order."""

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from wavecore.frontend.base import places_of
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.service import Service
from wavecore.frontend.serve.app import ApiApp
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.protocol import LimitedProtocol
from wavecore.frontend.serve.server_config import ServerConfig

ATTACH_SECONDS = 30.0
DRAIN_LOOK_SECONDS = 0.05
SESSIONS_SECONDS = 0.25
GC_THRESHOLD = 50_000  # more objects made than dropped, until the collector looks
KEEP_ALIVE_SECONDS = 75  # of a connection without a request; longer than a load balancer's, which would meet a close

Report = Callable[[dict[str, Any]], None]


class _Server(uvicorn.Server):
    """uvicorn's, with our answer to signals: it drains, and the second one ends it at once."""

    def __init__(self, context: ApiContext) -> None:
        config = context.config
        super().__init__(
            uvicorn.Config(
                ApiApp(context),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # of no use here, and a layer
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            )
        )
        self._context = context
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        """Refuse what is new, and end when the rest is done."""
        self._context.admission.draining = True
        by = time.monotonic() + self._context.config.shutdown_timeout
        while self.server_state.tasks and time.monotonic() < by and not self.should_exit:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        self.should_exit = True


def run(config: ServerConfig, listener: socket.socket, report: Report) -> None:
    """Serve until a signal ends it.

    Args:
        report: called once it serves, and again whenever its sessions with engines are others, with these.

    Raises:
        WavecoreError: there are no engines to attach to.
    """
    own = None if config.tokenizer is None else Path(config.tokenizer)
    service = Service(places_of(config.attach), None, ATTACH_SECONDS, own)
    service.start_text_threads()
    gc.collect()
    gc.freeze()  # what is there by now stays
    gc.set_threshold(GC_THRESHOLD)  # a stream makes and drops objects with each delta, and few circles
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, service, listener, report))
    finally:
        service.close()


async def _serve(config: ServerConfig, service: Service, listener: socket.socket, report: Report) -> None:
    context = ApiContext(config, service)
    server, client = _Server(context), service.client
    beside = context.replies.sweep(), context.metrics.run(), _report_sessions(server, client, report)
    tasks = [asyncio.create_task(work) for work in (*beside, context.admin.run(client, context.metrics))]
    try:
        await server.serve([listener])
    finally:
        for task in tasks:
            task.cancel()


async def _report_sessions(server: uvicorn.Server, client: EngineClient, report: Report) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    told = None
    while True:
        if (now := client.sessions) != told:
            told = now
            report({"resolved": {str(index): [part.hex() for part in session] for index, session in now.items()}})
        await asyncio.sleep(SESSIONS_SECONDS)
