"""Ranks on several hosts, each in this process, and the links between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.proxy import Proxy
from tests.support.waiting import two_free_ports

from wavecore.transport.curve import create_keys
from wavecore.transport.errors import WavecoreError
from wavecore.transport.io.host_link import RankPlace
from wavecore.transport.io.vote_link import VoteLink
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.wire.messages import VOTE_NUMBERS

Vote = tuple[int, ...]


class Rank:
    """A link, and what it told its process."""

    def __init__(self, keys: Path, place: RankPlace, kind: Any = VoteLink) -> None:
        fd = ProgressPage.create_fd()
        self.page, self.ends = ProgressPage(fd), list[WavecoreError]()
        local = range(place.rank, place.rank + 1)
        self.link = kind(place, keys, GroupMemory.alone(self.page), local, self.ends.append)

    def agree(self, agreements: range, number: Callable[[int], int] = lambda agreement: agreement) -> list[list[Vote]]:
        found = []
        for agreement in agreements:
            self.link.publish(agreement, (number(agreement),) * VOTE_NUMBERS)
            found.append(self.link.wait(agreement))
        return found


class Hosts:
    """Starts ranks, and closes them."""

    def __init__(self, keys: Path, until: ExitStack) -> None:
        self.keys, self.port, self._until = keys, two_free_ports(), until
        create_keys(keys)

    def start(
        self, rank: int, ranks: int = 2, port: int | None = None, meet: bool = False, link: Any = VoteLink, **more: Any
    ) -> Rank:
        address = f"tcp://127.0.0.1:{port or self.port}"
        found = Rank(self.keys, RankPlace(address, f"127.0.0.{rank + 2}", rank, ranks, **more), link)
        self._until.callback(found.link.close)
        if meet:
            found.link.meet(30)
        return found

    def start_all(self, ranks: int, port: int | None = None, **more: Any) -> list[Rank]:
        """They have met; all but the head connect to `port`."""
        found = [self.start(rank, ranks, port if rank else None, **more) for rank in range(ranks)]
        for rank in found:
            rank.link.meet(30)
        return found

    def proxy(self) -> Proxy:
        proxy = Proxy(self.port)
        self._until.callback(proxy.close)
        return proxy
