"""Slow, stopped and silent peers: bounded memory, nobody else is hurt, and whatever is given up is given up by name."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.support.waiting import until
from tests.transport.io import fake_engine

from wavecore.transport.errors import Overloaded
from wavecore.transport.io import connection, input_pump
from wavecore.transport.io.client_stream import ClientLimits
from wavecore.transport.io.connection import Disconnected
from wavecore.transport.io.output_pump import MAX_CALLS, OutputPump
from wavecore.transport.wire.codec import encode
from wavecore.transport.wire.messages import Add, Dead, FinishReason, Hello, Ping, Ready, Step, UnknownClient


class Pause:
    """Stands in a client's IO thread until it is lifted: nothing is read, nothing is acknowledged."""

    def __init__(self) -> None:
        self.lifted = threading.Event()

    def __call__(self, _: Step) -> None:
        assert self.lifted.wait(60)


@pytest.fixture
def pause() -> Iterator[Pause]:
    pause = Pause()
    yield pause
    pause.lifted.set()


@pytest.mark.parametrize("messages", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_paused_reader_of_large_messages(make_engine: Any, make_client: Any, messages: int) -> None:
    """Every tensor is intact and every token is there once the reader goes on."""
    pause = Pause()
    engine = make_engine(limits=ClientLimits(held_bytes=2 << 30))
    client = make_client(on_step=pause)
    client.connect(engine.addresses)
    large = client.add(count=messages, frame=70_000)
    mixed = [client.add(count=messages // 10, frame=size) for size in (65_535, 65_536, 65_537, 10)]
    until(lambda: not engine.open and engine.steps >= messages, "all steps")
    pause.lifted.set()
    client.wait_ends(large, *mixed)
    assert client.received[large] == messages
    assert client.frames == messages + 4 * (messages // 10)


def test_slow_client_is_merged_and_a_fast_one_unharmed(make_engine: Any, make_client: Any, pause: Pause) -> None:
    limits = ClientLimits(messages=16)
    engine = make_engine(limits=limits)
    slow, fast = make_client(on_step=pause), make_client()
    slow.connect(engine.addresses)
    late = [slow.add(count=5000) for _ in range(4)]
    fast.connect(engine.addresses)
    fast.wait_ends(*[fast.add(count=300) for _ in range(4)])
    until(lambda: not engine.open, "the end of the slow client's requests")
    state = engine.output._streams[slow.pump.client_id(0)]
    assert len(state._outbox) <= limits.messages
    assert len(state._waiting) <= 2 * 64
    name = slow.pump.client_id(0)
    assert engine.output.held_bytes(name) >= 4 * 4000 * 4 and engine.output.held_bytes(bytes(16)) == 0
    pause.lifted.set()
    slow.wait_ends(*late)
    until(lambda: engine.output.held_bytes(name) == 0, "the last acknowledgement")
    assert [slow.received[handle] for handle in late] == [5000] * 4
    assert slow.steps < 500


@pytest.mark.usefixtures("quick_clocks")
def test_client_that_lives_but_reads_nothing_is_dropped(make_engine: Any, raw_socket: Any) -> None:
    """It pings, so it is not silent; it acknowledges nothing while output waits, so its requests end."""
    engine = make_engine(limits=ClientLimits(messages=4, stalled_ticks=1))
    dealer = raw_socket(zmq.DEALER, engine.addresses[1], b"c" * 16)
    push = raw_socket(zmq.PUSH, engine.addresses[0])
    dealer.send_multipart(encode(Hello()))
    dealer.recv_multipart()
    prompt = fake_engine.from_numpy(fake_engine.payload(0, 0, 3).astype("<i4"))
    push.send_multipart(encode(Add(engine.epoch, b"c" * 16, 1, 1, prompt, {"count": 1 << 30})))

    def pinging() -> bool:
        dealer.send_multipart(encode(Ping(engine.epoch, 0)))
        return b"c" * 16 in engine.gone

    until(pinging, "the drop")
    assert not engine.open
    pinging()  # the last one may have come just before the drop
    assert encode(UnknownClient(engine.epoch)) in iter(dealer.recv_multipart, None)


@pytest.mark.usefixtures("quick_clocks")
def test_client_with_too_much_waiting_output_is_dropped(make_engine: Any, make_client: Any, pause: Pause) -> None:
    engine = make_engine(limits=ClientLimits(messages=4, held_bytes=1 << 20))
    client = make_client(on_step=pause)
    client.connect(engine.addresses)
    client.add(count=1 << 30, frame=70_000)
    first = client.pump.client_id(0)
    until(lambda: first in engine.gone, "the drop")
    pause.lifted.set()
    client.wait_for(lambda: client.saw(Ready, 2), "a new session")
    client.on_step = None
    client.wait_ends(client.add())


@pytest.mark.usefixtures("quick_clocks")
def test_silent_client_is_dropped_and_comes_back_as_a_new_one(make_engine: Any, make_client: Any, pause: Pause) -> None:
    engine = make_engine(pace=0.01, limits=ClientLimits(silent_ticks=2))
    client = make_client(on_step=pause)
    client.connect(engine.addresses)
    first = client.pump.client_id(0)
    lost = client.add(count=1 << 30)
    until(lambda: first in engine.gone, "the drop")
    assert not engine.open
    pause.lifted.set()
    client.wait_for(lambda: client.saw(Ready, 2), "a new session")
    assert client.saw(Disconnected)
    assert client.pump.client_id(0) != first
    assert lost not in client.ends
    client.wait_ends(client.add(count=3))


@pytest.fixture
def client_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts fake_client.py and waits until it gets tokens."""
    started: list[subprocess.Popen[bytes]] = []

    def start(addresses: tuple[str, str], requests: int, count: int) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("fake_client.py"))
        process = subprocess.Popen(
            [sys.executable, script, *addresses, str(requests), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        return process

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        with process:  # closes its input, which ends it
            assert process.stdin is not None


@pytest.mark.usefixtures("quick_clocks")
def test_stopped_client_costs_bounded_memory(make_engine: Any, make_client: Any, client_process: Any) -> None:
    """A SIGSTOPped client with 50 endless requests, until it is dropped."""
    engine = make_engine(limits=ClientLimits(silent_ticks=3))
    process = client_process(engine.addresses, 50, 1 << 30)
    process.send_signal(signal.SIGSTOP)
    before = psutil.Process().memory_info().rss
    fast = make_client()
    fast.connect(engine.addresses)
    until(lambda: bool(engine.gone), "the drop")
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert not engine.open
    fast.wait_ends(fast.add(count=10))


def test_stopped_client_goes_on_where_it_was(make_engine: Any, client_process: Any) -> None:
    """SIGSTOP for less than the silence that drops it: the engine goes on, and not a token is lost."""
    engine = make_engine(pace=0.001)
    process = client_process(engine.addresses, 20, 700)
    process.send_signal(signal.SIGSTOP)
    until(lambda: not engine.open, "the end of its requests")
    assert not engine.gone  # once it has all, it leaves by itself
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == b"ended 0\n"


@pytest.mark.usefixtures("quick_clocks")
def test_killed_client_is_dropped(make_engine: Any, client_process: Any) -> None:
    engine = make_engine(pace=0.01, limits=ClientLimits(absent_ticks=1))
    process = client_process(engine.addresses, 3, 1 << 30)
    process.kill()
    until(lambda: bool(engine.gone), "the drop")
    assert not engine.open and not engine.output._streams


def test_stopped_engine_costs_a_client_bounded_memory(
    make_process: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backpressure up: the client is told at once; an abort always passes; nothing that was taken is lost."""
    monkeypatch.setattr(connection, "MAX_UNACKNOWLEDGED", 100)
    engine, client = make_process(), make_client()
    client.connect(engine.addresses)
    engine.signal(signal.SIGSTOP)
    taken = [client.add(count=2) for _ in range(101)][:100]
    assert "acknowledgement" in str(client.wait_refusal(Overloaded))
    client.abort(taken[0])
    engine.signal(signal.SIGCONT)
    client.wait_ends(*taken)
    client.wait_ends(client.add())


def test_output_for_a_client_that_is_gone_ends_its_requests(make_engine: Any) -> None:
    engine = make_engine()
    engine.output.put({b"nobody": fake_engine.finish_rows([1], FinishReason.STOP)})
    until(lambda: engine.gone == [b"nobody"], "the news")


def test_too_many_clients_are_turned_away(make_engine: Any, make_client: Any) -> None:
    engine = make_engine(limits=ClientLimits(clients=1))
    first, second = make_client(), make_client()
    first.connect(engine.addresses)
    second.pump.connect(0, *engine.addresses)
    second.wait_for(lambda: second.saw(Dead), "the refusal")
    assert second.events[0].code == "overloaded"
    assert not second.saw(Ready)
    first.wait_ends(first.add())
    assert len(engine.output._streams) == 1


def test_flood_of_calls_hurts_nobody(make_engine: Any, make_client: Any) -> None:
    """Every call is answered once, with its value or as overloaded; another client's request goes through meanwhile."""
    engine = make_engine(limits=ClientLimits(calls=100))
    flooding, other = make_client(), make_client()
    flooding.connect(engine.addresses)
    other.connect(engine.addresses)
    for call in range(8000):
        flooding.call(call, "echo", value=call)
        if call == 4000:
            other.wait_ends(other.add(count=20))
    flooding.wait_for(lambda: len(flooding.results) == 8000, "8000 answers")
    for call, result in flooding.results.items():
        assert result.value == {"value": call} or result.error_code == "overloaded"


@pytest.mark.usefixtures("quick_clocks")
def test_main_loop_that_lags_is_not_buried(make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts can be neither refused nor merged: over the bound they are not received, and so sent again."""
    monkeypatch.setattr(input_pump, "MAX_QUEUED", 5)
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    client.call(1, "hold")
    for handle in range(50):
        client.abort(handle)
    until(lambda: engine.queue.qsize() >= 5, "a full queue")
    assert engine.queue.qsize() == 5
    engine.admission.set()
    until(lambda: engine.aborted == list(range(50)), "all aborts")


def test_answers_wait_for_an_output_thread_that_lags(make_engine: Any) -> None:
    """Whoever makes them faster than they leave holds no more of them than there is room for."""
    engine, lifted = make_engine(), threading.Event()
    engine.output._call_soon(lambda: lifted.wait(60))

    def flood() -> None:
        for number in range(2000):
            engine.output.put_result(b"nobody", number)
            engine.output.report_received(b"nobody", number, False, 0)

    flooding = threading.Thread(target=flood)
    flooding.start()
    until(lambda: len(engine.output._calls) >= MAX_CALLS, "a full list")
    assert len(engine.output._calls) == MAX_CALLS
    lifted.set()
    flooding.join(60)
    assert not flooding.is_alive()


def test_output_for_a_client_that_left_does_not_hold_up_the_end(
    make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputPump, "flush_seconds", 3600.0)
    engine, client = make_engine(pace=0.001), make_client()
    client.connect(engine.addresses)
    handle = client.add(count=1 << 30)
    client.wait_for(lambda: client.received.get(handle, 0) > 0, "a token")
    client.pump.close()
    engine.stop()


def test_last_output_reaches_a_reader_that_is_late(make_engine: Any, make_client: Any, pause: Pause) -> None:
    """What libzmq had received when the engine closed is not thrown away, though it was not read yet."""
    engine, client = make_engine(pace=0.001), make_client(on_step=pause)
    client.connect(engine.addresses)
    handle = client.add(count=150)
    until(lambda: bool(engine.added) and not engine.open, "the end of the request")
    engine.stop()
    pause.lifted.set()
    client.wait_ends(handle)


def test_output_that_cannot_travel_ends_its_requests(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    output = fake_engine.finish_rows([5], FinishReason.STOP)
    output.extras[0] = {"code": object()}
    engine.output.put({client.pump.client_id(0): output})
    client.wait_ends(5)
    assert client.ends[5] == [FinishReason.ERROR]
    assert client.extras[5]["code"] == "protocol"
