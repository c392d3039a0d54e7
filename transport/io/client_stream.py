"""What an engine keeps for one client: its two numbered streams, and the output that waits for room in the one down."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.codec import Frames, encode
from wavecore.transport.wire.delivery import PIECE_BYTES, WINDOW_BYTES, WINDOW_MESSAGES, Inbox, Outbox
from wavecore.transport.wire.messages import UNTOLD, Abort, FinishReason, Load, Result, Step, StepTokens
from wavecore.transport.wire.step_tokens import finish_rows, merge, rows_of, size_of

STEP_BYTES = PIECE_BYTES // 2  # merged output leaves in messages of about this size
HELD_MESSAGES = 10_000  # not acknowledged; only results can be so many, see `put_result`
MERGE_EVERY = 64  # merging each step would copy all that waits each time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of what an engine holds for its clients.

    Attributes:
        clients: attached at once.
        messages: in flight to one client; more waits, merged.
        held_bytes: merged output that waits and what is not acknowledged; a client that needs more is dropped.
        calls: utility calls of one client that wait for their answer; more are answered as overloaded.
        absent_ticks, silent_ticks, stalled_ticks: a client is dropped after so many seconds without a connection,
            without a word, without acknowledging anything while output waits.
    """

    clients: int = 1000
    messages: int = WINDOW_MESSAGES
    held_bytes: int = 256 << 20
    calls: int = 1000
    absent_ticks: int = 5
    silent_ticks: int = 10
    stalled_ticks: int = 10


@dataclass(slots=True)
class ClientInput:
    """What one client sends.

    Attributes:
        client_id: its name.
        max_calls: utility calls that may wait for their answer.
        inbox: the receiving end of its numbered stream; written by the input thread.
        calls: utility calls received, whatever became of them; written by the input thread.
        answered: how many of them were answered; written by the output thread.
    """

    client_id: bytes
    max_calls: int
    inbox: Inbox = field(default_factory=Inbox)
    calls: int = 0
    answered: int = 0

    def count_call(self) -> bool:
        """Count a call. Returns whether it may wait for its answer with the others."""
        self.calls += 1
        return self.calls - self.answered <= self.max_calls


class ClientStream:
    """Used by the output thread only; bounded by `ClientLimits`.

    Args:
        queue: gets an Abort of each request whose output cannot travel.

    Attributes:
        input: what the client sends.
        connected: whether it is, as far as the last message to it told.
    """

    def __init__(self, epoch: bytes, client_id: bytes, limits: ClientLimits, queue: Callable[[Abort], object]) -> None:
        self.input = ClientInput(client_id, limits.calls)
        self.connected = True
        self._epoch, self._client_id = epoch, client_id
        self._queue = queue
        self._limits = limits
        self._outbox = Outbox(epoch, client_id, (limits.messages, WINDOW_BYTES))
        self._waiting: list[StepTokens] = []
        self._waiting_bytes = 0
        self._waiting_merged = 0  # how many parts of _waiting the last merge left
        self._load = UNTOLD
        self._lost: set[int] = set()  # ended here, not yet in the engine: what comes of them until then is dropped
        self._silent_ticks = 0
        self._absent_ticks = 0
        self._stalled_ticks = 0

    @property
    def has_output(self) -> bool:
        """Whether something was not transmitted yet."""
        return bool(self._waiting or self._outbox.has_unsent)

    @property
    def held_bytes(self) -> int:
        """Of output that waits or is not acknowledged."""
        return self._outbox.bytes + self._waiting_bytes

    @property
    def overflows(self) -> bool:
        """Whether it must be dropped for what the engine would have to hold for it."""
        return self.held_bytes > self._limits.held_bytes or len(self._outbox) > HELD_MESSAGES

    def heard(self) -> None:
        self._silent_ticks = 0
        self.connected = True

    def acknowledge(self, seen: int, gap: bool, attempt: int) -> None:
        if self._outbox.acknowledge(seen, gap, attempt):
            self._stalled_ticks = 0

    def tick(self) -> str:
        """One second went by. Returns why the client must be dropped, or nothing."""
        self._silent_ticks += 1
        self._absent_ticks = 0 if self.connected else self._absent_ticks + 1
        self._stalled_ticks = self._stalled_ticks + 1 if self._outbox.full else 0
        if self._absent_ticks > self._limits.absent_ticks:
            return f"it disconnected and did not come back for {self._limits.absent_ticks} s"
        if self._silent_ticks > self._limits.silent_ticks:
            return f"it was silent for {self._limits.silent_ticks} s"
        if self._stalled_ticks > self._limits.stalled_ticks:
            return f"it read nothing for {self._limits.stalled_ticks} s while output waited"
        return ""

    def put(self, output: StepTokens, load: Load) -> None:
        self._waiting.append(output)
        self._waiting_bytes += size_of(output)
        self._load = load
        if len(self._waiting) - self._waiting_merged >= MERGE_EVERY:
            self._waiting = [merge(*group) for group in _groups(self._waiting)]
            self._waiting_merged = len(self._waiting)
            self._waiting_bytes = sum(map(size_of, self._waiting))

    def put_result(self, result: Result) -> None:
        """Queue a utility call's answer, beside the output of steps.

        Results do not wait for room in the window: they cannot be merged, and calls are bounded where they come in.
        """
        try:
            frames = encode(result)
        except ProtocolError as fault:
            logger.debug("the result of call %d cannot travel: %s", result.call, fault)  # its caller hears
            frames = encode(replace(result, error_code=fault.code, error=str(fault), value=None, frames=()))
        self._outbox.append(frames, lane=1)

    def next_frames(self) -> Frames | None:
        """The next message to transmit, encoded when its turn comes; None: nothing, or no room in the window."""
        if self._waiting and not self._outbox.full:
            self._append_step()
        return self._outbox.peek()

    def advance(self) -> None:
        self._outbox.advance()

    def _append_step(self) -> None:
        group = next(_groups(self._waiting))
        del self._waiting[: len(group)]
        self._waiting_merged = max(0, self._waiting_merged - len(group))
        self._waiting_bytes -= sum(map(size_of, group))
        self._append_output(merge(*group))

    def _append_output(self, output: StepTokens) -> None:
        if self._lost:
            lost = np.isin(output.handles, list(self._lost))
            self._lost -= set(output.handles[lost & (output.finish > 0)].tolist())
            output = rows_of(output, ~lost)
        rows = len(output.handles)
        try:
            if rows:
                self._outbox.append(self._encode(output))
        except ProtocolError as error:  # too large, or a bug: the request at fault ends with the reason, others go on
            if rows > 1:
                first = np.arange(rows) < rows // 2
                self._append_output(rows_of(output, first))
                self._append_output(rows_of(output, ~first))
                return
            logger.warning("output of a request cannot travel: %s", error)
            if not output.finish[0]:
                self._lost.add(int(output.handles[0]))
                self._queue(Abort(self._epoch, self._client_id, 0, output.handles))
            ends = finish_rows(output.handles.tolist(), FinishReason.ERROR, error.code, str(error))
            self._outbox.append(self._encode(ends))

    def _encode(self, output: StepTokens) -> Frames:
        return encode(Step(self._epoch, 0, output, self._load))


def _groups(parts: Iterable[StepTokens]) -> Iterator[list[StepTokens]]:
    """Neighbours of at most STEP_BYTES together; a larger one stands alone."""
    group: list[StepTokens] = []
    total = 0
    for part in parts:
        if group and total + size_of(part) > STEP_BYTES:
            yield group
            group, total = [], 0
        group.append(part)
        total += size_of(part)
    if group:
        yield group
