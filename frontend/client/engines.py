"""What a client knows of one engine, and which engine takes the next request. Knows no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from wavecore.transport.errors import EngineDead


class LinkState(Enum):
    """CONNECTING: not ready yet. UP: takes requests. BROKEN: connection lost, cause unknown. UNREACHABLE: lost for so
    long that its requests were given up; the engine may live. DOWN: its life is over."""

    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    DOWN = "down"


@dataclass(slots=True)
class EngineLink:
    """Attributes:
    addresses: input and output, as connected; empty before the engine listens.
    session: the pump's name for one connection to one life of the engine; requests of another one are lost.
    resolved: what the engine said at ready.
    error: why it is down or unreachable.
    own_tokens: outstanding tokens of this client's requests.
    foreign_tokens: outstanding tokens of everybody else's, by the engine's last report.
    """

    index: int
    state: LinkState = LinkState.CONNECTING
    addresses: tuple[str, str] = ("", "")
    epoch: bytes = b""
    session: bytes | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    error: EngineDead | None = None
    own_tokens: int = 0
    foreign_tokens: int = 0

    def report(self, tokens: int) -> None:
        """Take the engine's own count in. What this client just sent may not be in it yet, so it never lowers ours."""
        self.foreign_tokens = max(0, tokens - self.own_tokens)

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
