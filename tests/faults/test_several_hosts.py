"""Engines on several hosts, each started there by hand: links that break in every way, and hosts that stand still."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.conftest import LIMITS, SCRIPT, Stream, Streams
from tests.support.proxy import Proxy
from tests.support.several_hosts import dense_hosts, host_settings, save_access, way_to
from tests.support.waiting import until

from wavecore.frontend.client import deployment_watch
from wavecore.frontend.llm import LLM
from wavecore.testing import deployment
from wavecore.transport.curve import KeyPair, create_keys
from wavecore.transport.errors import EngineDead, StartError
from wavecore.transport.io.client_pump import ClientPump

slow = pytest.mark.slow
BOTH = [1, 1]  # engines of each host
FAR = "127.0.0.13"  # the way to the second host
UNREACHABLE = rf"engine 1 at {FAR} has been out of reach for [\d.]+ s"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "script.json"
    path.write_text(json.dumps({**SCRIPT, "step_seconds": 0.005}))
    return f"scripted:{path}"


@pytest.fixture(scope="module")
def folders(script: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Path]]:
    """Runtime directories of two hosts with an engine each."""
    settings = {"model": script, "skip_tokenizer_init": True, "max_num_seqs": 64}
    with dense_hosts(tmp_path_factory.mktemp("hosts"), BOTH, LIMITS, **settings) as supervisors:
        yield [supervisor.runtime_dir for supervisor in supervisors if supervisor.runtime_dir]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes 2.5 s of silence for the end of a host. Engines say something each second."""
    monkeypatch.setattr(ClientPump, "tick_seconds", 0.3)
    monkeypatch.setattr(deployment_watch, "UNREACHABLE_SECONDS", 2.5)


class Site(Streams):
    """A client of two hosts, addresses of this machine, with proxies on the way to each.

    Attributes:
        far: the proxies on the way to the second host.
    """

    def __init__(self, llm: LLM, near: list[Proxy], far: list[Proxy]) -> None:
        super().__init__(llm)
        self.near, self.far = near, far

    def two_at_each(self, max_tokens: int) -> tuple[list[Stream], list[Stream]]:
        """Requests of the first host and of the second, which have begun."""
        until(lambda: len(self.llm._service.client.engines) == 2, "both hosts")
        found = [[self.stream(10 * rank + i, max_tokens, data_parallel_rank=rank) for i in range(2)] for rank in (0, 1)]
        for stream in self.streams:
            assert stream.first.wait(30)
        return found[0], found[1]

    def check_lost(self, lost: Sequence[Stream]) -> None:
        """Requests of the second host end, each once, with the place and the engine; new ones go to the first."""
        for stream in lost:
            assert isinstance(stream.error, EngineDead)
            stream.check_prefix()
        self.stream(50).check_finished()
        for stream in (*lost, self.stream(51, data_parallel_rank=1)):  # which would wait for ever
            assert isinstance(stream.error, EngineDead)
            assert re.match(UNREACHABLE, str(stream.error))

    def check_back(self) -> None:
        """The second host serves again."""
        until(lambda: len(self.llm._service.client.engines) == 2, "the return of the host")
        self.stream(52, data_parallel_rank=1).check_finished()


@contextmanager
def client_of(folders: Sequence[Path], folder: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        near, far = (
            stack.enter_context(way_to(runtime_dir, folder / own, own))
            for runtime_dir, own in zip(folders, ("127.0.0.12", FAR), strict=True)
        )
        site = Site(stack.enter_context(LLM.connect([folder / "127.0.0.12", folder / FAR])), near, far)
        yield site
        stack.close()  # ends what still runs
        for stream in site.streams:
            assert stream.end
    for runtime_dir in folders:  # each host has forgotten all of it, once it has heard of the client's end
        with LLM.connect(runtime_dir) as own:
            until(lambda own=own: own.step_stats()[0]["running"] == 0, "the end of all requests", seconds=15)
            assert own._service.client.call("check_integrity").result(30).value is True


@pytest.fixture
def site(folders: Sequence[Path], tmp_path: Path, quick: None) -> Iterator[Site]:
    with client_of(folders, tmp_path) as found:
        yield found


def test_wrong_keys(folders: Sequence[Path], tmp_path: Path) -> None:
    """A client has other keys than the engines admit, or another server listens in an engine's place.

    `connect` fails after its `timeout` with `StartError`. The engine logs that a key was refused, and nothing else
    happens.
    """
    other = KeyPair.generate()
    strange = {"public": other.public.decode(), "secret": other.secret.decode()}
    client = save_access(folders[0], tmp_path / "client", lambda told: told.update(strange))
    server = save_access(
        folders[0], tmp_path / "server", lambda told: told["engines"][0].update(server_key=strange["public"])
    )
    for file in (client, server):
        with pytest.raises(StartError, match=rf"no engine of {file} answered within 0.5 s; .* another key"):
            LLM.connect(file, 0.5)
    with LLM.connect([client, save_access(folders[1], tmp_path / "right")]) as llm:  # one of two
        assert llm._service.client.engines == [1]


CHANGES: dict[str, Callable[[bytes], Sequence[bytes]]] = {
    "lost": lambda data: [],
    "lost in part": lambda data: [data[:-9]],
    "twice": lambda data: [data, data],
}


@pytest.mark.parametrize("kind", ["twice", *(pytest.param(kind, marks=slow) for kind in ("lost", "lost in part"))])
def test_link_that_changes_bytes(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a host loses bytes, or brings some twice.

    What was lost is sent again, over a new connection where CURVE has ended the old one; every token comes, once.
    """
    monkeypatch.setattr(deployment_watch, "UNREACHABLE_SECONDS", 30.0)
    numbers, change = count(1), CHANGES[kind]
    site.two_at_each(200)
    for proxy in site.far:
        proxy.change = lambda data: change(data) if next(numbers) % 60 == 0 else [data]
    for stream in site.streams:
        stream.check_finished()
    assert next(numbers) > 60


def test_slow_link(site: Site) -> None:
    """The way to a host takes 200 ms.

    So do its tokens; they come in order, and nothing is sent twice.
    """
    for proxy in (*site.near, *site.far):
        proxy.delay = 0.2
    site.two_at_each(50)
    for stream in site.streams:
        stream.check_finished()


def test_link_that_is_cut_for_a_moment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a host is cut, for less than ten seconds.

    Its requests wait and go on; nothing is lost, and nothing comes twice.
    """
    monkeypatch.setattr(deployment_watch, "UNREACHABLE_SECONDS", 30.0)
    _, far = site.two_at_each(300)
    for proxy in site.far:
        proxy.cut()
    until(lambda: site.llm._service.client.engines == [0], "the news")
    for proxy in site.far:
        proxy.mend()
    for stream in far:
        stream.check_finished()


@pytest.mark.parametrize("seconds", [pytest.param(3.0, marks=slow), pytest.param(30.0, marks=slow)])
def test_link_that_is_cut(
    folders: Sequence[Path], tmp_path: Path, seconds: float, request: pytest.FixtureRequest
) -> None:
    """The way to a host is cut for 30 s.

    After 9.5 s its requests end with `EngineDead`, which names host and engine, or go to other hosts, where they have
    no token yet; new ones go there, too. When the way is there again, so is the host.
    """
    if seconds < 10:
        request.getfixturevalue("quick")
    with client_of(folders, tmp_path) as site:
        near, far = site.two_at_each(4000)
        cut = time.monotonic()
        for proxy in site.far:
            proxy.cut()
        site.check_lost(far)
        for stream in near:
            assert not stream.ends
        until(lambda: time.monotonic() > cut + seconds, "the end of the cut", seconds=60)
        for proxy in site.far:
            proxy.mend()
        site.check_back()


@slow
def test_half_open_link(site: Site) -> None:
    """The way to a host swallows everything, and no connection ends.

    As if it were cut: silence counts, and not what the system says of the connection.
    """
    near, far = site.two_at_each(4000)
    for proxy in site.far:
        proxy.change = lambda data: []
    site.check_lost(far)
    for stream in near:
        assert not stream.ends
    for proxy in site.far:
        proxy.change = lambda data: [data]
    site.check_back()


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A whole host that stands still: its supervisor and its engines."""
    family = [process, *process.children(recursive=True)]
    for each in family:
        each.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in family:
            each.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("clocks", ["quick", pytest.param("real", marks=slow)])
def test_stopped_host(script: str, tmp_path: Path, clocks: str, request: pytest.FixtureRequest) -> None:
    """A host stands still (SIGSTOP to all that runs there).

    Within ten seconds its requests end with `EngineDead`, which names host and engine, or go to other hosts. When it
    goes on it serves again.
    """
    if clocks == "quick":
        request.getfixturevalue("quick")
    create_keys(tmp_path / "keys")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, **host_settings(tmp_path, BOTH, 1)}
    with (
        LLM(script, skip_tokenizer_init=True, **host_settings(tmp_path, BOTH, 0)) as first,
        deployment("wavecore", script, **settings) as (second, process),
    ):
        assert process is not None
        with client_of([first.runtime_dir, second], tmp_path) as site:
            _, far = site.two_at_each(4000)
            with stopped(psutil.Process(process.pid)):
                began = time.monotonic()
                assert all(isinstance(stream.error, EngineDead) for stream in far)
                assert time.monotonic() < began + 10.0
                site.check_lost(far)
            site.check_back()
