"""The ASGI application: a table of routes, each closed unless it is open, and errors as answers.

Starlette's router finds the route; its middleware is left out, because each layer of it wraps `send`, on the hot path.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from wavecore.frontend.serve import probes
from wavecore.frontend.serve.api import chat, completions, models, schema, tokens
from wavecore.frontend.serve.context import ApiContext
from wavecore.frontend.serve.http.http_call import Answer, HttpCall, Message, Receive, Send
from wavecore.frontend.serve.http.refusals import refusal
from wavecore.transport.version import VERSION

Endpoint = Callable[[ApiContext, HttpCall], Awaitable[Answer | None]]


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One line of the table.

    Attributes:
        endpoint: gives the answer, or None where it has written it.
        takes: the struct of its body; None without one.
        is_open: needs no API key.
    """

    method: str
    path: str
    endpoint: Endpoint
    takes: type[msgspec.Struct] | None = None
    is_open: bool = False

    async def __call__(self, scope: Message, _receive: Receive, _send: Send) -> None:
        """As Starlette calls what writes its own answer."""
        call: HttpCall = scope["wavecore.call"]
        answer = await self.endpoint(scope["wavecore.context"], call)
        if answer is not None:
            await call.answer(answer)


async def openapi(_context: ApiContext, _call: HttpCall) -> Answer:
    """The table below for programs, in the form of OpenAPI 3.1."""
    kinds = [route.takes for route in ROUTES if route.takes]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = route.path.replace(":path}", "}")
        answers = {"200": {"description": "as OpenAI's or vLLM's"}, "default": {"description": "an error"}}
        found: dict[str, Any] = {"responses": answers, "operationId": f"{route.method.lower()} {path}"}
        if "{" in path:
            found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if route.takes:
            body = {"schema": {"$ref": f"#/components/schemas/{route.takes.__name__}"}}
            found["requestBody"] = {"required": True, "content": {"application/json": body}}
        paths.setdefault(path, {})[route.method.lower()] = found
    about = {"title": "wavecore", "version": VERSION}
    return Answer({"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": components}})


ROUTES = (
    ApiRoute("POST", "/v1/chat/completions", chat.chat_completions, schema.ChatRequest),
    ApiRoute("POST", "/v1/chat/completions/render", chat.render, schema.ChatRequest),
    ApiRoute("POST", "/v1/completions", completions.completions, schema.CompletionRequest),
    ApiRoute("GET", "/v1/models", models.models),
    ApiRoute("GET", "/v1/models/{model:path}", models.model),
    ApiRoute("POST", "/v1/embeddings", tokens.embeddings, schema.EmbeddingRequest),
    ApiRoute("POST", "/inference/v1/generate", tokens.generate, schema.GenerateRequest),
    ApiRoute("POST", "/tokenize", tokens.tokenize, schema.TokenizeRequest),
    ApiRoute("POST", "/detokenize", tokens.detokenize, schema.DetokenizeRequest),
    ApiRoute("GET", "/openapi.json", openapi),
    ApiRoute("GET", "/version", models.version, is_open=True),
    ApiRoute("GET", "/load", models.load),
    ApiRoute("GET", "/ping", probes.ready, is_open=True),
    ApiRoute("POST", "/ping", probes.ready, is_open=True),
    ApiRoute("GET", "/health", probes.health, is_open=True),
    ApiRoute("GET", "/ready", probes.ready, is_open=True),
    ApiRoute("GET", "/livez", probes.livez, is_open=True),
    ApiRoute("GET", "/metrics", probes.metrics, is_open=True),
)
"""All routes of the server: here a module adds its own."""


class ApiApp:
    """The application of one API process."""

    def __init__(self, context: ApiContext) -> None:
        self.context = context
        routes = [Route(route.path, route, methods=[route.method]) for route in ROUTES]
        self._router = Router(routes, redirect_slashes=False)
        self._paths = {route.path for route in ROUTES}
        self._open = {(route.method, route.path) for route in ROUTES if route.is_open}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = HttpCall(scope, receive, send, self.context.config.max_body_bytes, self._refusal)
        scope.update({"app": self, "wavecore.context": self.context, "wavecore.call": call})
        metrics, started = self.context.metrics, time.monotonic()
        metrics.in_flight.inc()
        try:
            if (scope["method"].replace("HEAD", "GET"), scope["path"]) not in self._open:
                self.context.access.check(call)
            await self._router(scope, receive, send)
        except Exception as error:
            await call.answer(call.refusal(error))
        finally:
            metrics.in_flight.dec()
            route = scope["path"] if scope["path"] in self._paths else "other"
            metrics.served(route, call.status, time.monotonic() - started)

    def _refusal(self, call: HttpCall, error: Exception) -> Answer:
        if isinstance(error, HTTPException) and error.detail == HTTPStatus(error.status_code).phrase:  # the router's
            error.detail = f"{call.scope['method']} {call.scope['path']:.200} is nothing that is served here"
        return refusal(call, error, self.context.admission.retry_after)
