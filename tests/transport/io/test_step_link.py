"""Records and words of an engine over several hosts, each in this process: once and in order, whatever happens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import zmq
from tests.support.linked_ranks import Hosts, Rank
from tests.support.proxy import breaking
from tests.support.waiting import until

from wavecore.engine_core.tensor_parallel.group_runner import WorkerWords
from wavecore.transport.errors import EngineDead
from wavecore.transport.io import host_link
from wavecore.transport.io.step_link import PART_BYTES, StepLink
from wavecore.transport.processes.stall import ELSEWHERE

Records = list[tuple[int, bytes]]


def start_all(hosts: Hosts, ranks: int, port: int | None = None) -> list[Rank]:
    return hosts.start_all(ranks, port, link=StepLink, engine_ranks=ranks)


def records(count: int) -> Records:
    """Mostly short ones; empty ones, those that fill a message, and long ones are among them."""
    random = Random(count)
    sizes = [0, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]
    return [
        (i % 7, random.randbytes(sizes[i % 40 // 10] if i % 10 == 3 else random.randrange(2000))) for i in range(count)
    ]


def follow(rank: Rank, count: int, first: int = 0) -> Records:
    """A worker: it reads, and says how far it is."""
    words, found = WorkerWords(rank.link), list[tuple[int, bytes]]()
    for step in range(first, first + count):
        found.append(rank.link.read())
        words.tell(WorkerWords.LAUNCHED, step)
    return found


def lead(rank: Rank, sent: Records, first: int = 0) -> None:
    """Rank 0: it is two steps ahead of the slowest worker at most."""
    words = WorkerWords(rank.link)
    for step, (kind, data) in enumerate(sent, first):
        rank.link.write(kind, [data[:100], data[100:]])
        words.wait_for(WorkerWords.LAUNCHED, max(step - 2, -1))
    words.wait_for(WorkerWords.LAUNCHED, first + len(sent) - 1)


def check_all(ranks: list[Rank], sent: Records, first: int = 0) -> None:
    """All workers get these records, as steps from the `first` on."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = [threads.submit(follow, rank, len(sent), first) for rank in ranks[1:]]
        threads.submit(lead, ranks[0], sent, first).result(60)
        assert all(each.result(60) == sent for each in found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_worker_gets_every_record(hosts: Hosts, ranks: int) -> None:
    found = start_all(hosts, ranks)
    check_all(found, records(200))
    assert not any(rank.ends for rank in found)


def test_no_record_waits_for_an_answer(hosts: Hosts) -> None:
    """Rank 0 is far ahead of a worker that reads nothing."""
    head, worker = start_all(hosts, 2)
    sent = records(300)
    assert head.link.has_room([bytes(1 << 26)])
    for kind, data in sent:
        head.link.write(kind, [data])
    until(lambda: worker.link.has_more)
    assert follow(worker, len(sent)) == sent


def test_a_record_that_nobody_read_yet_is_seen(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look, though the link's thread leaves the socket to the main loop: else a worker waits for the end
    of a step before it launches the next one."""
    head, worker = start_all(hosts, 2)
    link = worker.link
    monkeypatch.setattr(StepLink, "_say", lambda _self: None)
    link.ask("get", {"key": "a"}, 30)  # behind its answer nothing is on its way
    read, reader = link._read, threading.current_thread()
    monkeypatch.setattr(link, "_read", lambda: read() if threading.current_thread() is reader else None)

    def arrived() -> bool:
        with link._lock:
            return bool(link._socket.EVENTS & zmq.POLLIN)

    assert not link.has_more
    head.link.write(0, [b"a plan"])
    until(arrived)
    assert link.has_more
    assert link.read() == (0, b"a plan")


def test_records_through_a_network_that_breaks(hosts: Hosts) -> None:
    """Connections break while records and words are under way: each comes once, and in order."""
    proxy = hosts.proxy()
    ranks = start_all(hosts, 3, proxy.port)
    first = 0
    with breaking(proxy) as goes_on:
        while goes_on():
            check_all(ranks, records(60), first)
            first += 60
    assert proxy.connections > 2 and not any(rank.ends for rank in ranks)


def test_old_words_change_nothing(hosts: Hosts) -> None:
    """They were overtaken, by words of a later connection."""
    head, worker = start_all(hosts, 2)
    words, told = WorkerWords(head.link), WorkerWords(worker.link)
    for word in (told.BEGUN, told.FAILED + 1, told.LAUNCHED):
        told.tell(word, 5)
    words.wait_for(words.LAUNCHED, 5)
    worker.link.words[:] = memoryview(bytes(worker.link.words.nbytes)).cast("Q")
    worker.link.ring(0)
    assert worker.link.ask("get", {"key": "a"}, 30) is None  # the answer to what was said after it
    assert words.failed(5) == [1]
    words.wait_for(words.LAUNCHED, 5)


def test_who_waits_for_a_worker_is_not_to_blame(hosts: Hosts) -> None:
    head, worker = start_all(hosts, 2)
    head.page.busy(True)
    waiting = threading.Thread(target=WorkerWords(head.link).wait_for, args=(WorkerWords.LAUNCHED, 0))
    waiting.start()
    assert until(lambda: head.page.waits_for) == ELSEWHERE
    WorkerWords(worker.link).tell(WorkerWords.LAUNCHED, 0)
    waiting.join(30)
    assert head.page.waits_for is None


def test_silence_ends_both_sides(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "SILENT_SECONDS", 0.5)
    proxy = hosts.proxy()
    head, worker = start_all(hosts, 2, proxy.port)
    proxy.change = lambda _data: []
    with pytest.raises(EngineDead, match=r"rank 0 on 127\.0\.0\.1 was silent for 0\.5 s"):
        worker.link.read()
    with pytest.raises(EngineDead, match=r"rank 1 on 127\.0\.0\.3 was silent for 0\.5 s"):
        WorkerWords(head.link).wait_for(WorkerWords.LAUNCHED, 0)
    with pytest.raises(EngineDead, match="silent"):
        head.link.write(0, [])


def test_workers_end_with_rank_0(hosts: Hosts) -> None:
    """In order, when they have read what it sent."""
    head, *workers = start_all(hosts, 3)
    head.link.write(3, [b"the last"])
    head.link.close()
    for worker in workers:
        assert worker.link.read() == (3, b"the last")
        with pytest.raises(SystemExit):
            worker.link.read()


def test_a_worker_tells_where_rank_0_listens(hosts: Hosts) -> None:
    """And all of them which ranks there are; what is its own each says itself."""
    head, worker = start_all(hosts, 2)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(worker.link.introduce, {"resolved": {"device": "cuda:1"}})
        head.link.introduce({"input": "tcp://127.0.0.2:1", "resolved": {"device": "cuda:0", "dtype": "float16"}})
        found = told.result(30)
    assert found["input"] == "tcp://127.0.0.2:1"
    assert found["resolved"] == {"device": "cuda:1", "dtype": "float16"}
    assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, "127.0.0.2"), (1, "127.0.0.3")]
