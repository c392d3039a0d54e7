"""What the output thread keeps for one client: its numbered stream, and the output that waits for room in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from wavecore.transport.errors import MessageTooLarge, ProtocolError
from wavecore.transport.io.sessions import ClientInput
from wavecore.transport.wire.codec import Frames, encode
from wavecore.transport.wire.delivery import Outbox
from wavecore.transport.wire.messages import MAX_RESULT_BYTES, FinishReason, Result, Step, StepTokens, TensorFrame
from wavecore.transport.wire.step_tokens import finish_rows, merge, size_of

STEP_BYTES = 1 << 20  # merged output leaves in messages of about this size
CHUNK_BYTES = 8 << 20
HELD_MESSAGES = 10_000  # not acknowledged; only results can be so many, see `put_result`
MERGE_EVERY = 64  # merging each step would copy all that waits each time

logger = logging.getLogger(__name__)
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of what an engine holds for its clients.

    Attributes:
        clients: attached at once.
        messages, bytes: sent to one client and not acknowledged; more waits, merged.
        held_bytes: merged output that waits and what is not acknowledged; a client that needs more is dropped.
        calls: utility calls of one client that wait for their answer; more are answered as overloaded.
        absent_ticks, silent_ticks, stalled_ticks: a client is dropped after so many seconds without a connection,
            without a word, without acknowledging anything while output waits.
    """

    clients: int = 1000
    messages: int = 256
    bytes: int = 32 << 20
    held_bytes: int = 256 << 20
    calls: int = 1000
    absent_ticks: int = 5
    silent_ticks: int = 10
    stalled_ticks: int = 10


class ClientStream:
    """Used by the output thread only; bounded by `ClientLimits`.

    Attributes:
        input: what the client sends.
        connected: whether it is, as far as the last message to it told.
        leaving: it said goodbye.
    """

    def __init__(self, epoch: bytes, limits: ClientLimits, input: ClientInput) -> None:
        self.input = input
        self.connected = True
        self.leaving = False
        self._epoch = epoch
        self._limits = limits
        self._outbox = Outbox(limits.messages, limits.bytes)
        self._waiting: list[StepTokens] = []
        self._waiting_bytes = 0
        self._waiting_merged = 0  # how many parts of _waiting the last merge left
        self._load = 0
        self._silent_ticks = 0
        self._absent_ticks = 0
        self._stalled_ticks = 0

    @property
    def has_output(self) -> bool:
        """Whether something was not transmitted yet."""
        return bool(self._waiting or self._outbox.peek() is not None)

    @property
    def overflows(self) -> bool:
        """Whether it must be dropped for what the engine would have to hold for it."""
        return self._outbox.bytes + self._waiting_bytes > self._limits.held_bytes or len(self._outbox) > HELD_MESSAGES

    def heard(self) -> None:
        self._silent_ticks = 0
        self.connected = True

    def acknowledge(self, seen: int, gap: bool, now: float) -> None:
        if self._outbox.acknowledge(seen, gap, now):
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

    def put(self, output: StepTokens, load: int) -> None:
        self._waiting.append(output)
        self._waiting_bytes += size_of(output)
        self._load = load
        if len(self._waiting) - self._waiting_merged >= MERGE_EVERY:
            self._waiting = [merge(*group) for group in _groups(self._waiting, size_of, STEP_BYTES)]
            self._waiting_merged = len(self._waiting)
            self._waiting_bytes = sum(map(size_of, self._waiting))

    def put_result(self, result: Result, now: float) -> None:
        """Queue a utility call's answer, in chunks of CHUNK_BYTES of frames, the value in the last.

        Results do not wait for room in the window: they cannot be merged, and calls are bounded where they come in.
        """
        try:
            if sum(map(_frame_bytes, result.frames)) > MAX_RESULT_BYTES:
                raise MessageTooLarge(f"the result is larger than {MAX_RESULT_BYTES} bytes: ask for less")
            *chunks, last = list(_groups(result.frames, _frame_bytes, CHUNK_BYTES)) or [[]]
            for chunk in chunks:
                self._append_result(replace(result, last=False, value=None, frames=tuple(chunk)), now)
            self._append_result(replace(result, frames=tuple(last)), now)
        except ProtocolError as fault:
            logger.exception("the result of call %d cannot travel", result.call)
            failed = replace(result, error_code=fault.code, error=str(fault), value=None, frames=())
            self._append_result(failed, now)

    def _append_result(self, result: Result, now: float) -> None:
        self._outbox.append(encode(replace(result, number=self._outbox.last_number + 1)), now)

    def next_frames(self, now: float) -> Frames | None:
        """The next message to transmit, encoded when its turn comes; None: nothing, or no room in the window."""
        if self._outbox.peek() is None and self._waiting and not self._outbox.full:
            self._append_step(now)
        return self._outbox.peek()

    def advance(self) -> None:
        self._outbox.advance()

    def _append_step(self, now: float) -> None:
        group = next(_groups(self._waiting, size_of, STEP_BYTES))
        del self._waiting[: len(group)]
        self._waiting_merged = max(0, self._waiting_merged - len(group))
        self._waiting_bytes -= sum(map(size_of, group))
        output = merge(*group)
        try:
            frames = self._encode_step(output)
        except ProtocolError as error:  # too large, or a bug: these requests end with the reason, the others go on
            logger.exception("output of %d requests cannot travel", len(output.handles))
            frames = self._encode_step(finish_rows(output.handles.tolist(), FinishReason.ERROR, error.code, str(error)))
        self._outbox.append(frames, now)

    def _encode_step(self, output: StepTokens) -> Frames:
        return encode(Step(self._epoch, self._outbox.last_number + 1, output, self._load))


def _frame_bytes(frame: TensorFrame) -> int:
    return len(frame.buffer)


def _groups(parts: Iterable[Part], size: Callable[[Part], int], limit: int) -> Iterator[list[Part]]:
    """Neighbours whose sizes are at most `limit` together; a larger one stands alone."""
    group: list[Part] = []
    total = 0
    for part in parts:
        if group and total + size(part) > limit:
            yield group
            group, total = [], 0
        group.append(part)
        total += size(part)
    if group:
        yield group
