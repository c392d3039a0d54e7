"""The two ends of a numbered stream, joined by a wire that loses, doubles, delays and reorders whatever it likes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.delivery import REPEAT_SECONDS, REPORT_MESSAGES, Inbox, Outbox

WINDOW = 8


class Wire(RuleBasedStateMachine):
    """Everything that was appended arrives once and in order; the window holds; a quiet wire catches up soon."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.outbox = Outbox(WINDOW, 1 << 20)
        self.inbox = Inbox()
        self.appended = 0
        self.received: list[int] = []
        self.down: list[int] = []  # messages in flight
        self.up: list[tuple[int, bool]] = []  # reports in flight

    @precondition(lambda self: not self.outbox.full)
    @rule()
    def append(self) -> None:
        self.appended += 1
        assert self.outbox.last_number + 1 == self.appended
        self.outbox.append([struct.pack("I", self.appended)], self.now)

    @rule(count=st.integers(1, 9))
    def transmit(self, count: int) -> None:
        for _ in range(count):
            frames = self.outbox.peek()
            if frames is None:
                return
            self.outbox.advance()
            self.down.append(struct.unpack("I", frames[0])[0])

    @precondition(lambda self: self.down)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        """Any message in flight arrives: reordered; with `keep` it will arrive again."""
        index = data.draw(st.integers(0, len(self.down) - 1))
        self._arrive(self.down[index] if keep else self.down.pop(index))

    def _arrive(self, number: int) -> None:
        if self.inbox.accept(number, 4):
            self.received.append(number)
        if self.inbox.report_due:
            self.up.append(self.inbox.report())

    @rule()
    def heartbeat(self) -> None:
        self.up.append(self.inbox.report())

    @precondition(lambda self: self.up)
    @rule(data=st.data(), keep=st.booleans())
    def report_arrives(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.up) - 1))
        self.outbox.acknowledge(*(self.up[index] if keep else self.up.pop(index)), self.now)

    @rule()
    def connection_breaks(self) -> None:
        self.down.clear()
        self.up.clear()
        self.outbox.rewind(self.now)

    @rule()
    def lose_everything_in_flight(self) -> None:
        self.down.clear()
        self.up.clear()

    @rule(eighths=st.integers(0, 24))
    def time_passes(self, eighths: int) -> None:
        """Seconds that add up exactly: of others, one later can be less than REPEAT_SECONDS later by rounding."""
        self.now += eighths / 8

    @invariant()
    def in_order_exactly_once(self) -> None:
        assert self.received == list(range(1, len(self.received) + 1))
        assert len(self.outbox) <= WINDOW

    def teardown(self) -> None:
        """Three heartbeats over a quiet wire bring everything across, whatever happened before."""
        for _ in range(3):
            self.now += REPEAT_SECONDS
            self.outbox.acknowledge(*self.inbox.report(), self.now)
            self.transmit(WINDOW)
            while self.down:
                self._arrive(self.down.pop(0))
        self.outbox.acknowledge(*self.inbox.report(), self.now)
        assert len(self.received) == self.appended
        assert len(self.outbox) == 0 and self.outbox.bytes == 0 and self.outbox.peek() is None


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=60, stateful_step_count=40)


def filled(count: int) -> Outbox:
    outbox = Outbox(100, 1000)
    for _ in range(count):
        outbox.append([b"x" * 100], 0.0)
        outbox.advance()
    return outbox


def test_window_is_bounded_in_messages_and_bytes() -> None:
    assert not filled(9).full
    assert filled(10).full
    outbox = Outbox(3, 1 << 30)
    for _ in range(3):
        assert not outbox.full
        outbox.append([b""], 0.0)
    assert outbox.full


def test_nothing_is_repeated_while_the_peer_is_silent_or_makes_progress() -> None:
    outbox = filled(5)
    assert outbox.peek() is None
    assert outbox.acknowledge(2, False, 10.0)  # late, but progress
    assert outbox.peek() is None
    assert not outbox.acknowledge(2, False, 10.5)
    assert outbox.peek() is None
    assert not outbox.acknowledge(2, False, 11.1)
    assert outbox.peek() is not None  # a whole second without progress, and the peer lives


def test_gap_report_repeats_at_once_and_is_made_once_a_hole() -> None:
    inbox, outbox = Inbox(), filled(9)
    for number in (1, 2, 4, 5, 6):
        inbox.accept(number, 1)
    assert inbox.report_due
    assert inbox.report() == (2, True)
    inbox.accept(7, 1)
    assert not inbox.report_due
    outbox.acknowledge(2, True, 0.1)
    assert outbox.peek() is not None and outbox.last_number == 9
    for number in (3, 5):
        inbox.accept(number, 1)
    assert inbox.report() == (3, True)  # another hole


def test_old_reports_change_nothing() -> None:
    outbox = filled(5)
    outbox.acknowledge(4, False, 0.1)
    outbox.acknowledge(2, False, 0.2)
    assert len(outbox) == 1 and outbox.bytes == 100


def test_peer_cannot_acknowledge_what_was_never_sent() -> None:
    with pytest.raises(ProtocolError, match="message 6"):
        filled(5).acknowledge(6, False, 0.1)


def test_many_small_or_few_large_messages_are_reported_at_once() -> None:
    inbox = Inbox()
    for number in range(1, REPORT_MESSAGES):
        inbox.accept(number, 1)
        assert not inbox.report_due
    inbox.accept(REPORT_MESSAGES, 1)
    assert inbox.report_due and inbox.report() == (REPORT_MESSAGES, False)
    inbox.accept(REPORT_MESSAGES + 1, 2 << 20)
    assert inbox.report_due


def numbered(count: int, sent: int) -> Outbox:
    """Messages 1 to `count`, the first `sent` of them transmitted, all at time 0."""
    outbox = Outbox(100, 1 << 20)
    for number in range(1, count + 1):
        outbox.append([struct.pack("I", number)], 0.0)
    for _ in range(sent):
        outbox.advance()
    return outbox


def next_of(outbox: Outbox) -> int | None:
    frames = outbox.peek()
    return None if frames is None else int(struct.unpack("I", frames[0])[0])


@pytest.mark.parametrize("again", [0, 1, 2, 3, 4])
def test_word_that_comes_late_while_messages_go_out_again_moves_on_behind_what_it_names(again: int) -> None:
    """The connection broke behind five messages; what says that three had arrived comes when `again` are out anew."""
    outbox = numbered(6, sent=5)
    outbox.rewind(0.5)
    for _ in range(again):
        outbox.advance()
    assert outbox.acknowledge(3, False, 0.6)
    assert next_of(outbox) == max(4, again + 1) and len(outbox) == 3


def test_time_without_progress_counts_from_the_first_message_that_waits() -> None:
    outbox = numbered(1, sent=1)
    outbox.acknowledge(1, False, 0.1)
    outbox.append([struct.pack("I", 2)], 50.0)
    outbox.advance()
    outbox.acknowledge(1, False, 50.5)
    assert next_of(outbox) is None
    outbox.acknowledge(1, False, 51.0)
    assert next_of(outbox) == 2


def test_a_hole_before_the_first_message_is_reported_and_once_only() -> None:
    inbox = Inbox()
    assert not inbox.accept(2, 1) and inbox.report_due
    assert [inbox.report(), inbox.report()] == [(0, True), (0, False)]


def test_a_hole_that_is_filled_before_the_report_is_none() -> None:
    inbox = Inbox()
    for number in (1, 3, 2):
        inbox.accept(number, 1)
    assert not inbox.report_due and inbox.report() == (2, False)


def test_a_new_connection_begins_the_wait_anew() -> None:
    outbox = numbered(2, sent=2)
    outbox.rewind(0.875)
    for _ in range(2):
        outbox.advance()
    outbox.acknowledge(0, False, 1.5)
    assert next_of(outbox) is None
    outbox.acknowledge(0, False, 1.875)
    assert next_of(outbox) == 1
