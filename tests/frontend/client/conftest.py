"""A client with fake engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.frontend.client.fake_engine import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.client.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch, engines=2)
    yield world
    world.client.close()
