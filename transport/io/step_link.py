"""Steps of one engine whose ranks are on several hosts: what a ring in memory is on one, over the link between them.

    rank 0    StepRecord 1, 2, 3 ...  -->    each worker: takes exactly the next one
              Words                   <--    how far it is

Records are a numbered stream to each worker (`wire/delivery.py`): nothing waits for an answer, and what is lost with a
connection is sent again. Words are a state, not events: each message holds all of a worker's, so the last one is enough
and is said again now and then.
"""

import json
import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wavecore.transport.io.host_link import HostLink, RankPlace
from wavecore.transport.processes.step_ring import OWN_WORDS, Buffer, StepChannel, own_words
from wavecore.transport.wire.codec import encode
from wavecore.transport.wire.delivery import PIECE_BYTES, Inbox, Outbox
from wavecore.transport.wire.messages import Mark, Message, Ping, StepRecord, TensorFrame, Utility, Words

WINDOW = 1 << 12, 64 << 20  # messages and bytes; a worker that computes acknowledges little, and a plan may be long
PART_BYTES = PIECE_BYTES // 2  # of a record, in a message that no `Outbox` cuts
STOPS = (signal.SIGTERM, signal.SIGINT)
ASK_SECONDS, POLL_SECONDS = 30.0, 0.02


class StepLink(HostLink, StepChannel):
    """A `StepChannel`, of the main loop.

    Args:
        place, further: those of `HostLink`.

    Attributes:
        rank, ranks: this one, and how many there are.
        words: uint64, of this process; rank 0 has those of all ranks.
        progress: where this rank shows that it moves.
    """

    def __init__(self, place: RankPlace, *further: Any) -> None:
        self.rank, self.ranks = place.rank, place.ranks
        self._own = own_words(place.rank, place.ranks)
        self.words = memoryview(bytearray(8 * own_words(place.ranks, place.ranks).start)).cast("Q")
        self._outboxes: dict[int, Outbox] = {}  # of rank 0, by worker
        self._inbox = Inbox()
        self._records = deque[StepRecord]()  # and parts of them, that were not read yet
        super().__init__(place, *further)
        self.progress = self._memory.progress

    def introduce(self, ready: dict[str, Any]) -> dict[str, Any]:
        """What a rank tells its supervisor when it is ready: what it would say, with the ranks of all hosts and, of a
        worker, where rank 0 listens. Rank 0 must come here, too.

        Raises:
            EngineDead: the group's life is over.
        """
        if self._is_head:
            hosts = {0: self.place.host} | {rank: member.host for rank, member in self._members.items()}
            ready["ranks"] = [{"rank": rank, "host": host, "state": "ready"} for rank, host in sorted(hosts.items())]
            self.ask("set", {"key": "ready", "value": json.dumps(ready).encode()}, ASK_SECONDS)
            return ready
        while (found := self.ask("get", {"key": "ready"}, ASK_SECONDS)) is None:
            time.sleep(POLL_SECONDS)
        told: dict[str, Any] = json.loads(found)
        return {**told, "resolved": {**told["resolved"], **ready["resolved"]}}

    def pass_on(self, number: int) -> None:
        """The signal is rank 0's, which drains. For handlers of signals: this very thread may hold the lock."""
        stop = Utility(self.life, self._identity, 0, 0, "stop", {"signal": number})
        self._call_soon(lambda: self._tell_head(stop))

    def ring(self, rank: int) -> None:
        assert rank == 0, "records ring for workers"
        self._tell_head(Words(self.life, self.words[self._own].tolist()))

    def wait_until(self, is_so: Callable[[], bool], peer: int | None = None) -> None:
        """As of `StepChannel`.

        Raises:
            EngineDead: the group's life is over.
        """
        self._sleep_until(is_so, peer)
        self._check()

    def write(self, kind: int, parts: Iterable[Buffer]) -> None:
        self._check()
        rest = memoryview(b"".join(parts))
        with self._turn_of():
            while True:
                part, rest = rest[:PART_BYTES], rest[PART_BYTES:]
                frames = encode(StepRecord(self.life, 0, kind, not rest, TensorFrame("uint8", (len(part),), part)))
                for rank in self._members:
                    self._outbox(rank).append(frames)
                    self._transmit(rank)
                if not rest:
                    return

    def has_room(self, parts: Iterable[Buffer]) -> bool:  # noqa: ARG002 (the interface)
        """Always: what the window does not take waits in memory."""
        return True

    @property
    def has_more(self) -> bool:
        with self._turn_of():
            pass  # it reads at its end
        return bool(self._records)

    def read(self) -> tuple[int, bytes]:
        """As of `StepChannel`.

        Raises:
            EngineDead: the group's life is over.
            SystemExit: rank 0 has ended in order.
        """
        pieces, head = list[Buffer](), self._members[0]
        while True:
            self.wait_until(lambda: bool(self._records) or head.has_left)
            if not self._records:
                raise SystemExit
            part = self._records.popleft()
            pieces.append(part.data.buffer)
            if part.last:
                return part.record, b"".join(pieces)

    def _tell_head(self, message: Message) -> None:
        with self._turn_of():
            self._send(0, message)

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        match message:
            case StepRecord():
                if self._inbox.accept(message.number, len(message.data.buffer)):
                    self._records.append(message)
                    self._wake()
            case Mark():
                self._inbox.take(message, 0)
            case Ping() if self._is_head:
                self._outbox(rank).acknowledge(message.seen, message.gap, message.attempt)
                self._transmit(rank)
            case Words():
                own = own_words(rank, self.ranks)
                # They grow, the first ones first, so what was overtaken is seen to be old.
                if len(message.words) == OWN_WORDS and message.words > self.words[own].tolist():
                    self.words[own] = memoryview(array("Q", message.words))
                    self._wake()
        if self._inbox.report_due:
            self._send(0, self._ping())

    def _do(self, method: str, args: Mapping[str, Any]) -> Any:
        if method == "stop" and args.get("signal") in STOPS:
            os.kill(os.getpid(), args["signal"])
        return super()._do(method, args)

    def _outbox(self, rank: int) -> Outbox:
        return self._outboxes.setdefault(rank, Outbox(self.life, self._identity, WINDOW))

    def _transmit(self, rank: int) -> None:
        outbox, identity = self._outbox(rank), self._members[rank].identity
        while (frames := outbox.peek()) is not None and self._send_to(identity, frames):
            outbox.advance()

    def _repeat(self) -> None:
        if not self._is_head:
            self._send(0, Words(self.life, self.words[self._own].tolist()))

    def _ping(self) -> Ping:
        return Ping(self.life, *self._inbox.report())
