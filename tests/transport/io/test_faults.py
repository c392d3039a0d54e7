"""What the wire survives: every accepted request ends exactly once, token streams have no hole and no duplicate."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.support.proxy import Proxy
from tests.support.waiting import until

from wavecore.transport.curve import CurveClient, CurveServer, create_keys
from wavecore.transport.io import connection
from wavecore.transport.io.connection import Disconnected, Reconnected
from wavecore.transport.wire.codec import MAX_FRAME_BYTES
from wavecore.transport.wire.delivery import PIECE_BYTES, WINDOW_BYTES
from wavecore.transport.wire.messages import Ready


def test_killed_engine_is_noticed_and_its_successor_is_a_new_life(make_process: Any, make_client: Any) -> None:
    engine, client = make_process("--pace", "0.01"), make_client()
    client.connect(engine.addresses)
    lost = client.add(count=1 << 20)
    client.wait_for(lambda: client.received.get(lost, 0) > 3, "tokens")
    first = client.pump.client_id(0)
    engine.end(kill=True)
    client.wait_for(lambda: client.saw(Disconnected), "the news of its death")

    successor = make_process()  # at the same address
    assert successor.addresses == engine.addresses
    client.wait_for(lambda: client.saw(Ready, 2), "READY of the next life")
    assert client.pump.client_id(0) != first
    before = client.received[lost]
    client.wait_ends(client.add(count=10))
    assert client.received[lost] == before  # nothing of the old life arrives late
    assert lost not in client.ends


def test_messages_sent_while_the_engine_is_gone_do_not_reach_its_successor(make_process: Any, make_client: Any) -> None:
    """They belong to the old session; the owner hears of the new one and sends again what it wants."""
    engine, client = make_process(), make_client()
    client.connect(engine.addresses)
    old = client.pump.client_id(0)
    engine.end(kill=True)
    client.wait_for(lambda: client.saw(Disconnected), "the news of its death")
    client.add()
    client.call(1, "echo")
    make_process()
    client.wait_for(lambda: client.saw(Ready, 2), "READY of the next life")
    assert client.pump.client_id(0) != old
    client.call(2, "echo")
    client.wait_for(lambda: 2 in client.results, "an answer of the next life")
    assert client.received == {} and 1 not in client.results


@pytest.mark.usefixtures("quick_clocks")
@pytest.mark.parametrize(
    "seconds", [pytest.param(0.2, marks=pytest.mark.slow), 1.3]
)  # of 0.5 until the client says that it hears nothing
def test_stopped_engine_goes_on_where_it_was(
    make_process: Any, make_client: Any, stop_for: Callable[[Any, float], None], seconds: float
) -> None:
    engine, client = make_process("--quick", "--pace", "0.002"), make_client()
    client.connect(engine.addresses)
    handles = [client.add(count=400) for _ in range(5)]
    client.wait_for(lambda: client.received.get(handles[-1], 0) > 0, "tokens")
    stop_for(engine, seconds)
    client.wait_ends(*handles)
    assert client.saw(Ready) and not client.saw(Ready, 2)


@pytest.mark.usefixtures("quick_clocks")
def test_silence_of_a_stopped_engine_is_reported(make_process: Any, make_client: Any) -> None:
    engine, client = make_process("--quick"), make_client()
    client.connect(engine.addresses)
    engine.signal(signal.SIGSTOP)
    client.wait_for(lambda: client.saw(Disconnected), "the report of silence")
    engine.signal(signal.SIGCONT)
    client.wait_for(lambda: client.saw(Reconnected), "the engine's return")
    client.wait_ends(client.add(count=10))
    assert not client.saw(Ready, 2)


def test_duplicate_add_is_one_request(make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message leaves three times; each is one request, and every token comes once."""
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    link = client.pump._connections[0]
    assert link is not None
    send = connection._send

    def thrice(socket: zmq.Socket[bytes], frames: Any) -> bool:
        return all(send(socket, frames) for _ in range(3 if socket is link.push else 1))

    monkeypatch.setattr(connection, "_send", thrice)
    handles = [client.add(count=3) for _ in range(50)]
    client.wait_ends(*handles)
    assert sorted(handle for _, handle in engine.added) == handles


# --- connections that break under living peers -----------------------------------------------------------------------


class Site:
    """An engine on tcp with CURVE, seen through two proxies."""

    def __init__(self, engine: Any, keys: Path) -> None:
        ports = [int(address.rsplit(":", 1)[1]) for address in engine.addresses]
        self.engine = engine
        self.proxies = [Proxy(port) for port in ports]
        self.addresses = tuple(f"tcp://127.0.0.1:{proxy.port}" for proxy in self.proxies)
        self.curve = CurveClient.load(keys / "client.key", create_keys(keys))

    def reset(self) -> None:
        for proxy in self.proxies:
            proxy.reset()


@pytest.fixture
def site(tmp_path: Path, make_engine: Any) -> Iterator[Site]:
    create_keys(tmp_path)
    address = "tcp://127.0.0.1:0"
    site = Site(make_engine((address, address), curve=CurveServer.load(tmp_path), pace=0.001), tmp_path)
    yield site
    for proxy in site.proxies:
        proxy.close()


SLOW = 5e6


def test_a_large_request_over_a_slow_link_is_sent_once_and_holds_up_no_small_one(make_client: Any, site: Site) -> None:
    client = make_client()
    client.connect(site.addresses, site.curve)
    up = site.proxies[0]
    up.rate = SLOW
    large = client.add(prompt=np.zeros(2_000_000, np.int32))
    until(lambda: up.up_bytes > 1_000_000, "the large one is under way")
    small = client.add()
    client.wait_ends(small)
    assert large not in client.ends
    client.wait_ends(large)
    assert [handle for _, handle in site.engine.added] == [small, large]
    assert up.up_bytes <= 1.05 * 8e6


def test_an_abort_overtakes_the_request_that_it_ends(make_client: Any, site: Site) -> None:
    client = make_client()
    client.connect(site.addresses, site.curve)
    up = site.proxies[0]
    up.rate = SLOW
    large, next_one = [client.add(prompt=np.zeros(5_000_000, np.int32)) for _ in range(2)]
    until(lambda: up.up_bytes > 1_000_000, "the first is under way")
    client.abort(large, next_one)
    client.wait_ends(client.add(), client.add(prompt=np.zeros(100_000, np.int32)))
    assert site.engine.aborted == [large, next_one]
    assert [handle for _, handle in site.engine.added] == [next_one + 1, next_one + 2]
    assert up.up_bytes < 5e6  # of 40
    session = client.pump._connections[0]._outbox
    until(lambda: session.bytes == 0, "the last acknowledgement")


def test_a_large_result_over_a_slow_link_holds_up_no_tokens(make_client: Any, site: Site) -> None:
    client = make_client()
    client.connect(site.addresses, site.curve)
    down = site.proxies[1]
    down.rate = SLOW
    client.call(1, "frames", sizes=[3_000_000, 0, 5_000_000, 100])
    until(lambda: down.down_bytes > 1_000_000, "the result is under way")
    client.wait_ends(client.add(count=50))
    assert 1 not in client.results
    client.wait_for(lambda: 1 in client.results, "the result")
    assert [len(frame.buffer) for frame in client.results[1].frames] == [3_000_000, 0, 5_000_000, 100]
    assert not client.saw(Disconnected)
    assert down.down_bytes <= 1.05 * 8.1e6


@pytest.mark.usefixtures("quick_clocks")
def test_a_break_of_the_input_connection_alone_is_noticed(make_client: Any, site: Site) -> None:
    """No event tells of it: the engine's next word shows that it got no further."""
    client = make_client()
    client.connect(site.addresses, site.curve)
    up = site.proxies[0]
    up.rate = 20e6
    handle = client.add(prompt=np.zeros(1_000_000, np.int32))
    for size in (1_000_000, 2_500_000):
        until(lambda size=size: up.up_bytes > size, "it is under way")
        up.reset()
    client.wait_ends(handle)
    assert not client.saw(Disconnected)
    assert [handle for _, handle in site.engine.added] == [handle]
    assert up.up_bytes <= 4_100_000 + 2 * (WINDOW_BYTES + PIECE_BYTES)


def test_resets_leave_no_hole_and_no_duplicate(make_client: Any, site: Site) -> None:
    """Both directions lose messages in flight again and again while requests come and go."""
    client = make_client()
    client.connect(site.addresses, site.curve)
    chance = random.Random(5)
    handles: list[int] = []
    for round_ in range(6):
        for _ in range(15):
            handles.append(client.add(count=chance.choice([1, 50, 400]), frame=chance.choice([0, 0, 3000, 70_000])))
        client.wait_for(lambda: client.received.get(handles[-15], 0) > 0, "tokens")
        site.proxies[round_ % 2].reset() if round_ < 4 else site.reset()
    client.wait_ends(*handles)
    assert sorted(handle for _, handle in site.engine.added) == handles
    assert client.saw(Reconnected)
    assert not client.saw(Ready, 2)
    assert sum(proxy.connections for proxy in site.proxies) >= 6


def test_reset_during_a_large_message(make_client: Any, site: Site) -> None:
    client = make_client()
    client.connect(site.addresses, site.curve)
    client.call(1, "frames", sizes=[4 << 20] * 8)
    client.add(prompt=[7] * (1 << 20), count=3)
    for _ in range(3):
        site.reset()
    client.wait_for(lambda: 1 in client.results, "the result")
    client.wait_ends(0)
    assert len(client.results[1].frames) == 8


# --- peers that break the rules --------------------------------------------------------------------------------------


def test_over_size_frame_costs_only_its_sender(make_engine: Any, make_client: Any, raw_socket: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    before = client.add(count=1 << 30)
    hostile = raw_socket(zmq.PUSH, engine.addresses[0])
    hostile.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
    hostile = raw_socket(zmq.DEALER, engine.addresses[1], b"h" * 16)
    hostile.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
    client.wait_ends(client.add(count=10))
    client.abort(before)
    client.wait_ends(before)


def test_client_comes_back_after_an_over_size_frame(make_engine: Any, make_client: Any) -> None:
    """Its connections are cut; it returns under the same identity and is not shut out as a duplicate."""
    engine, client = make_engine(pace=0.001), make_client()
    client.connect(engine.addresses)
    handles = [client.add(count=500) for _ in range(5)]
    client.wait_for(lambda: client.received.get(handles[-1], 0) > 0, "tokens")
    link = client.pump._connections[0]
    assert link is not None
    client.pump._call_soon(lambda: link.dealer.send(bytes(MAX_FRAME_BYTES + 1), copy=False))
    client.pump._call_soon(lambda: link.push.send(bytes(MAX_FRAME_BYTES + 1), copy=False))
    client.wait_outage()
    handles += [client.add(count=5) for _ in range(5)]
    client.wait_ends(*handles)
    assert not client.saw(Ready, 2)


def test_bytes_of_another_protocol_on_the_port(make_client: Any, site: Site) -> None:
    client = make_client()
    client.connect(site.addresses, site.curve)
    for address in site.engine.addresses:
        with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    client.wait_ends(client.add(count=10))


@pytest.fixture
def stop_for() -> Callable[[Any, float], None]:
    """SIGSTOP a process for a while."""

    def stop(engine: Any, seconds: float) -> None:
        engine.signal(signal.SIGSTOP)
        threading.Event().wait(seconds)  # the length of the pause is the fault itself
        engine.signal(signal.SIGCONT)

    return stop
