"""What a client makes of deployment.json while an engine is not up."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from tests.frontend.client.fake_engine import World
from tests.support.waiting import until

from wavecore.frontend.client import deployment_watch
from wavecore.frontend.client.client import EngineClient
from wavecore.transport.curve import create_keys
from wavecore.transport.errors import ConfigError, ResourceError, StartError, WavecoreError
from wavecore.transport.headroom import descriptors
from wavecore.transport.io.sockets import make_context
from wavecore.transport.processes import deployment


@pytest.mark.parametrize("text", ["", "null", '"ready"', "[" * 100_000, '{"supervisor_pid": 1e999}'])
def test_a_hostile_file_is_a_typed_error_of_connect(tmp_path: Path, text: str) -> None:
    (tmp_path / deployment.FILE).write_text(text)
    with pytest.raises(StartError, match="not a deployment file"):
        EngineClient(tmp_path)


def test_more_engines_than_there_are_descriptors_for_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free, limit = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit - free + 500, hard))
    try:
        with pytest.raises(ResourceError, match=r"a client of 100 engines needs 600 file descriptors.*ulimit -n"):
            World(monkeypatch, engines=100)
        World(monkeypatch, engines=80).client.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_libzmq_has_sockets_for_all_engines_of_a_deployment() -> None:
    with make_context() as context:
        assert context.get(zmq.MAX_SOCKETS) > 4 * deployment.MAX_ENTRIES


def test_engines_that_were_not_there_are_nobodys_business(world: World) -> None:
    world.kill(0)
    entries = world.deployment.value.engines
    strange = replace(entries[0], index=7, input="tcp://127.0.0.1:5", output="tcp://127.0.0.1:6")
    world.deployment.value = replace(world.deployment.value, engines=(strange, *entries))
    assert world.client.can_recover()
    world.pump.new_life(0)
    until(lambda: world.client._watches[0]._planned is None, "the end of the watch")
    assert list(world.pump.addresses) == [0]


def test_an_address_that_cannot_be_used_now_is_tried_again(world: World, tmp_path: Path) -> None:
    """The keys for tcp are missing for a moment, while the engine is found at another address."""
    world.client._watches[0]._place = tmp_path
    world.kill(0)
    public = create_keys(tmp_path / "keys")
    (tmp_path / "keys" / "client.key").rename(tmp_path / "client.key")
    entry = world.deployment.value.engines[0]
    moved = replace(entry, input="tcp://127.0.0.1:5", output="tcp://127.0.0.1:6", server_key=public)
    world.deployment.value = replace(world.deployment.value, engines=(moved,))
    world.client._watches[0].look()
    assert world.pump.addresses[0] == (entry.input, entry.output)
    (tmp_path / "client.key").rename(tmp_path / "keys" / "client.key")
    until(lambda: world.client.engines, "the engine at its new address")
    assert world.pump.addresses[0] == (moved.input, moved.output)


def test_an_address_that_can_never_be_used_fails_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"client\.key: No such file"):
        World(monkeypatch, server_key="x" * 40)


class Unreadable:
    """A deployment.json whose reading fails while `now` is true."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, error: WavecoreError) -> None:
        self.now, self._world, self._error = True, world, error
        monkeypatch.setattr(world.deployment, "read", self.read)

    def read(self, runtime_dir: Path) -> deployment.Deployment:
        if self.now:
            raise self._error
        return self._world.deployment.value


def test_a_file_that_is_missing_for_a_moment_is_not_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Unreadable(world, monkeypatch, StartError("no deployment: it has been stopped"))
    monkeypatch.setattr(deployment_watch, "GONE_SECONDS", 60.0)
    mailbox = world.submit()
    world.kill(0)
    assert world.notifier.wait(0.1) is None  # nothing is known of its end yet
    assert world.client.can_recover()
    missing.now = False
    until(lambda: not world.client.engines and world.client._engines[0].error, "the end of the engine")
    world.pump.new_life(0)
    assert len(world.pump.adds()) == 2  # without a token, so it was sent again
    missing.now = True
    monkeypatch.setattr(deployment_watch, "GONE_SECONDS", 0.05)
    world.kill(0)
    assert world.notifier.wait(30) is mailbox
    until(lambda: not world.client.can_recover())


def test_a_file_that_cannot_be_read_for_want_of_descriptors_says_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = Unreadable(world, monkeypatch, ResourceError("Too many open files"))
    monkeypatch.setattr(deployment_watch, "GONE_SECONDS", 0.0)
    mailbox = world.submit()
    world.kill(0)
    assert world.notifier.wait(0.1) is None
    assert world.client.can_recover()
    starved.now = False
    until(lambda: not world.client.engines and world.client._engines[0].error, "the end of the engine")
    world.pump.new_life(0)
    until(lambda: len(world.pump.adds()) == 2, "the request, sent again")
    assert not mailbox.ended
