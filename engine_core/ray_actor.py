"""DPEngineCoreActor: one data-parallel rank in a Ray actor. Knows no placement, and asks Ray for its node's address
alone; `ray_groups.py` creates it and listens to it.

The actor computes nothing. It is a supervisor's program: engine and workers are its children, exactly as on one host,
so a crash of native code ends a child and not the actor, and the child is started again there.

What it is told and answers are plain values, so that a node with another version of this package can say so.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from wavecore.engine_core.api.children import groups_of
from wavecore.engine_core.api.config import MEMORY_ADVICE, EngineConfig
from wavecore.engine_core.api.devices import places
from wavecore.transport.errors import ConfigError, as_wavecore_error
from wavecore.transport.processes import logs
from wavecore.transport.processes.child import end_with
from wavecore.transport.processes.deployment import Cause
from wavecore.transport.processes.supervisor import Limits, Supervisor
from wavecore.transport.version import VERSION


class DPEngineCoreActor:
    """Its methods are called in threads of their own, `stop` and `entries` also while `ready` waits.

    Args:
        version: of the driver's wavecore.
        index: number of the engine in the deployment.
        config: of this engine alone, as EngineConfig.to_json() gives it.
        client_key: public CURVE key of the deployment's clients.
        limits: fields of supervisor.Limits.
    """

    def __init__(self, version: str, index: int, config: str, client_key: str, limits: Mapping[str, float]) -> None:
        self._version, self._index, self._config = version, index, config
        self._client_key, self._limits = client_key, limits
        self._supervisor: Supervisor | None = None
        self._phase, self._fraction = "start", 0.0
        # Ray's own watch over its node takes whoever adopts orphans (PR_SET_CHILD_SUBREAPER) for a living node.
        node = os.pidfd_open(os.getppid())
        threading.Thread(target=end_with, args=(node,), name="node watch", daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """Start the engine, and wait until it serves or cannot. Call it once.

        Returns:
            As `entries`, with "resolved", what the engine resolved at start; or {"failed": fields of deployment.Cause}.
        """
        try:
            self._supervisor = self._make_supervisor()
            self._supervisor.start(self._on_phase)
        except Exception as error:  # an error of ours would not survive the way back: Ray rebuilds it from its args
            known = as_wavecore_error(error, MEMORY_ADVICE)
            entries = self._supervisor.deployment().engines if self._supervisor else ()
            told = next((entry.cause for entry in entries if entry.cause), None)
            return {"failed": asdict(told or Cause(known.code, str(known), self._phase))}
        return self.entries() | {"resolved": dict(self._supervisor.deployment().resolved)}

    def entries(self) -> dict[str, Any]:
        """How things stand.

        Returns:
            "phase" and "fraction" of the start; "state" of the deployment of this one engine; "engines": fields of its
            deployment.EngineEntry, in a list, which is empty before the start.
        """
        found = self._supervisor.deployment() if self._supervisor else None
        engines = [asdict(entry) for entry in found.engines] if found else []
        state = found.state if found else "starting"
        return {"phase": self._phase, "fraction": self._fraction, "state": state, "engines": engines}

    def stop(self, drain: float) -> None:
        """End the engine; see Supervisor.stop."""
        if self._supervisor is not None:
            self._supervisor.stop(drain)

    def _make_supervisor(self) -> Supervisor:
        import ray

        host = ray.util.get_node_ip_address()
        if self._version != VERSION:
            both = f"node {host} has wavecore {VERSION}, and the program that starts the engines {self._version}"
            raise ConfigError(f"{both}; install the same on all nodes")
        config = EngineConfig.from_json(self._config)
        if os.environ.get("RAY_AUTH_MODE") != "token" and not config.ray_without_token:  # of the node, which starts us
            open_to_all = f"Ray on node {host} asks for no token: whoever reaches one of its ports runs code there"
            raise ConfigError(f"{open_to_all}; start it with RAY_AUTH_MODE=token, or give ray_without_token")
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        config = replace(config, address=address)
        logs.show(config.log_level)
        return Supervisor(
            groups_of(config, places(config), "", iter([self._index])),
            address=address,
            keys=config.keys,
            limits=Limits(**self._limits),
            first=self._index,
            client_key=self._client_key,
        )

    def _on_phase(self, _index: int, phase: str, fraction: float) -> None:
        self._phase, self._fraction = phase, fraction
