"""One request of HTTP: its body within limits, and whole answers. Streams are written by `stream.py`."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from wavecore.transport.errors import ValidationError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 64  # of JSON
BODY_SECONDS = 60.0  # for a body to arrive
MAX_NAMED = 20  # unknown fields named in an answer's header
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Answer(Response):
    """A whole response: bytes, or what becomes JSON."""

    media_type = "application/json"
    body: bytes

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


class HttpCall:
    """One request, as endpoints see it.

    Attributes:
        id: of the request, in the answer's `x-request-id`; the client's own where it gave a plain one.
        owner: whose key it came with; empty where keys are not asked for.
        notes: further headers of the answer.
        status: of the answer that has begun; 0 for none.
        refusal: gives the answer that an error becomes.
        write: a part of a body that goes on; False leaves it to `send`.
    """

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        max_body: int,
        refuse: Callable[[HttpCall, Exception], Answer],
    ) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        own = scope.get("extensions", {}).get("wavecore", {})
        self.write: Callable[[bytes], bool] = own.get("write", lambda _: False)
        self.refusal = partial(refuse, self)
        self._max_body = max_body
        given = self.header(b"x-request-id")
        self.id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.owner, self.status = "", 0
        self.notes: Headers = [(b"x-request-id", self.id.encode())]

    def header(self, name: bytes) -> str:
        """The first header of this name, which is in lower case; empty without one."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), "")

    async def read(self, kind: type[T], known: Callable[[str, Any], bool]) -> T:
        """The body as a struct of `kind`.

        Args:
            known: of a field that `kind` lacks, and its value: whether it is known, and asks for nothing here; raises
                NotSupportedError where it would change the answer.

        Raises:
            ValidationError: no such JSON; says where.
            HTTPException: another type of content, too large, or too slow.
        """
        kind_of_content = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind_of_content != "application/json" or self.header(b"content-encoding") not in ("", "identity"):
            what = "the body must be plain JSON, with content-type: application/json"
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, what)
        body = await self._body()
        _check_depth(body)
        value: T = _decode(body, kind)
        own, given = kind.__struct_fields__, _decode(body, dict[str, msgspec.Raw])
        ignored = [n for n, raw in given.items() if n not in own and not known(n, msgspec.json.decode(raw))]
        if ignored:
            named = ", ".join([re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in ignored[:MAX_NAMED]])
            self.notes.append((b"x-wavecore-ignored", named.encode()))
        return value

    async def answer(self, answer: Answer) -> None:
        answer.raw_headers += self.notes
        self.status = answer.status_code
        await answer(self.scope, self.receive, self.send)

    def take_id(self, given: str | None) -> None:
        """Be called as the body says.

        Raises:
            ValidationError: no plain text.
        """
        if given is not None and not _ID.fullmatch(given):
            raise ValidationError("request_id", "must be 1 to 128 letters, digits, or any of ._:-")
        if given is not None:
            self.id, self.notes[0] = given, (b"x-request-id", given.encode())

    def cut(self) -> None:
        """End the connection at once, whatever waits to be read."""
        self.scope["extensions"]["wavecore"]["abort"]()

    async def gone(self) -> None:
        """Returns when the client has left, or has its whole answer."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = int(self.header(b"content-length") or 0)  # the parser has checked that it is a number
        more = True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= self._max_body:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body ended early")
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size = max(size, sum(map(len, parts)))
        except TimeoutError:
            slow = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, slow, {"connection": "close"}) from None
        if size > self._max_body:
            large = f"the body is larger than {self._max_body} bytes"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, large, {"connection": "close"})
        return b"".join(parts)


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.n`"
        reason, _, path = str(error).partition(" - at ")
        raise ValidationError(path.strip("`").removeprefix("$").removeprefix(".") or "body", reason) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValidationError("body", f"is not JSON in UTF-8: {error}") from None


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:  # nearly every body
        return
    depth = 0
    for byte in _STRING.sub(b"", body).translate(None, bytes(set(range(256)) - set(b"[]{}"))):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValidationError("body", f"is nested deeper than {MAX_DEPTH}")
