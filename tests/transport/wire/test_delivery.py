"""The two ends of a numbered stream, joined by wires that lose, double, delay, reorder and crawl."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.codec import MAX_MESSAGE_BYTES, Frames, decode, encode, total_bytes
from wavecore.transport.wire.delivery import (
    PIECE_BYTES,
    REPORT_BYTES,
    REPORT_MESSAGES,
    WINDOW_BYTES,
    WINDOW_MESSAGES,
    Inbox,
    Outbox,
)
from wavecore.transport.wire.messages import Abort, Add, Mark, Piece, TensorFrame
from wavecore.transport.wire.tensors import from_numpy

EPOCH, CLIENT = b"epoch-of-16bytes", b"a client's name!"
WINDOW = 8


def small(handle: int) -> Frames:
    return encode(Abort(EPOCH, CLIENT, 0, np.array([handle], np.uint32)))


def large(handle: int, size: int) -> Frames:
    prompt = from_numpy(np.full(size // 4, handle, np.int32))
    return encode(Add(EPOCH, CLIENT, 0, handle, prompt, {}))


class Receiver:
    """An Inbox and what came out of it: handles, in order."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.received: list[int] = []

    def take(self, frames: Frames) -> None:
        message = self.inbox.take(decode(frames), total_bytes(frames))
        if message is None:
            return
        if isinstance(message, Add):
            assert set(np.frombuffer(message.prompt.buffer, np.int32).tolist()) == {message.handle}
            self.received.append(message.handle)
        else:
            assert isinstance(message, Abort)
            self.received += message.handles.tolist()


class Wire(RuleBasedStateMachine):
    """What was appended arrives once, in order within its lane; the window holds; a quiet wire catches up soon."""

    @initialize()
    def start(self) -> None:
        self.outbox = Outbox(EPOCH, CLIENT, (WINDOW, 4 * PIECE_BYTES))
        self.receiver = Receiver()
        self.handles = count()
        self.appended: tuple[list[int], list[int]] = ([], [])
        self.down: list[Frames] = []  # in flight
        self.up: list[tuple[int, bool, int]] = []  # reports in flight

    @rule(lane=st.integers(0, 1), quarters=st.sampled_from([0, 0, 3, 5, 9]))
    def append(self, lane: int, quarters: int) -> None:
        """A small message, or a large one of so many quarters of a piece."""
        handle = next(self.handles)
        self.appended[lane].append(handle)
        size = quarters * PIECE_BYTES // 4
        self.outbox.append(large(handle, size) if size else small(handle), lane, handle)

    @rule(messages=st.integers(1, 9))
    def transmit(self, messages: int) -> None:
        for _ in range(messages):
            frames = self.outbox.peek()
            if frames is None:
                return
            self.outbox.advance()
            self.down.append(frames)

    @precondition(lambda self: self.down)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        """Any message in flight arrives: reordered; with `keep` it will arrive again."""
        index = data.draw(st.integers(0, len(self.down) - 1))
        self._arrive(self.down[index] if keep else self.down.pop(index))

    def _arrive(self, frames: Frames) -> None:
        self.receiver.take(frames)
        if self.receiver.inbox.report_due:
            self.up.append(self.receiver.inbox.report())

    @rule()
    def heartbeat(self) -> None:
        self.up.append(self.receiver.inbox.report())

    @precondition(lambda self: self.up)
    @rule(data=st.data(), keep=st.booleans())
    def report_arrives(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.up) - 1))
        self.outbox.acknowledge(*(self.up[index] if keep else self.up.pop(index)))

    @rule(seen_by_sender=st.booleans())
    def connection_breaks(self, seen_by_sender: bool) -> None:
        self.down.clear()
        self.up.clear()
        if seen_by_sender:
            self.outbox.probe()

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """What was withdrawn and has not arrived may never come."""
        if self.appended[1]:
            handle = data.draw(st.sampled_from(self.appended[1]))
            self.outbox.withdraw({handle})
            if handle not in self.receiver.received:
                self.appended[1].remove(handle)
                self.withdrawn = {*getattr(self, "withdrawn", set()), handle}

    @invariant()
    def in_order_exactly_once(self) -> None:
        gone = getattr(self, "withdrawn", set())
        for sent in self.appended:
            got = [handle for handle in self.receiver.received if handle in sent]
            assert got == sent[: len(got)]
        received = self.receiver.received
        assert len(received) == len(set(received))
        assert set(received) <= {*self.appended[0], *self.appended[1], *gone}
        assert len(self.outbox._kept) <= WINDOW

    def teardown(self) -> None:
        """A quiet wire and a few heartbeats bring everything across, whatever happened before."""
        if not hasattr(self, "outbox"):
            return
        for _ in range(4 + 2 * len(self.outbox)):
            self.outbox.acknowledge(*self.receiver.inbox.report())
            self.transmit(2 * WINDOW)
            while self.down:
                self._arrive(self.down.pop(0))
            while self.up:
                self.outbox.acknowledge(*self.up.pop(0))
        assert {*self.appended[0], *self.appended[1]} <= set(self.receiver.received)
        assert len(self.outbox) == 0 and self.outbox.bytes == 0 and not self.outbox.has_unsent


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class SlowLink:
    """Both ends over a link of `rate` bytes a second and `latency` seconds, with a clock of its own.

    What is transmitted queues in the buffers of the sockets, without a bound, and leaves in order. The peer says every
    second how far it got, and at once when it has something to say. `loss` is the chance that a message of either
    direction vanishes.
    """

    def __init__(self, rate: float, latency: float, loss: float = 0.0, seed: int = 0) -> None:
        self.now, self.busy_until = 0.0, 0.0
        self.rate, self.latency, self.loss = rate, latency, loss
        self.random = random.Random(seed)
        self.outbox = Outbox(EPOCH, CLIENT)
        self.receiver = Receiver()
        self.sent_bytes = 0
        self.arrived_at: dict[int, float] = {}
        self.connection = 0
        self.knows_break = True  # the sender hears of a break
        self.deaf_until = 0.0  # the peer has no room for messages, and drops them
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.at(0.0, self._heartbeat)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        while not until():
            self.now, _, action = heapq.heappop(self._events)
            assert self.now < limit, f"not there after {limit} s"
            action()
            self._transmit()

    def _transmit(self) -> None:
        while (frames := self.outbox.peek()) is not None:
            self.outbox.advance()
            size = total_bytes(frames)
            self.sent_bytes += size
            self.busy_until = max(self.now, self.busy_until) + size / self.rate
            if self.random.random() >= self.loss:
                self.at(self.busy_until + self.latency, partial(self._arrive, frames, self.connection))

    def _arrive(self, frames: Frames, connection: int) -> None:
        if connection != self.connection or (self.now < self.deaf_until and not isinstance(decode(frames), Mark)):
            return
        self.receiver.take(frames)
        for handle in self.receiver.received[len(self.arrived_at) :]:
            self.arrived_at[handle] = self.now
        if self.receiver.inbox.report_due:
            self._report()

    def _heartbeat(self) -> None:
        self._report()
        self.at(self.now + 1.0, self._heartbeat)

    def _report(self) -> None:
        report = self.receiver.inbox.report()
        if self.random.random() >= self.loss:
            self.at(self.now + self.latency, lambda: self.outbox.acknowledge(*report) and None)

    def break_connection(self) -> None:
        """All that is under way is lost, and the buffers of the sockets are empty."""
        self.connection += 1
        self.busy_until = self.now
        if self.knows_break:
            self.outbox.probe()


@pytest.mark.parametrize(("rate", "latency"), [(5e6, 0.001), (5e6, 0.2), (200e3, 0.05), (1e9, 0.0001)])
def test_nothing_is_sent_twice_over_a_slow_link(rate: float, latency: float) -> None:
    link = SlowLink(rate, latency)
    size = int(min(40e6, 60 * rate))
    later = size / rate / 4
    link.at(0.0, lambda: link.outbox.append(large(1, size), lane=1))
    link.at(later, lambda: link.outbox.append(small(2)))
    link.run(lambda: len(link.arrived_at) == 2, limit=100 + size / rate)
    assert link.sent_bytes <= 1.05 * size
    # It waits for what lies in the sockets' buffers, and for no more.
    assert link.arrived_at[2] - later <= max(0.1, (WINDOW_BYTES + PIECE_BYTES) / rate) + 2 * latency
    assert link.arrived_at[1] >= size / rate


@pytest.mark.parametrize("rate", [5e6, 100e6, 1.25e9])
def test_a_link_never_runs_dry(rate: float) -> None:
    link = SlowLink(rate, 0.0002)
    link.outbox.append(large(1, 50_000_000), lane=1)
    link.run(lambda: 1 in link.arrived_at, limit=100.0)
    assert link.arrived_at[1] < 1.05 * 50_000_000 / rate + 0.001


def test_small_messages_and_a_large_one_share_a_full_link() -> None:
    link = SlowLink(5e6, 0.01)
    link.outbox.append(large(0, 20_000_000), lane=1)
    for handle in range(1, 101):
        link.outbox.append(large(handle, 200_000))
    link.run(lambda: len(link.arrived_at) == 101, limit=60.0)
    assert max(link.arrived_at[handle] for handle in range(1, 101)) < 9.0  # 20 MB at half the link's rate
    assert link.arrived_at[0] < 8.5 + 2 * WINDOW_BYTES / 5e6


@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_once_over_a_link_that_loses(seed: int) -> None:
    link = SlowLink(5e6, 0.02, loss=0.05, seed=seed)
    handles = count()
    for _ in range(20):
        link.outbox.append(large(next(handles), 700_000), lane=1)
        for _ in range(10):
            link.outbox.append(small(next(handles)))
    link.run(lambda: len(link.arrived_at) == 220, limit=600.0)
    assert sorted(link.receiver.received) == list(range(220))


@pytest.mark.parametrize("told", [True, False], ids=["told", "silent"])
@pytest.mark.parametrize("every", [0.7, 2.3])
def test_a_broken_connection_costs_what_was_under_way(told: bool, every: float) -> None:
    """Also where nobody tells of the break: the peer's next word does."""
    link = SlowLink(5e6, 0.01)
    link.knows_break = told
    breaks = 0

    def break_again() -> None:
        nonlocal breaks
        breaks += 1
        link.break_connection()
        link.at(link.now + every, break_again)

    link.at(0.5, break_again)
    link.outbox.append(large(1, 20_000_000), lane=1)
    for handle in range(2, 50):
        link.outbox.append(small(handle))
    link.run(lambda: len(link.arrived_at) == 49, limit=100.0)
    assert sorted(link.receiver.received) == list(range(1, 50))
    assert link.sent_bytes <= 20_100_000 + breaks * (2 * WINDOW_BYTES + PIECE_BYTES)


def test_a_peer_without_room_is_sent_a_window_each_second_and_no_more() -> None:
    link = SlowLink(1e9, 0.0001)
    link.deaf_until = 10.5
    link.outbox.append(large(1, 20_000_000), lane=1)
    link.run(lambda: 1 in link.arrived_at, limit=15.0)
    assert link.sent_bytes <= 20_100_000 + 11 * (WINDOW_BYTES + PIECE_BYTES)


def test_a_withdrawn_message_stops_between_two_pieces() -> None:
    link = SlowLink(5e6, 0.01)
    link.outbox.append(large(1, 20_000_000), lane=1, handle=1)
    link.outbox.append(large(2, 20_000_000), lane=1, handle=2)
    link.outbox.append(large(3, 1_000_000), lane=1, handle=3)
    link.at(1.0, lambda: link.outbox.withdraw({1, 2}))
    link.run(lambda: 3 in link.arrived_at, limit=10.0)
    assert link.receiver.received == [3]
    assert link.sent_bytes < 5e6 + WINDOW_BYTES + 1.1e6
    link.run(lambda: len(link.outbox) == 0, limit=10.0)
    assert link.outbox.bytes == 0


def filled(messages: int) -> Outbox:
    outbox = Outbox(EPOCH, CLIENT)
    for handle in range(messages):
        outbox.append(small(handle))
        assert outbox.peek() is not None
        outbox.advance()
    return outbox


def next_mark(outbox: Outbox) -> Mark:
    frames = outbox.peek()
    assert frames is not None
    mark = decode(frames)
    assert isinstance(mark, Mark)
    outbox.advance()
    return mark


def test_window_is_bounded_in_messages_and_bytes() -> None:
    outbox = filled(WINDOW_MESSAGES)
    outbox.append(small(1))
    assert outbox.full and outbox.peek() is None and outbox.has_unsent
    assert outbox.acknowledge(1, False, 0)
    assert outbox.peek() is not None

    outbox = Outbox(EPOCH, CLIENT)
    outbox.append(large(1, 4 * WINDOW_BYTES))
    in_flight = 0
    while (frames := outbox.peek()) is not None:
        outbox.advance()
        in_flight += total_bytes(frames)
    assert WINDOW_BYTES <= in_flight < WINDOW_BYTES + 2 * PIECE_BYTES


def test_a_window_that_is_just_full_takes_nothing_more() -> None:
    size = total_bytes(small(1))
    outbox = Outbox(EPOCH, CLIENT, (WINDOW_MESSAGES, 3 * size))
    for handle in range(4):
        outbox.append(small(handle), lane=handle % 2)
    assert len(outbox) == 4
    for _ in range(3):
        assert outbox.peek() is not None
        outbox.advance()
    assert outbox.full and outbox.peek() is None and len(outbox) == 4


def of_size(size: int) -> Frames:
    prompt = from_numpy(np.ones(size // 4 - 100, np.int32))
    adds = (encode(Add(EPOCH, CLIENT, 0, 1, prompt, {"pad": "x" * count})) for count in range(400))
    return next(frames for frames in adds if total_bytes(frames) == size)


def test_lanes_take_turns_by_bytes_while_both_have_something() -> None:
    outbox = Outbox(EPOCH, CLIENT, (100, 100 * PIECE_BYTES))

    def leave(count: int) -> list[type]:
        kinds = []
        for _ in range(count):
            kinds.append(type(decode(outbox.peek() or [])))
            outbox.advance()
        return kinds

    for _ in range(2):
        outbox.append(of_size(PIECE_BYTES))
    assert leave(2) == [Add, Add]
    outbox.append(large(1, 10 * PIECE_BYTES), lane=1)  # nobody waited before: it has no turn in advance
    for _ in range(4):
        outbox.append(of_size(PIECE_BYTES))
    assert leave(6) == [Add, Piece, Add, Piece, Add, Piece]


def test_a_message_of_the_size_of_a_piece_leaves_whole() -> None:
    for size, kind in ((PIECE_BYTES, Add), (PIECE_BYTES + 1, Piece)):
        outbox = Outbox(EPOCH, CLIENT)
        outbox.append(of_size(size))
        first = outbox.peek()
        assert first is not None and isinstance(decode(first), kind)


def test_what_is_withdrawn_waits_in_the_lane_of_the_large() -> None:
    """In the other one the abort follows it, and ends it at the engine."""
    outbox = Outbox(EPOCH, CLIENT)
    outbox.append(small(5), lane=0, handle=5)
    outbox.withdraw({5})
    first = outbox.peek()
    assert first is not None and isinstance(decode(first), Abort) and outbox.bytes == total_bytes(small(5))


def test_a_silent_peer_gets_nothing_and_one_that_got_no_further_gets_a_mark() -> None:
    outbox = filled(5)
    assert outbox.peek() is None
    assert outbox.acknowledge(2, False, 0)  # late, but progress
    assert outbox.peek() is None
    assert not outbox.acknowledge(2, False, 0)
    assert next_mark(outbox).sent == 5
    assert outbox.peek() is None


def test_a_hole_is_filled_once_however_often_it_is_reported() -> None:
    inbox, outbox = Inbox(), filled(9)
    for number in (1, 2, 4, 5, 6):
        inbox.accept(number, 1)
    assert inbox.report_due
    assert inbox.report() == (2, True, 0)
    inbox.accept(7, 1)
    assert not inbox.report_due
    outbox.acknowledge(2, True, 0)
    mark = next_mark(outbox)
    assert (mark.sent, mark.attempt) == (2, 1)
    assert outbox.peek() is not None and outbox.sent == 9
    outbox.advance()
    outbox.acknowledge(2, True, 0)  # the same hole
    assert next_mark(outbox).attempt == 1  # no new attempt: only the question what is missing
    inbox.take(mark, 0)
    assert inbox.report() == (2, False, 1)
    for number in (3, 5):
        inbox.accept(number, 1)
    assert inbox.report() == (3, True, 1)  # another hole


def mark(sent: int, attempt: int) -> Mark:
    return Mark(EPOCH, CLIENT, sent, attempt)


def test_what_a_mark_says_of_a_hole_that_is_not_reported_yet() -> None:
    for found, gap in ((mark(1, 0), True), (mark(1, 1), False)):  # a question; an attempt, which fills it
        inbox = Inbox()
        for number in (1, 3):
            inbox.accept(number, 1)
        inbox.take(found, 0)
        assert inbox.report() == (1, gap, found.attempt)


def test_neither_a_question_nor_an_old_message_reports_a_hole_again() -> None:
    inbox = Inbox()
    for number in (1, 1):
        inbox.accept(number, 1)
    assert inbox.report() == (1, False, 0)
    inbox.accept(3, 1)
    assert inbox.report() == (1, True, 0)
    inbox.take(mark(1, 0), 0)
    for number in (4, 5):
        inbox.accept(number, 1)
        assert inbox.report() == (1, False, 0)


def test_the_last_message_is_missed_by_a_mark_alone() -> None:
    inbox, outbox = Inbox(), filled(3)
    inbox.accept(1, 1)
    outbox.acknowledge(*inbox.report())
    outbox.acknowledge(*inbox.report())
    mark = next_mark(outbox)
    inbox.take(mark, 0)
    assert inbox.report_due
    outbox.acknowledge(*inbox.report())
    assert next_mark(outbox).attempt == 1
    assert outbox.peek() is not None


def test_a_question_is_asked_of_what_went_out_and_takes_no_attempt_back() -> None:
    outbox = Outbox(EPOCH, CLIENT)
    outbox.probe()
    assert outbox.peek() is None
    outbox = filled(3)
    outbox.acknowledge(1, True, 0)
    outbox.probe()  # before the attempt's own mark has left
    mark = next_mark(outbox)
    assert (mark.sent, mark.attempt) == (1, 1)


def test_old_reports_change_nothing() -> None:
    outbox = filled(5)
    size = outbox.bytes // 5
    outbox.acknowledge(4, False, 0)
    outbox.acknowledge(2, False, 0)
    assert len(outbox) == 1 and outbox.bytes == size


def test_peer_cannot_acknowledge_what_was_never_sent() -> None:
    with pytest.raises(ProtocolError, match="message 6"):
        filled(5).acknowledge(6, False, 0)


def test_many_small_or_few_large_messages_are_reported_at_once() -> None:
    inbox = Inbox()
    for number in range(1, REPORT_MESSAGES):
        inbox.accept(number, 1)
        assert not inbox.report_due
    inbox.accept(REPORT_MESSAGES, 1)
    assert inbox.report_due and inbox.report() == (REPORT_MESSAGES, False, 0)
    inbox.accept(REPORT_MESSAGES + 1, REPORT_BYTES - 1)
    assert not inbox.report_due
    inbox.accept(REPORT_MESSAGES + 2, 1)
    assert inbox.report_due and inbox.report() == (REPORT_MESSAGES + 2, False, 0)
    inbox.accept(REPORT_MESSAGES + 3, 1)
    assert not inbox.report_due


class Pieces:
    """An Inbox that is given one piece after the other, each in its turn."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    def add(self, sizes: tuple[int, ...], data: bytes) -> list[int] | None:
        """Returns the handles of the message that it completes."""
        frame = TensorFrame("uint8", (len(data),), data)
        piece = Piece(EPOCH, CLIENT, self.inbox.seen + 1, 0, np.array(sizes, np.uint32), frame)
        whole = self.inbox.take(piece, len(data))
        assert whole is None or isinstance(whole, Abort)
        return None if whole is None else whole.handles.tolist()


ABORT = bytes(small(9)[0])
SIZE = len(ABORT)


def test_pieces_make_whole_frames_again_and_empty_ones() -> None:
    pieces = Pieces()
    assert pieces.add((SIZE, 4), ABORT[:-1]) is None
    with pytest.raises(ProtocolError, match="where 1 are missing"):
        pieces.add((), ABORT[-1:] + b"two ")
    assert pieces.add((0, SIZE, 0), ABORT[:5]) is None
    assert pieces.add((), ABORT[5:7]) is None
    with pytest.raises(ProtocolError, match="not a message"):  # the first frame is empty
        pieces.add((), ABORT[7:])
    assert pieces.add((SIZE,), ABORT[:5]) is None
    assert pieces.add((), ABORT[5:]) == [9]


@pytest.mark.parametrize("second", [((), b"abcd"), ((2,), b"abc")])
def test_a_piece_that_does_not_fit_is_refused(second: tuple[tuple[int, ...], bytes]) -> None:
    pieces = Pieces()
    assert pieces.add((6,), b"abc") is None
    with pytest.raises(ProtocolError, match="a piece of"):
        pieces.add(*second)


def test_a_piece_of_nothing_is_refused_and_a_new_message_forgets_the_old() -> None:
    pieces = Pieces()
    with pytest.raises(ProtocolError, match="where 0 are missing"):
        pieces.add((), b"abc")
    assert pieces.add((100,), b"abc") is None
    assert pieces.add((), b"") is None  # withdrawn
    with pytest.raises(ProtocolError, match="where 0 are missing"):
        pieces.add((), b"abc")
    assert pieces.add((100,), b"abc") is None
    assert pieces.add((SIZE,), ABORT) == [9]
    with pytest.raises(ProtocolError, match="at most"):
        pieces.add((1 << 27, 1 << 27), b"abc")  # larger than any message


def test_a_message_of_another_session_in_pieces_is_refused() -> None:
    other = bytes(encode(Abort(EPOCH, b"another client's", 0, np.array([9], np.uint32)))[0])
    with pytest.raises(ProtocolError, match="another session"):
        Pieces().add((len(other),), other)


def test_what_a_peer_claims_costs_nothing_and_tiny_pieces_only_their_bytes() -> None:
    peers = [Pieces() for _ in range(20)]
    before = psutil.Process().memory_info().rss
    for peer in peers:
        peer.add((MAX_MESSAGE_BYTES,), b"x")
    for _ in range(100_000):
        peers[0].add((), b"x")
    assert psutil.Process().memory_info().rss - before < 50 << 20  # a page or two each
