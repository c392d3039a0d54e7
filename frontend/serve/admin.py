"""For the operator: HTTP at `admin.sock` in the runtime directory, which its owner alone can open.

    curl --unix-socket DIR/admin.sock http://admin/requests    what each request does, and why it waits
                                      http://admin/trace       the last thousand steps, for https://ui.perfetto.dev
                                      http://admin/memory      KV blocks, and bytes by use
                                      http://admin/settings    of the engines, and where each value comes from
    curl --unix-socket DIR/admin.sock -X POST http://admin/reset_prefix_cache
                                              http://admin/pause, then http://admin/resume    engines in lockstep
                                              http://admin/profile/start, then http://admin/profile/stop

Answers are JSON: by number of the engine, of all that are up; of pauses and their ends, of one that asked the others.
Unlike scrapes and probes they wait for the engines.

Every API process of a deployment has such a socket, the further ones `admin-1.sock` and so on, and shows at /http what
it has counted of HTTP. So a scrape of one tells of all.
"""

import asyncio
import contextlib
import logging
import socket
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.utilities import merged_trace, start_calls
from wavecore.frontend.serve.listener import listen_at_file
from wavecore.frontend.serve.metrics import Metrics
from wavecore.transport.errors import ResourceError, WavecoreError
from wavecore.transport.processes.runtime_dir import ADMIN_SOCKETS

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
OTHERS_SECONDS = 0.5  # for the other API processes to say what they have counted
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {  # path -> HTTP method, the engines' utility, its arguments
    "/requests": ("GET", "debug_requests", {}),
    "/trace": ("GET", "export_trace", {}),
    "/memory": ("GET", "memory_stats", {}),
    "/settings": ("GET", "settings", {}),
    "/reset_prefix_cache": ("POST", "reset_prefix_cache", {}),
    "/pause": ("POST", "pause", {}),
    "/resume": ("POST", "resume", {}),
    "/profile/start": ("POST", "profile", {"on": True}),
    "/profile/stop": ("POST", "profile", {"on": False}),
}


class Admin:
    """The operator's door of one API process.

    Args:
        folder: the runtime directory.
        index: of the process in its server.

    Attributes:
        number: of the process in the deployment, which may have several servers; its socket's, too.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self.number, self._folder = index, folder
        self._listener: socket.socket | None = None
        for number, name in list(enumerate(ADMIN_SOCKETS))[index:]:
            with contextlib.suppress(ResourceError):  # of another server
                self._listener = listen_at_file(str(folder / name))
                (folder / name).chmod(0o600)
                self.number = number
                return
        logger.warning("no admin socket: %s takes none from number %d on", folder, index)

    async def run(self, client: EngineClient, metrics: Metrics) -> None:
        """Until cancelled."""
        if self._listener is None:
            return
        routes = [Route(path, partial(_answer, client), methods=[verb]) for path, (verb, _, _) in CALLS.items()]
        app = Starlette(routes=[*routes, Route("/http", lambda _: PlainTextResponse(metrics.http()))])
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        protocol = partial(HttpToolsProtocol, config, ServerState(), {})
        server = await asyncio.get_running_loop().create_unix_server(protocol, sock=self._listener)
        try:
            await server.serve_forever()
        finally:
            (self._folder / ADMIN_SOCKETS[self.number]).unlink(missing_ok=True)

    async def others(self) -> list[str]:
        """What the other API processes have counted of HTTP, of those that say so in time."""
        if self._listener is None:
            return []
        paths = [self._folder / name for number, name in enumerate(ADMIN_SOCKETS) if number != self.number]
        asked = [asyncio.wait_for(_counted(path), OTHERS_SECONDS) for path in paths if path.exists()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [text for text in found if isinstance(text, str)]


async def _answer(client: EngineClient, request: Request) -> JSONResponse:
    _, method, args = CALLS[request.url.path]
    try:
        calls = start_calls(client, method, CALL_SECONDS, **args)
        results = await asyncio.gather(*map(asyncio.wrap_future, calls.values()))
        values = {index: result.value for index, result in zip(calls, results, strict=True)}
    except WavecoreError as error:
        status = HTTPStatus.BAD_REQUEST if isinstance(error, ValueError) else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"error": str(error)}, status)
    return JSONResponse(merged_trace(values) if method == "export_trace" else values)


async def _counted(path: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"GET /http HTTP/1.0\r\n\r\n")
        return (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    finally:
        writer.close()
