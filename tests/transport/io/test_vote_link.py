"""Ranks on several hosts, each in this process: votes that arrive whatever the network does, and one life for all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest
import zmq
from tests.support.linked_ranks import Hosts, Rank
from tests.support.proxy import breaking
from tests.support.waiting import until

from wavecore.transport.curve import CurveClient, KeyPair
from wavecore.transport.errors import ConfigError, EngineDead, ResourceError, StartError, WavecoreError
from wavecore.transport.io import host_link
from wavecore.transport.io.sockets import Monitor, make_context, make_socket
from wavecore.transport.io.vote_link import VoteLink
from wavecore.transport.processes.stall import ELSEWHERE
from wavecore.transport.wire.messages import VOTE_NUMBERS


def deaf(_data: bytes) -> list[bytes]:
    """A connection that stays open and carries nothing."""
    return []


def passing(data: bytes) -> list[bytes]:
    return [data]


@contextmanager
def peer(hosts: Hosts, pair: KeyPair) -> Iterator[zmq.Socket[bytes]]:
    """A socket of nobody's, connected to the head with that key pair."""
    server = KeyPair.load(hosts.keys / "server.key").public
    with make_context() as context:
        address = f"tcp://127.0.0.1:{hosts.port}"
        with make_socket(context, zmq.DEALER, address, curve=CurveClient(server, pair)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            yield socket


def agree_all(ranks: list[Rank], agreements: range) -> None:
    """All vote, and all see the same."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [
            threads.submit(rank.agree, agreements, lambda agreement, i=i: 10 * agreement + i)  # type: ignore[misc]
            for i, rank in enumerate(ranks)
        ]
        for future in futures:
            voters = range(len(ranks))
            assert future.result(60) == [[(10 * k + i,) * VOTE_NUMBERS for i in voters] for k in agreements]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_see_the_same_votes(hosts: Hosts, ranks: int) -> None:
    found = hosts.start_all(ranks)
    agree_all(found, range(1, 200))
    assert len({rank.link.life for rank in found}) == 1
    assert not any(rank.ends for rank in found)


def test_the_first_vote_wakes_every_rank(hosts: Hosts) -> None:
    found = hosts.start_all(3)
    assert not any(rank.link.has_begun(1) for rank in found)
    found[2].link.publish(1, (1,) * VOTE_NUMBERS)
    for rank in found:
        rank.link._memory.sleep_until(lambda rank=rank: rank.link.has_begun(1), seconds=30)  # type: ignore[misc]
        assert rank.link.has_begun(1) and not rank.link.has_begun(2)


def test_who_waits_says_so_and_is_not_to_blame(hosts: Hosts) -> None:
    head, rank = hosts.start_all(2)
    head.page.busy(True)
    waiting = threading.Thread(target=head.agree, args=(range(1, 2),))
    waiting.start()
    assert until(lambda: head.page.waits_for) == ELSEWHERE
    rank.agree(range(1, 2))
    waiting.join(30)
    assert head.page.waits_for is None


def test_votes_through_a_bad_network(hosts: Hosts) -> None:
    """Connections that break, and 50 ms each way, while ranks agree."""
    proxy = hosts.proxy()
    ranks = hosts.start_all(3, proxy.port)
    begun = 1
    with breaking(proxy) as goes_on:
        while goes_on():
            agree_all(ranks, range(begun, begun + 10))
            begun += 10
    proxy.delay = 0.05
    agree_all(ranks, range(begun, begun + 5))
    assert proxy.connections > 2 and not any(rank.ends for rank in ranks)


def test_bytes_that_come_twice(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no TCP does, and CURVE refuses: the life ends, or goes on, and no vote is wrong."""
    monkeypatch.setattr(host_link, "SILENT_SECONDS", 0.5)
    proxy = hosts.proxy()
    ranks = hosts.start_all(2, proxy.port)
    agree_all(ranks, range(1, 5))
    proxy.change = lambda data: [data, data]
    with contextlib.suppress(EngineDead):
        agree_all(ranks, range(5, 100))


def test_silence_ends_the_life_on_both_sides(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that stays open and carries nothing."""
    monkeypatch.setattr(host_link, "SILENT_SECONDS", 0.5)
    proxy = hosts.proxy()
    head, rank = hosts.start_all(2, proxy.port)
    agree_all([head, rank], range(1, 5))
    proxy.change = deaf
    for waits, name in ((head, "rank 1 on 127.0.0.3"), (rank, "rank 0 on 127.0.0.1")):
        with pytest.raises(EngineDead, match=rf"{name} was silent for 0\.5 s"):
            waits.agree(range(5, 6))
        until(lambda waits=waits: len(waits.ends) == 1)  # type: ignore[misc]
        with pytest.raises(EngineDead, match="silent"):
            waits.link.has_begun(6)


def test_a_rank_that_ends_tells_all_why(hosts: Hosts) -> None:
    ranks = hosts.start_all(3)
    assert str(ranks[1].link.conclude(ValueError("no such block"))) == "no such block"
    for rank in (ranks[0], ranks[2]):
        with pytest.raises(EngineDead, match=r"^rank 1 on 127\.0\.0\.3: ValueError: no such block$"):
            rank.agree(range(1, 2))
    until(lambda: [len(rank.ends) for rank in ranks] == [1, 0, 1], "an end each, but its own")


def test_what_only_shows_that_a_peer_is_gone_is_no_cause(hosts: Hosts) -> None:
    """A collective breaks when a peer dies; why it died, the link learns later."""
    head, rank = hosts.start_all(2)
    rank.link.wait_for(0)
    threading.Timer(0.2, lambda: head.link.conclude(ValueError("no such block"))).start()
    assert "rank 0 on 127.0.0.2: ValueError: no such block" in str(
        rank.link.conclude(RuntimeError("connection closed by peer"))
    )


def test_a_rank_that_joins_anew_ends_the_life_it_was_in(hosts: Hosts) -> None:
    """Its last process must have ended. The new one meets the next life of the head, not this one."""
    head, old = hosts.start_all(2)
    new = hosts.start(1)
    with pytest.raises(EngineDead, match=r"rank 1 on 127\.0\.0\.3 joins anew"):
        head.agree(range(1, 2))
    until(lambda: old.ends)
    assert "is in another life of the group; this one is over" in str(old.ends[0])
    assert new.link.life == host_link.NO_LIFE and not new.ends
    head.link.close()
    next_head = hosts.start(0)
    for rank in (next_head, new):
        rank.link.meet(30)
    agree_all([next_head, new], range(1, 20))
    assert next_head.link.life == new.link.life != head.link.life


def test_an_old_life_that_comes_back_is_told_and_ends(hosts: Hosts) -> None:
    """It was cut off while the others went on in a new one."""
    proxy = hosts.proxy()
    head, old = hosts.start_all(2, proxy.port)
    proxy.change = deaf
    head.link.conclude(ValueError("a stranger reason"))
    head.link.close()
    next_head, new = hosts.start(0), hosts.start(1)
    for rank in (next_head, new):
        rank.link.meet(30)
    proxy.change = passing
    with pytest.raises(EngineDead, match="is in another life of the group; this one is over"):
        old.agree(range(1, 2))
    agree_all([next_head, new], range(1, 20))
    assert not next_head.ends and not new.ends


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_leave_wait_for_each_other(hosts: Hosts, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose last votes were lost still gets them."""
    monkeypatch.setattr(VoteLink, "flush_seconds", 20.0)
    proxy = hosts.proxy()
    ranks = hosts.start_all(2, proxy.port)
    agree_all(ranks, range(1, 5))
    leaves, waits = ranks[first], ranks[1 - first]
    agreed = threading.Thread(target=leaves.agree, args=(range(5, 6),))
    agreed.start()
    until(lambda: waits.link.has_begun(5))
    proxy.change = deaf if first == 0 else passing  # what the head says does not arrive; or all that a rank says did
    waits.link.publish(5, (1,) * VOTE_NUMBERS)
    if first == 0:
        until(lambda: not waits.link._ballots.missing())
    proxy.change = passing
    agreed.join(30)
    closing = threading.Thread(target=leaves.link.close)
    closing.start()
    assert len(waits.link.wait(5)) == 2
    waits.link.close()
    closing.join()
    for link in (leaves.link, waits.link):
        assert link._end_by > time.monotonic() + 5, "nobody waited for the limit"


def test_who_must_not_join(hosts: Hosts) -> None:
    head = hosts.start(0)
    for rank, kind in ((2, ""), (1, "dtype float32")):
        with pytest.raises(
            ConfigError, match=rf"rank {rank} on 127\.0\.0\.\d and rank 0 on 127\.0\.0\.2 are no .*{kind}"
        ):
            hosts.start(rank, 3, meet=True, kind=kind)
    with pytest.raises(StartError, match="rank 1 did not join within"):
        head.link.meet(0.01)
    head.link.close()


def test_a_rank_without_a_head(hosts: Hosts) -> None:
    with pytest.raises(StartError, match=r"rank 0 on 127\.0\.0\.1, or one that it waits for, did not join within 0\.2"):
        hosts.start(1).link.meet(0.2)


def test_a_taken_port_is_told(hosts: Hosts) -> None:
    hosts.start(0)
    with pytest.raises(ResourceError, match="another engine there"):
        hosts.start(0)


def test_a_key_of_clients_does_not_do(hosts: Hosts) -> None:
    """They may send requests, and no votes."""
    hosts.start(0)
    for name, event in (
        ("client.key", zmq.EVENT_HANDSHAKE_FAILED_AUTH),
        ("server.key", zmq.EVENT_HANDSHAKE_SUCCEEDED),
    ):
        with peer(hosts, KeyPair.load(hosts.keys / name)) as socket:
            monitor = Monitor(socket)
            assert monitor.channel.poll(30_000) and monitor.next() == event
            monitor.close()


def test_bytes_of_nobody_change_nothing(hosts: Hosts) -> None:
    """From a peer with the right key, too."""
    head, rank = hosts.start_all(2)
    with peer(hosts, KeyPair.load(hosts.keys / "server.key")) as socket:
        for frames in ([b""], [b"\x93\x03\x01"], [bytes(100)] * 3):
            socket.send_multipart(frames)
        until(lambda: head.link._complaints.counts.total() == 3)
        agree_all([head, rank], range(1, 5))


def test_what_ranks_meet_at(hosts: Hosts) -> None:
    """Values that one sets and all get; a call whose answer is lost is made again."""
    proxy = hosts.proxy()
    head, rank = hosts.start_all(2, proxy.port)
    for who in (head, rank):
        assert who.link.ask("get", {"key": "a"}, 30) is None
    rank.link.ask("set", {"key": "a", "value": b"1"}, 30)
    proxy.change = deaf
    with pytest.raises(TimeoutError):
        rank.link.ask("get", {"key": "a"}, 0.1)
    threading.Timer(0.2, lambda: setattr(proxy, "change", passing)).start()
    assert rank.link.ask("get", {"key": "a"}, 30) == head.link.ask("get", {"key": "a"}, 30) == b"1"
    head.link.conclude(ValueError("no more"))
    for who in (head, rank):
        with pytest.raises(EngineDead, match="no more"):
            until(lambda who=who: who.link.ask("get", {"key": "a"}, 30) is None)  # type: ignore[misc]


class Supervised:
    """Ranks that are started again when their life is over, as supervisors do, and a network between them."""

    def __init__(self, hosts: Hosts, ranks: int) -> None:
        self._hosts, self._size, self.proxy = hosts, ranks, hosts.proxy()
        self.ranks = [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> Rank:
        return self._hosts.start(rank, self._size, self.proxy.port if rank else None)

    def kill(self, rank: int) -> None:
        """Without a word."""
        self.ranks[rank].link._send_to = lambda _identity, _frames: False  # type: ignore[method-assign]
        self.ranks[rank].link.close()
        self.ranks[rank] = self._start(rank)

    def restart(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.ends:
                rank.link.close()
                self.ranks[number] = self._start(number)

    def meet(self) -> bool:
        """Whether all are in one life by now."""
        self.restart()
        lives = {rank.link.life for rank in self.ranks}
        return len(lives) == 1 and host_link.NO_LIFE not in lives

    def agree(self, agreements: range) -> None:
        """All vote for the life that they are in; nobody counts a vote of another one, or is in two."""

        def vote(rank: Rank) -> None:
            life = int.from_bytes(rank.link.life[:4])
            with contextlib.suppress(EngineDead):
                assert rank.agree(agreements, lambda _agreement: life) == [
                    [(life,) * VOTE_NUMBERS] * self._size for _ in agreements
                ]

        with ThreadPoolExecutor(self._size) as threads:
            list(threads.map(vote, self.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_lives_in_any_order(hosts: Hosts, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die without a word, connections break, the network is deaf for a while: ranks agree in one life or in
    none, and meet again when it is over."""
    monkeypatch.setattr(host_link, "SILENT_SECONDS", 1.0)
    random, group = Random(seed), Supervised(hosts, 3)
    begun = dict[bytes, int]()
    for _ in range(25):
        match random.randrange(5):
            case 0:
                group.kill(random.randrange(3))
            case 1:
                group.proxy.reset()
            case 2:
                group.proxy.change = deaf
                threading.Event().wait(random.random() * 1.5)
                group.proxy.change = passing
            case _:
                if group.meet():
                    first = begun.get(group.ranks[0].link.life, 1)
                    group.agree(range(first, first + 5))
                    begun[group.ranks[0].link.life] = first + 5
    until(group.meet)
    agree_all(group.ranks, range(begun.get(group.ranks[0].link.life, 1), 300))
    assert not any(rank.ends for rank in group.ranks)


def test_a_thread_that_breaks_leaves_the_socket_to_who_uses_it(hosts: Hosts) -> None:
    """libzmq's sockets may not be closed by one thread while another one sends."""
    rank, begun, go_on = hosts.start(0), threading.Event(), threading.Event()
    link = rank.link
    link._call_soon(lambda: (begun.set(), go_on.wait(30), 1 // 0))
    assert begun.wait(30)
    with link._turn_of():
        go_on.set()
        until(lambda: rank.ends)
        link.join(0.2)
        assert not link._socket.closed
    link.join(30)
    assert link._socket.closed
    with pytest.raises(WavecoreError, match="division"):
        link.has_begun(1)
