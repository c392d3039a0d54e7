"""Whether requests are let in now, and when to come again. The engine's own queue has the last word: `Overloaded`."""

import math
import time
from dataclasses import replace
from http import HTTPStatus
from typing import TypeVar

from starlette.exceptions import HTTPException

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.serve.api.schema import EngineRequestFields
from wavecore.frontend.serve.http.access import salt_of
from wavecore.frontend.serve.http.http_call import HttpCall
from wavecore.transport.errors import ValidationError

MOST_SECONDS = 60  # of Retry-After
Number = TypeVar("Number", int, float)
RATE_SECONDS = 30.0  # over which the rate of ends is averaged


class Admission:
    """The door of one API process.

    Attributes:
        draining: the server ends, and takes nothing new.
    """

    def __init__(self, client: EngineClient) -> None:
        self.draining = False
        self._client = client
        self._rate = 0.0  # requests that end a second
        self._last_end = time.monotonic()

    def check(self) -> None:
        """Raises:
        HTTPException: 503, while the server drains or no engine is up.
        """
        if self.draining:
            reason = "the server is shutting down; send the request to another one"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        if not self._client.engines:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "no engine takes requests now; try again later")

    def count_end(self) -> None:
        """A request has ended."""
        now = time.monotonic()
        passed, self._last_end = max(now - self._last_end, 1e-6), now
        share = 1.0 - math.exp(-passed / RATE_SECONDS)
        self._rate += share * (1.0 / passed - self._rate)

    @property
    def retry_after(self) -> int:
        """Seconds until the requests of this process should have ended, at their present rate."""
        return min(MOST_SECONDS, max(1, math.ceil(self._client.num_live / self._rate))) if self._rate else 1


def options_of(call: HttpCall, body: EngineRequestFields) -> RequestOptions:
    """The options of a request, from its body or from headers of this name, and with its owner's share of the cache.

    Raises:
        ValidationError: a value out of bounds.
    """
    call.take_id(body.request_id)
    rank = body.data_parallel_rank
    priority = _from_header(call, "x-wavecore-priority", int) if body.priority is None else body.priority
    timeout = _from_header(call, "x-wavecore-timeout", float) if body.timeout is None else body.timeout
    rank = _from_header(call, "x-data-parallel-rank", int) if rank is None else rank  # as vLLM's
    checked = RequestOptions(priority or 0, timeout, data_parallel_rank=rank, cache_salt=body.cache_salt)
    return replace(checked, cache_salt=salt_of(call.owner, checked.cache_salt)) if call.owner else checked


def _from_header(call: HttpCall, name: str, kind: type[Number]) -> Number | None:
    text = call.header(name.encode())
    try:
        return kind(text) if text else None
    except ValueError:
        raise ValidationError(name, f"must be a {'whole ' if kind is int else ''}number, not {text!r:.40}") from None
