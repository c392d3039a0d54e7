"""How one request is served: its priority, deadlines, cache salt and pooling; what is not about sampling."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from wavecore.engine_core.api.fields import Bounds, WireFields, field_checks, make_plain
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import MAX_TOKEN_ID, OF_REQUEST

MIN_SECONDS = 0.001
DEADLINE = Bounds(MIN_SECONDS, 7 * 86400.0)
MAX_ENGINES = 1 << 10  # of a deployment
DEADLINES = ("timeout", "queue_timeout", "first_token_timeout")


@dataclass(frozen=True, slots=True)
class RequestOptions(WireFields):
    """Options of one request beside its `SamplingParams`, checked where they are made, in frontend and engine alike.

    Attributes:
        priority: lower runs first under scheduling_policy="priority".
        timeout: seconds for the whole request.
        queue_timeout, first_token_timeout: seconds until its first step and until its first token.
        data_parallel_rank: the only engine that shall serve it; None leaves the choice to the client.
        cache_salt: only requests with the same salt share cached prefixes.
        pooling: "mean" or "last" makes it an embedding request.
        emitted: how many of the prompt's last ids are output of this request, which goes on after an engine's death.

    Raises:
        ValidationError: naming the option.
    """

    priority: Annotated[int, Bounds(-(1 << 20), 1 << 20)] = 0
    timeout: Annotated[float | None, DEADLINE] = None
    queue_timeout: Annotated[float | None, DEADLINE] = None
    first_token_timeout: Annotated[float | None, DEADLINE] = None
    data_parallel_rank: Annotated[int | None, Bounds(0, MAX_ENGINES - 1)] = None
    cache_salt: Annotated[str | None, Bounds(1, 256)] = None
    pooling: Literal["mean", "last"] | None = None
    emitted: Annotated[int, Bounds(0, MAX_TOKEN_ID)] = 0

    def __post_init__(self) -> None:
        make_plain(self, _CHECKS)

    @property
    def deadlines(self) -> dict[str, float]:
        """The deadlines that are set, in seconds by name."""
        return {name: seconds for name in DEADLINES if (seconds := getattr(self, name)) is not None}

    def after(self, seconds: float) -> Self:
        """The options of a request that is sent again: its deadlines have run for so many seconds already."""
        left: dict[str, Any] = {name: max(MIN_SECONDS, limit - seconds) for name, limit in self.deadlines.items()}
        return replace(self, **left) if left else self


_CHECKS = field_checks(RequestOptions, OF_REQUEST)


def embedding_options(pooling: Literal["mean", "last"], timeout: float | None) -> RequestOptions:
    if pooling is None:
        raise ValidationError("pooling", "must be one of mean, last, not None")
    return RequestOptions(pooling=pooling, timeout=timeout)
