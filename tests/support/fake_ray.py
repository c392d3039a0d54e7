"""As much of Ray as `engine_core/ray_groups.py` calls: actors are objects of this process, and run in its threads.

What runs in an actor is the real thing: a supervisor with engines as its children.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from wavecore.engine_core import ray_actor, ray_groups


class ActorDiedError(Exception):
    pass


class ActorUnavailableError(Exception):
    pass


DIED = ActorDiedError("The actor died. class_name: Any\nThe actor is dead because its worker process has died.")


class FakeActor:
    """The handle of an actor.

    Attributes:
        silent: methods that never answer.
        unavailable: the next so many answers are `ActorUnavailableError`.
    """

    def __init__(self, instance: Any) -> None:
        self.instance, self.is_dead = instance, False
        self.silent: set[str] = set()
        self.unavailable = 0
        self._open: list[Future[Any]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: SimpleNamespace(future=lambda: self._call(method, *args)))

    def _call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.is_dead:
            future.set_exception(DIED)
        elif self.unavailable:
            self.unavailable -= 1
            future.set_exception(ActorUnavailableError("try again"))
        else:
            self._open.append(future)
            if method not in self.silent:
                threading.Thread(target=self._run, args=(future, method, *args), daemon=True).start()
        return future

    def _run(self, future: Future[Any], method: str, *args: Any) -> None:
        answer = getattr(self.instance, method)(*args)
        with suppress(Exception):  # it died meanwhile
            future.set_result(answer)

    def die(self) -> None:
        """As its process would: its children end, and all calls fail."""
        self.is_dead = True
        for engine in self.instance.entries()["engines"]:
            with suppress(ProcessLookupError):
                os.kill(engine["pid"], signal.SIGKILL)
        self.instance.stop(0.0)
        for future in self._open:
            with suppress(Exception):  # answered
                future.set_exception(DIED)


class FakeRay(ModuleType):
    """Install with `FakeRay.install(monkeypatch, nodes)`.

    Attributes:
        nodes_: of each living node its resources.
        actors: all that were made, also dead ones, in their order.
        silent: methods that no new actor answers.
        inits, shutdowns: arguments of each `init`; how often Ray was shut down.
        options: that each actor was made with.
        own_node: whether the node of this program lives.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]]) -> None:
        super().__init__("ray")
        self.nodes_, self.own_node = list(nodes), True
        self.actors: list[FakeActor] = []
        self.silent: set[str] = set()
        self.inits: list[tuple[Any, ...]] = []
        self.shutdowns = 0
        self.options: list[dict[str, Any]] = []
        self.groups: list[Any] = []  # placement groups that are there
        self.util = ModuleType("ray.util")
        self.util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
        self.util.placement_group = self._placement_group  # type: ignore[attr-defined]
        self.util.remove_placement_group = self.groups.remove  # type: ignore[attr-defined]

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch, nodes: Sequence[Mapping[str, float]]) -> FakeRay:
        ray = cls(nodes)
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = SimpleNamespace  # type: ignore[attr-defined]
        ray.util.scheduling_strategies = strategies  # type: ignore[attr-defined]
        for module in (ray, ray.util, strategies):
            patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(strategies, "PlacementGroupSchedulingStrategy", lambda group, **_: group)
        patch.setattr(ray_actor, "end_with", lambda _: None)  # this process is no node's child
        patch.setattr(ray_groups.RayCluster, "taken", False)
        for name, value in (("MODE", "token"), ("TOKEN", "of a test")):
            patch.setenv(f"RAY_AUTH_{name}", value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        return ray

    def is_initialized(self) -> bool:
        return len(self.inits) > self.shutdowns

    def init(self, *args: Any, **_: Any) -> None:
        self.inits.append(args)

    def shutdown(self) -> None:
        self.shutdowns += 1

    def nodes(self) -> list[dict[str, Any]]:
        living = [{"NodeID": str(i), "Alive": True, "Resources": each} for i, each in enumerate(self.nodes_)]
        return living[0 if self.own_node else 1 :]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0")

    def remote(self, cls: type) -> Any:
        def make(*args: Any) -> FakeActor:
            actor = FakeActor(cls(*args))
            actor.silent |= self.silent
            self.actors.append(actor)
            return actor

        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor) -> None:
        actor.die()

    def _placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        group = SimpleNamespace(bundles=bundles, strategy=strategy)
        self.groups.append(group)
        return group
