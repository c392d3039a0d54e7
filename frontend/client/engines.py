"""What a client knows of each engine, and of each of its requests on their way. The pump holds the sockets."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from wavecore.frontend.client.mailbox import Mailbox
from wavecore.transport.errors import EngineDead
from wavecore.transport.wire.messages import UNTOLD, Load

GRACE_SECONDS = 5.0  # after a request's own deadline the engine has this long to say so itself


class EngineState(Enum):
    """CONNECTING: not ready yet. UP: takes requests. BROKEN: connection lost, cause unknown. UNREACHABLE: lost for so
    long that its requests were given up; the engine may live. DOWN: its life is over."""

    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class RemoteEngine:
    """One engine, as far as its client knows. Owned by `EngineClient` and written in the IO thread.

    Attributes:
        client_id: what this client is called in its present session with the engine; requests of another one are lost.
        resolved: what the engine said at ready.
        host: where it listens, over tcp.
        error: why it is down or unreachable.
        silent_since: monotonic time of its last word, as far as that is known; infinite before any engine had one.
        broken_by: why the connection broke last.
        turn: when it was last chosen, as a number that only grows.
        own_tokens: of this client's requests there, see `EngineRequest.size`.
        other_tokens, room: see `Load`; of its last report, and `room` without what was sent since.
        unstarted: requests of this client that have given no output, in the order in which they were sent.
    """

    index: int
    state: EngineState = EngineState.CONNECTING
    epoch: bytes = b""
    client_id: bytes | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""
    error: EngineDead | None = None
    silent_since: float = math.inf
    broken_by: str = "it never answered"
    turn: int = 0
    own_tokens: int = 0
    other_tokens: int = UNTOLD.others
    room: int = UNTOLD.room
    unstarted: dict[Mailbox, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """In errors."""
        return f"engine {self.index} at {self.host}" if self.host else f"engine {self.index}"

    @property
    def silent_for(self) -> float:
        """Seconds without a word of an engine that is not up."""
        return time.monotonic() - self.silent_since

    def falls_silent(self, reason: str, ago: float = 0.0) -> None:
        """Its connection broke, or its life is over; its last word came so many seconds `ago`."""
        self.silent_since, self.broken_by = time.monotonic() - ago, reason

    def report(self, load: Load) -> None:
        """Take in what the engine says of itself. What this client just sent may not be in it yet."""
        self.other_tokens, _, self.room = load

    def ended(self, mailbox: Mailbox) -> None:
        """A request of this client is not here any more; `Balance.sent` counted it."""
        self.own_tokens -= mailbox.request.size
        self.unstarted.pop(mailbox, None)

    @property
    def load(self) -> int:
        """Tokens of all requests there."""
        return self.own_tokens + self.other_tokens


class Stay(NamedTuple):
    """A request at an engine.

    Attributes:
        client_id: what this client was called in the session that it was sent in.
        handles: of choices that still run.
    """

    engine: RemoteEngine
    client_id: bytes
    handles: set[int]


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way.

    Attributes:
        prefixes: see `Balance.prefixes`.
        at: the engine that it was sent to; None while it waits for one to come back.
        left: the engine that it was moved away from, until that has ended it: a death meanwhile may be its work.
        lost_by: the death that it was sent again for; there is no second time.
    """

    mailbox: Mailbox
    prefixes: list[int]
    at: Stay | None = None
    left: Stay | None = None
    lost_by: EngineDead | None = None

    @property
    def deadline(self) -> float:
        """Monotonic time when the client gives up on it."""
        options = self.mailbox.request.options
        timeout = math.inf if options.timeout is None else options.timeout
        started = self.mailbox.started
        if self.at is not None:  # the engine counts its time
            return started + timeout + GRACE_SECONDS
        if self.mailbox.has_tokens:
            return started + timeout
        return started + min(options.deadlines.values(), default=math.inf)
