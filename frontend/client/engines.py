"""What a client knows of each engine. The pump holds the sockets to them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from wavecore.transport.errors import EngineDead


class EngineState(Enum):
    """CONNECTING: not ready yet. UP: takes requests. BROKEN: connection lost, cause unknown. UNREACHABLE: lost for so
    long that its requests were given up; the engine may live. DOWN: its life is over."""

    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    DOWN = "down"


@dataclass(slots=True)
class RemoteEngine:
    """One engine, as far as its client knows. Owned by `EngineClient` and written in the IO thread.

    Attributes:
        client_id: what this client is called in its present session with the engine; requests of another one are lost.
        resolved: what the engine said at ready.
        error: why it is down or unreachable.
        broken_at, broken_by: monotonic time and reason of the last break of the connection.
        num_sent: requests of this client so far.
        own_tokens: outstanding tokens of this client's requests.
        foreign_tokens: outstanding tokens of everybody else's, by the engine's last report.
    """

    index: int
    state: EngineState = EngineState.CONNECTING
    epoch: bytes = b""
    client_id: bytes | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    error: EngineDead | None = None
    broken_at: float = 0.0
    broken_by: str = ""
    num_sent: int = 0
    own_tokens: int = 0
    foreign_tokens: int = 0

    @property
    def broken_for(self) -> float:
        """Seconds since the connection broke."""
        return time.monotonic() - self.broken_at

    def report(self, tokens: int) -> None:
        """Take the engine's own count in. What this client just sent may not be in it yet, so it never lowers ours."""
        self.foreign_tokens = max(0, tokens - self.own_tokens)

    @property
    def load(self) -> int:
        return self.own_tokens + self.foreign_tokens
