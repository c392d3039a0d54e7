"""Engines in Ray actors: where they are placed, what is heard of them, and where a lost one goes.

A `RayGroup` stands in the supervisor of the driver (the program that starts the engines) for the group that an actor
runs on some node. So `deployment.json` is written as for engines of one host, and clients see no difference. Ray places
actors and says when one is lost; when it is started again is decided here, by the rules of `processes/group.py`.

No byte of a request passes through Ray. Its listeners are not ours and are on every interface: a private Ray, and every
cluster that has engines without `ray_without_token`, asks for a token.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wavecore.engine_core.api.children import groups_of
from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import Placement
from wavecore.engine_core.ray_actor import DPEngineCoreActor
from wavecore.transport.curve import KeyPair
from wavecore.transport.errors import ConfigError, StartError
from wavecore.transport.processes.deployment import Cause, EngineEntry, from_plain
from wavecore.transport.processes.group import EngineGroup, GroupContext, Limits
from wavecore.transport.processes.process import ChildSpec, python_path
from wavecore.transport.processes.supervisor import Supervisor
from wavecore.transport.version import VERSION
from wavecore.transport.waker import Waker

ACTOR_THREADS = 8  # of one actor: `ready` and `stop` keep one each
JOIN_SECONDS = 20.0
KEYS_FOR_CLIENTS = "tcp://127.0.0.1"  # the driver listens nowhere; having an address, it makes keys for its clients
MAX_REASON = 500  # characters of what Ray says
OBJECT_STORE_BYTES = 100 << 20  # of a private Ray; nothing is put there
SILENT_SECONDS = 8.0  # clients give up after 10, and shall hear why


def make_ray_supervisor(config: EngineConfig, limits: Limits) -> Supervisor:
    """A supervisor of engines in Ray actors, not started yet.

    Raises:
        ConfigError: Ray is not installed.
    """
    cluster = RayCluster(config)
    own: dict[str, Any] = {name: _absolute(getattr(config, name)) for name in ("model", "tokenizer", "keys")}
    own |= {"data_parallel_backend": "mp", "ray_address": None, "runtime_dir": None}
    own["address"] = KEYS_FOR_CLIENTS  # until an actor puts its node's there
    ranks = [Placement("", config.device, {})] * config.tensor_parallel_size
    groups: list[list[ChildSpec]] = []
    for index in range(config.data_parallel_size):
        of_one: dict[str, Any] = {"data_parallel_rank": index} if config.dp_lockstep else {"data_parallel_size": 1}
        groups += groups_of(replace(config, **own, **of_one), [ranks], "", iter([index]))
    return Supervisor(
        groups,
        runtime_dir=config.runtime_dir,
        address=KEYS_FOR_CLIENTS,
        keys=own["keys"],
        limits=limits,
        make_group=cluster.make_group,
    )


def needs(config: EngineConfig, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What one engine asks Ray for: a GPU a rank, or a CPU a rank where it computes on CPUs.

    Args:
        nodes: of each living node what it has, as Ray counts it.
    """
    on_cpu = config.device == "cpu" or config.is_scripted
    if config.device == "auto" and not any(node.get("GPU") for node in nodes):
        on_cpu = True
    return {"CPU" if on_cpu else "GPU": float(config.tensor_parallel_size)}


def check_fits(config: EngineConfig, asked: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises:
    ConfigError: even an idle cluster has no room for all engines, or no such place for them to meet; with what is asked
        for and what is there.
    """
    meeting = meeting_node(config)
    if meeting and not any(meeting in node for node in nodes):
        names = {name.removeprefix("node:") for node in nodes for name in node if name.startswith("node:")}
        there = ", ".join(sorted(names - {"__internal_head__"})) or "none"
        raise ConfigError(f"data_parallel_address {config.data_parallel_address}: Ray's nodes are {there}")
    room = sum(min(int(node.get(name, 0.0) // amount) for name, amount in asked.items()) for node in nodes)
    if room < config.data_parallel_size:
        present = "; ".join(_resources({name: node.get(name, 0.0) for name in asked}) for node in nodes) or "no node"
        raise ConfigError(
            f"Ray has room for {room} of {config.data_parallel_size} engines (data_parallel_size), which ask for "
            f"{_resources(asked)} each, on one node (tensor_parallel_size); its nodes have: {present}; lower either "
            "size, or add nodes"
        )


def _resources(found: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in found.items())


def meeting_node(config: EngineConfig) -> str | None:
    """Ray's name for the node where engines in lockstep meet, which is a resource of that node alone."""
    address = config.data_parallel_address if config.dp_lockstep else None
    return address and f"node:{address.removeprefix('tcp://').rpartition(':')[0].strip('[]')}"


def _absolute(path: str | None) -> str | None:
    """A file of this program's folder by its whole name: an actor runs in another one."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


class RayCluster:
    """This program's connection to Ray for one deployment. Used by its supervisor's thread alone, which outlives what
    Ray starts with it.

    Raises:
        ConfigError: Ray is not installed.
    """

    taken = False  # a deployment of this program made the connection, of which a program has one

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"data_parallel_backend ray: {error}; pip install 'wavecore[ray]'") from None
        self.ray: Any = ray
        self._config = config
        self._asked: dict[str, float] = {}
        self._groups = 0  # that are not destroyed
        self._owns = False

    def make_group(self, index: int, specs: Sequence[ChildSpec], context: GroupContext) -> RayGroup:
        """As `Group(...)`; the first one joins the cluster.

        Raises:
            ConfigError: the cluster may not be joined, or can never hold the engines.
            StartError: no Ray there.
        """
        if not self._groups:
            context.on_phase(index, "ray", 0.0)
            self._join()
        self._groups += 1
        return RayGroup(self, index, specs, context)

    def leave(self) -> None:
        """A group has been destroyed; the last one closes the connection, if it is ours."""
        self._groups -= 1
        if self._groups <= 0 and self._owns:
            self._owns = RayCluster.taken = False
            self.ray.shutdown()

    def place(self, config: str, index: int, client_key: str, limits: Limits) -> tuple[Any, Any]:
        """A new actor with room for one engine, which Ray may still have to find.

        Args:
            config: of the engine, as JSON; for the others see `DPEngineCoreActor`. Engine 0 of those in lockstep is put
                where they meet.

        Returns:
            The actor, and its placement group.
        """
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        device = "cuda" if "GPU" in self._asked else "cpu"
        plain = replace(EngineConfig.from_json(config), device=device).to_json()
        meeting = None if index else meeting_node(self._config)
        group = placement_group([self._asked | ({meeting: 0.001} if meeting else {})], strategy="STRICT_PACK")
        actor = self.ray.remote(DPEngineCoreActor).options(
            num_cpus=self._asked.get("CPU", 0),
            num_gpus=self._asked.get("GPU", 0),
            max_restarts=0,  # we decide: `Backoff`
            max_concurrency=ACTOR_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return actor.remote(VERSION, index, plain, client_key, asdict(limits)), group

    def is_lost(self) -> bool:
        """Whether the node of this program itself has died: Ray does nothing more for it."""
        own = self.ray.get_runtime_context().get_node_id()
        return not any(node["NodeID"] == own and node["Alive"] for node in self.ray.nodes())

    def _join(self) -> None:
        address = self._config.ray_address
        if self.ray.is_initialized():
            if RayCluster.taken:
                way_out = "call ray.init() before both"
                raise ConfigError(f"another deployment of this program owns its connection to Ray; {way_out}")
        else:
            self._owns = RayCluster.taken = True
            try:
                self._join_at(address) if address else self._start_private()
            except Exception as error:
                self.leave()
                no_ray = f"no Ray at {address}, waited {JOIN_SECONDS:g} s at most" if address else "no private Ray"
                raise StartError(f"{no_ray}: {error!r}"[:MAX_REASON]) from error
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self._asked = needs(self._config, nodes)
        try:
            check_fits(self._config, self._asked, nodes)
        except ConfigError:
            self.leave()
            raise

    def _start_private(self) -> None:
        # Ray asks for a token by itself; where it is told none, it writes one into the user's home. It reads it once.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))  # its processes choose their folder
        sizes = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        self.ray.init("local", logging_level=logging.ERROR, **sizes)

    def _join_at(self, address: str) -> None:
        joined: Future[Any] = Future()  # in a thread, as Ray tries for minutes, whatever is there
        threading.Thread(target=self._connect, args=(address, joined), name="join Ray", daemon=True).start()
        joined.result(JOIN_SECONDS)

    def _connect(self, address: str, joined: Future[Any]) -> None:
        try:
            joined.set_result(self.ray.init(address, logging_level=logging.ERROR))
        except Exception as error:
            joined.set_exception(error)


class RayGroup(EngineGroup):
    """One engine in an actor, as `Group` is one in processes of this host.

    Args:
        cluster: where it is placed.
        index, specs, context: as of `Group`.
    """

    def __init__(self, cluster: RayCluster, index: int, specs: Sequence[ChildSpec], context: GroupContext) -> None:
        super().__init__((EngineEntry(index),), context)
        self._cluster, self._spec = cluster, specs[0]
        self._client_key = KeyPair.load(context.runtime_dir / "keys" / "client.key").public.decode()
        self._waker = Waker()
        context.selector.register(self._waker.fd, selectors.EVENT_READ, self._on_answer)
        self._actor: Any = None  # of this life
        self._place: Any = None
        self._answers: dict[str, Future[Any]] = {}  # of each method that was called, until it is taken
        self._phase = "place"
        self._is_ready = False  # this life is
        self._restarts = 0  # of all lives before this actor's
        self._silent_at = math.inf

    def spawn(self) -> None:
        self._spawn_at = self._silent_at = math.inf
        self._ready_by = time.monotonic() + self._limits.ready
        self._phase, self._restarts = "place", self.entries[0].restarts
        self._change(state="restarting" if self._was_ready else "starting")
        try:
            told = self._spec.config, self.entries[0].index, self._client_key, self._limits
            self._actor, self._place = self._cluster.place(*told)
            self._ask("ready")
            self._ask("entries")
        except Exception as error:  # Ray's own, of any kind
            self._lost(f"Ray took no actor: {error}")

    def stop(self, drain: float) -> None:
        self._stopping, self._spawn_at = True, math.inf
        if self._actor is None or self._silent_at == math.inf:  # nowhere, or still looked for room for
            self._drop()
            self._change(state="stopped")
            return
        self._ask("stop", drain)
        self._kill_at = min(self._kill_at, time.monotonic() + drain + self._limits.grace)
        self._change(state="draining")

    def destroy(self) -> None:
        """End the engine at once; in order if the actor answers, so that it leaves no files."""
        if self._actor is not None:
            with contextlib.suppress(Exception):
                wait([self._ask("stop", 0.0)], self._limits.grace)
        self._drop()
        self._context.selector.unregister(self._waker.fd)
        self._waker.close()
        self._cluster.leave()

    def tick(self) -> None:
        now = time.monotonic()
        if self._actor is None:
            if now >= self._spawn_at:
                self._change(restarts=self.entries[0].restarts + 1)
                self.spawn()
        elif now >= self._kill_at:
            self._lost("it did not end in time")
        elif now >= self._silent_at:
            self._lost(f"it has not answered for {SILENT_SECONDS:g} s")
        elif now >= self._ready_by:
            late = f"it was not ready after {self._limits.ready:g} s (phase: {self._phase})"
            self._lost(f"{late}; {self._spec.slow_start_advice}, or see `ray status` for what else has its place")
        elif self._silent_at == math.inf and self._cluster.is_lost():
            message = f"the Ray node of the program that starts {self._spec.name} has died; start the program again"
            self._died(Cause("engine_dead", message, self._phase), for_good=True)
        elif "entries" not in self._answers:
            self._ask("entries")

    def _ask(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = getattr(self._actor, method).remote(*args).future()
        self._answers[method] = future
        future.add_done_callback(lambda _: self._waker.wake())
        return future

    def _on_answer(self) -> None:
        self._waker.clear()
        for method in [name for name, future in self._answers.items() if future.done()]:
            try:
                if future := self._answers.pop(method, None):  # an answer before it may have been the actor's end
                    self._take(method, future.result())
            except Exception as error:
                if type(error).__name__ != "ActorUnavailableError":  # of this moment: it may answer again
                    text = str(error)
                    self._lost(" ".join(text.partition("The actor is dead because ")[2].split() or text.split()))

    def _take(self, method: str, answer: Any) -> None:
        if method == "stop":
            self._drop()
            self._change(state="stopped")
        elif method == "entries":
            self._hear(answer)
        elif "failed" in answer:
            self._died(from_plain(Cause, answer["failed"]))
        else:
            self._is_ready = self._was_ready = True
            self._ready_by, self.resolved = math.inf, answer["resolved"]
            self._hear(answer)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self._silent_at = time.monotonic() + SILENT_SECONDS
        self._phase = answer["phase"]
        if not self._is_ready:
            self._context.on_phase(self.entries[0].index, self._phase, answer["fraction"])
        elif answer["state"] == "stopped" and not self._stopping:
            self._lost("its supervisor has ended")
        else:
            entry, before = from_plain(EngineEntry, answer["engines"][0]), self.entries[0]
            last = entry.last_cause or before.last_cause
            self.entries = (replace(entry, restarts=self._restarts + entry.restarts, last_cause=last),)

    def _lost(self, reason: str) -> None:
        """The actor is gone, or of no use any more."""
        where = f" at {self.entries[0].input}" if self._is_ready else ""
        message = f"{self._spec.name}: its Ray actor{where} was lost: {reason}"[:MAX_REASON]
        self._died(Cause("start" if not self._is_ready else "engine_dead", message, self._phase))

    def _died(self, cause: Cause, for_good: bool = False) -> None:
        """This life is over. Plan the next one, or give up."""
        was_ready, self._is_ready = self._is_ready, False
        self._drop()
        if self._stopping:
            self._change(state="stopped", cause=cause)
        elif not self._was_ready:  # `start` raises it
            self._change(state="failed", cause=cause)
            self.failure = cause.as_error()
        elif for_good:
            self._change(state="failed", cause=cause, last_cause=cause)
        else:
            self._spawn_at, changed = self._backoff.plan(self._spec.name, cause, was_ready)
            self._change(**changed)

    def _drop(self) -> None:
        """End the actor, its children with it, and give its place back."""
        from ray.util import remove_placement_group

        self._answers.clear()
        self._ready_by = self._kill_at = self._silent_at = math.inf
        if self._actor is not None:
            with contextlib.suppress(Exception):  # Ray itself may be gone
                self._cluster.ray.kill(self._actor)
                remove_placement_group(self._place)
        self._actor = self._place = None

    def _change(self, **values: Any) -> None:
        self.entries = (replace(self.entries[0], **values),)
