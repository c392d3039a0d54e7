"""What a client knows of one engine, and which engine takes the next request. Knows no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from wavecore.transport.errors import EngineDead
from wavecore.transport.messages import TensorFrame


class LinkState(Enum):
    """CONNECTING: not ready yet. UP: takes requests. BROKEN: connection lost, cause unknown. DOWN: its life is over."""

    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a utility call gave."""

    value: Any
    frames: tuple[TensorFrame, ...]


@dataclass(slots=True)
class EngineLink:
    """Attributes:
    session: the pump's name for one connection to one life of the engine; requests of another one are lost.
    resolved: what the engine said at ready.
    error: why it is down.
    own_tokens: outstanding tokens of this client's requests.
    foreign_tokens: outstanding tokens of everybody else's, by the engine's last report.
    calls: utility calls without an answer.
    """

    index: int
    state: LinkState = LinkState.CONNECTING
    epoch: bytes = b""
    session: bytes | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    error: EngineDead | None = None
    own_tokens: int = 0
    foreign_tokens: int = 0
    calls: dict[int, Future[Answer]] = field(default_factory=dict)

    def report(self, tokens: int) -> None:
        """Take the engine's own count in. What this client just sent may not be in it yet, so it never lowers ours."""
        self.foreign_tokens = max(0, tokens - self.own_tokens)

    def take_calls(self) -> list[Future[Answer]]:
        calls, self.calls = list(self.calls.values()), {}
        return calls

    @property
    def load(self) -> int:
        return self.own_tokens + self.foreign_tokens


class Balancer:
    """Picks the engine with the fewest outstanding tokens; ties go round."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, links: Sequence[EngineLink]) -> EngineLink | None:
        up = [link for link in links if link.state is LinkState.UP]
        if not up:
            return None
        self._turn += 1
        turn = self._turn % len(up)
        return min(up[turn:] + up[:turn], key=lambda link: link.load)
