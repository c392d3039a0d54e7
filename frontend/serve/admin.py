"""For the operator: HTTP at `admin.sock` in the runtime directory, which its owner alone can open.

    curl --unix-socket DIR/admin.sock http://admin/requests    what each request does, and why it waits
                                      http://admin/trace       the last thousand steps, for https://ui.perfetto.dev
                                      http://admin/memory      KV blocks, and bytes by use
                                      http://admin/settings    of the engines, and where each value comes from
    curl --unix-socket DIR/admin.sock -X POST http://admin/reset_prefix_cache
                                              http://admin/profile/start, then http://admin/profile/stop

Answers are JSON: by number of the engine, of all that are up. Unlike scrapes and probes they wait for the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.utilities import merged_trace
from wavecore.frontend.serve.listener import listen_at_file
from wavecore.transport.errors import ResourceError, WavecoreError
from wavecore.transport.processes.runtime_dir import ADMIN_SOCKET

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {  # path -> HTTP method, the engines' utility, its arguments
    "/requests": ("GET", "debug_requests", {}),
    "/trace": ("GET", "export_trace", {}),
    "/memory": ("GET", "memory_stats", {}),
    "/settings": ("GET", "settings", {}),
    "/reset_prefix_cache": ("POST", "reset_prefix_cache", {}),
    "/profile/start": ("POST", "profile", {"on": True}),
    "/profile/stop": ("POST", "profile", {"on": False}),
}


async def serve_admin(client: EngineClient, runtime_dir: Path) -> None:
    """Until cancelled; not at all where another server of this deployment has the socket."""
    path = runtime_dir / ADMIN_SOCKET
    try:
        listener = listen_at_file(str(path))
    except ResourceError as error:
        logger.warning("no admin socket: %s", error)
        return
    path.chmod(0o600)

    async def answer(request: Request) -> JSONResponse:
        _, method, args = CALLS[request.url.path]
        try:
            client.check_health()
            up = client.engines
            calls = [client.call(method, args, engine=index, timeout=CALL_SECONDS) for index in up]
            results = await asyncio.gather(*map(asyncio.wrap_future, calls))
            values = {index: result.value for index, result in zip(up, results, strict=True)}
        except WavecoreError as error:
            status = HTTPStatus.BAD_REQUEST if isinstance(error, ValueError) else HTTPStatus.SERVICE_UNAVAILABLE
            return JSONResponse({"error": str(error)}, status)
        return JSONResponse(merged_trace(values) if method == "export_trace" else values)

    app = Starlette(routes=[Route(route, answer, methods=[verb]) for route, (verb, _, _) in CALLS.items()])
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # the other server's
    try:
        await server.serve([listener])
    finally:
        path.unlink(missing_ok=True)
