"""A client and an engine on real sockets, nothing going wrong below."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import until

from wavecore.transport.errors import EngineDead, MessageTooLarge
from wavecore.transport.io.connection import ClientFailed
from wavecore.transport.wire import codec
from wavecore.transport.wire.messages import FinishReason, Heartbeat, Ready
from wavecore.transport.wire.tensors import to_numpy


def test_request_runs_to_its_end(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    handles = [client.add(count=20, per_step=3) for _ in range(10)]
    client.wait_ends(*handles)
    assert [client.received[handle] for handle in handles] == [20] * 10
    assert len(engine.added) == 10


def test_ready_says_what_the_engine_resolved(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    ready = client.events[0]
    assert isinstance(ready, Ready)
    assert (ready.epoch, ready.resolved) == (engine.epoch, {"model": "fake"})


def test_engine_may_appear_after_the_client(make_engine: Any, make_client: Any, ipc: Any) -> None:
    client = make_client()
    client.pump.connect(0, *ipc)
    client.add()
    client.wait_refusal(EngineDead)
    make_engine()
    client.wait_for(lambda: client.saw(Ready), "READY")
    client.wait_ends(client.add())


@pytest.mark.usefixtures("quick_clocks")
def test_heartbeats_carry_the_load(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    handle = client.add(count=1000)
    client.wait_for(
        lambda: any(isinstance(event, Heartbeat) and event.load == (1, 0, 0) for event in client.events), "a heartbeat"
    )
    client.abort(handle)


def test_abort_ends_a_request_once_and_may_repeat(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    handle = client.add(count=1 << 20)
    client.wait_for(lambda: client.received.get(handle, 0) > 0, "a token")
    client.abort(handle, 12345)
    client.abort(handle)
    client.wait_ends(handle)
    client.wait_ends(client.add())
    assert engine.aborted == [handle, 12345, handle]


def test_handle_may_be_used_again_after_an_abort(make_engine: Any, make_client: Any) -> None:
    """A late abort of the first use must not end the second."""
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    first = client.add(count=1 << 20)
    client.abort(first)
    client.wait_ends(first)
    del client.ends[first]
    client.received.pop(first, None)
    client._next = first
    client.wait_ends(client.add(count=3))
    assert client.received[first] == 3


def test_refusal_answers_every_choice(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    handle = client.add(refuse=True, n=3)
    client.wait_ends(handle, handle + 1, handle + 2)
    assert client.extras[handle]["code"] == "validation"
    assert "as asked" in client.extras[handle + 2]["message"]
    assert engine.added == []


def test_bug_in_admit_ends_that_request_only(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    bad = client.add(bug=True)
    good = client.add(count=4)
    client.wait_ends(bad, good)
    assert client.extras[bad]["code"] == "internal"
    assert client.received[good] == 4


def test_slow_admission_holds_up_no_output(make_engine: Any, make_client: Any) -> None:
    """Taking in a large request (hashing, copies) happens beside the step, not in it."""
    engine, client = make_engine(pace=0.001), make_client()
    client.connect(engine.addresses)
    running = client.add(count=1 << 20)
    client.wait_for(lambda: client.received.get(running, 0) > 0, "a token")
    large = client.add(prompt=np.zeros(12 << 20, np.int32), slow=True)  # 48 MiB
    so_far = client.received[running]
    client.wait_for(lambda: client.received[running] > so_far + 50, "50 more tokens")
    assert (client.pump.client_id(0), large) not in engine.added
    engine.admission.set()
    client.wait_ends(large)
    client.abort(running)
    client.wait_ends(running)


def test_utility_answers_value_error_and_unsendable(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    client.call(1, "echo", a=[1, "x", None])
    client.call(2, "nonsense")
    client.call(3, "unsendable")
    client.wait_for(lambda: len(client.results) == 3, "three results")
    assert client.results[1].value == {"a": [1, "x", None]}
    assert client.results[2].error_code == "validation"
    assert client.results[3].error_code == "protocol"


def test_large_result_comes_in_chunks_and_is_joined(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    sizes = [100, 5 << 20, 5 << 20, 9 << 20, 0, 70_000, 3]
    client.call(7, "frames", sizes=sizes)
    client.wait_for(lambda: 7 in client.results, "the result")
    result = client.results[7]
    assert [len(to_numpy(frame)) for frame in result.frames] == sizes
    assert result.value == {"n": len(sizes)}


def test_too_large_message_is_refused_before_it_leaves(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    client.add(prompt=np.zeros(30 << 20, np.int32))
    client.wait_refusal(MessageTooLarge)
    client.wait_ends(client.add())


def test_last_words_arrive(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    engine.output.put_dead("numerical", "all is NaN " * 100_000 + "\ud800", "step")
    engine.output.stop()
    client.wait_for(
        lambda: any(getattr(e, "message", "").endswith("all is NaN ?") for e in client.events), "last words"
    )


def test_many_clients_share_an_engine(make_engine: Any, make_client: Any) -> None:
    engine = make_engine()
    clients = [make_client() for _ in range(5)]
    for client in clients:
        client.connect(engine.addresses)
    handles = [[client.add(count=50) for _ in range(20)] for client in clients]  # the same handles in each client
    for client, own in zip(clients, handles, strict=True):
        client.wait_ends(*own)
        assert all(client.received[handle] == 50 for handle in own)


def test_one_client_talks_to_several_engines(make_engine: Any, make_client: Any, tmp_path: Any) -> None:
    engines = [make_engine((f"ipc://{tmp_path}/i{k}", f"ipc://{tmp_path}/o{k}")) for k in range(3)]
    client = make_client()
    for index, engine in enumerate(engines):
        client.pump.connect(index, *engine.addresses)
    client.wait_for(lambda: client.saw(Ready, 3), "three READYs")
    assert len({client.pump.client_id(index) for index in range(3)}) == 3
    client.wait_ends(client.add(count=3))


def test_requests_from_many_threads(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    handles: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(100):
            with lock:  # the test client's handle counter is not thread-safe; the pump is
                handle = client._next
                client._next += 1
            client.call(handle, "echo", handle=handle)
            handles.append(handle)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.wait_for(lambda: len(client.results) == 400, "400 results")
    assert all(client.results[handle].value == {"handle": handle} for handle in handles)


def test_idle_pumps_use_no_cpu(make_engine: Any, make_client: Any) -> None:
    """A fifth of one core would already be a busy loop; a second of idling costs about 2 ms."""
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    client.wait_ends(client.add())
    beats = sum(isinstance(event, Heartbeat) for event in client.events)
    before, started = time.process_time(), time.monotonic()
    client.wait_for(
        lambda: sum(isinstance(event, Heartbeat) for event in client.events) >= beats + 2, "two more heartbeats"
    )
    assert time.process_time() - before < 0.2 * (time.monotonic() - started)


def test_close_ends_what_was_sent_and_what_was_on_its_way(make_engine: Any, make_client: Any) -> None:
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    for _ in range(500):
        client.add(count=1 << 30)
    client.pump.close()
    until(lambda: bool(engine.gone), "the goodbye")
    other = make_client()
    other.connect(engine.addresses)
    other.wait_ends(other.add())  # behind all that was on its way
    until(lambda: not engine.open, "the end of its requests")
    assert len(engine.output._streams) == 1


def test_goodbye_is_heard_at_once_and_alarms_nobody(
    make_engine: Any, make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    client.add(count=1 << 20)
    client.wait_for(lambda: client.received.get(0, 0) > 0, "a token")
    identity = client.pump.client_id(0)
    started = time.monotonic()
    client.pump.close()
    until(lambda: not engine.open and identity not in engine.output._streams, "the end of its request")
    assert time.monotonic() - started < 3.0  # an absent client is waited for longer
    assert engine.gone == [identity]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_failure_of_the_io_thread_is_told(make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)

    def bug() -> None:
        raise RuntimeError("a bug")

    client.pump._call_soon(bug)
    client.wait_for(lambda: client.saw(ClientFailed), "the news")
    client.pump.close()


def test_too_large_result_is_an_error(make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 20 << 20)
    engine, client = make_engine(), make_client()
    client.connect(engine.addresses)
    client.call(1, "frames", sizes=[5 << 20] * 5)
    client.wait_for(lambda: 1 in client.results, "the result")
    assert client.results[1].error_code == "too_large"
    assert client.results[1].frames == ()


def test_output_that_is_too_large_ends_its_request_in_the_engine_too(
    make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the same step go on."""
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1 << 20)
    engine, client = make_engine(pace=0.01), make_client()
    client.connect(engine.addresses)
    small = [client.add(count=20, frame=1000) for _ in range(3)]
    large = client.add(count=1 << 20, frame=2 << 20)
    small += [client.add(count=20, frame=1000) for _ in range(3)]
    client.wait_ends(large, *small)
    assert client.extras[large]["code"] == "too_large"
    assert [client.ends[handle] for handle in small] == [[FinishReason.LENGTH]] * 6
    assert [client.received[handle] for handle in small] == [20] * 6
    until(lambda: not engine.open, "the end in the engine")
    assert large in engine.aborted


def test_handler_that_raises_hurts_nobody(make_engine: Any, make_client: Any) -> None:
    def explode(_: Any) -> None:
        raise RuntimeError("handler")

    engine, client = make_engine(), make_client(on_step=explode)
    client.connect(engine.addresses)
    client.add()
    client.on_step = None
    client.call(1, "echo")
    client.wait_for(lambda: 1 in client.results, "a result")
