"""Where clients find engines: a runtime directory of this host, or an access file, which any host may have.

An access file is JSON: {"engines": [{"index", "input", "output", "server_key", "stage"}], "resolved": what the engines
resolved at start, "public", "secret": the key pair of the deployment's clients}. Whoever has it may use the engines, so
nobody else may read it. It says where engines listen, and nothing of how they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from wavecore.transport.addresses import parse_address
from wavecore.transport.curve import CurveClient, KeyPair, read_secret
from wavecore.transport.errors import ConfigError, ProtocolError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment, EngineEntry, Few, Text
from wavecore.transport.wire.checks import table

TOLD = ("index", "input", "output", "server_key", "stage")
SAME = ("vocab_size", "hidden_size", "eos_token_ids")  # what a client makes requests by


@dataclass(frozen=True, slots=True)
class AccessFile:
    """What an access file says, read once.

    Attributes:
        file: its name, for people.
    """

    engines: Annotated[tuple[EngineEntry, ...], Few]
    resolved: Mapping[str, Any]
    public: Text
    secret: Text = field(repr=False)
    file: Text = ""

    def __post_init__(self) -> None:
        table(self.resolved)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Raises:
        ConfigError: it cannot be read, or others can, or it is no access file.
        """
        try:
            found = deployment.from_plain(cls, deployment.parse_json(read_secret(file, deployment.MAX_BYTES)))
        except ProtocolError as error:
            raise ConfigError(f"{file} is no access file ({error}): make one with `wavecore access`") from None
        if not found.engines or not found.pair.is_pair:
            raise ConfigError(f"{file} is damaged, it has no engine or no keys: make it again with `wavecore access`")
        for address in (end for engine in found.engines for end in (engine.input, engine.output)):
            if parse_address(address) != "tcp":
                raise ConfigError(f"{file}: {address} is no address of tcp")
        return replace(found, file=str(file), engines=tuple(replace(e, state="ready") for e in found.engines))

    @classmethod
    def of(cls, runtime_dir: Path) -> Self:
        """To the engines of a runtime directory.

        Raises:
            StartError: there is no deployment.
            ConfigError: its engines are not to be reached from other hosts, or not yet.
        """
        found = deployment.read(runtime_dir)
        if not all(engine.server_key and engine.input for engine in found.engines):
            raise ConfigError(f"{runtime_dir}: other hosts cannot reach these engines; start them with --address")
        keys = KeyPair.load(runtime_dir / "keys" / "client.key")
        return cls(found.engines, found.resolved, keys.public.decode(), keys.secret.decode())

    @property
    def pair(self) -> KeyPair:
        return KeyPair(self.public.encode(), self.secret.encode())

    def to_json(self) -> str:
        engines = [{name: getattr(engine, name) for name in TOLD} for engine in self.engines]
        told = {"engines": engines, "resolved": self.resolved, "public": self.public, "secret": self.secret}
        return json.dumps(told, indent=1)

    def __str__(self) -> str:
        return self.file


Place = Path | AccessFile


def read_place(place: Place) -> Deployment:
    """The deployment there. An access file's is "ready", and so are its engines, whatever became of them.

    Raises:
        StartError, ResourceError: as `deployment.read`.
    """
    if isinstance(place, AccessFile):
        return Deployment("ready", 0, place.engines, place.resolved)
    return deployment.read(place)


def curve_of(place: Place, engine: EngineEntry) -> CurveClient | None:
    """The keys to talk to an engine; None on ipc.

    Raises:
        ConfigError: there are none of ours.
    """
    if isinstance(place, AccessFile):
        return CurveClient(engine.server_key.encode(), place.pair)
    return CurveClient.load(place / "keys" / "client.key", engine.server_key) if engine.server_key else None


def check_alike(places: Sequence[Place], found: Sequence[Deployment]) -> None:
    """Whether one client may use the engines of all these places.

    Raises:
        ConfigError: engines of two places have the same number, or another model.
    """
    owners: dict[int, Place] = {}
    for place, each in zip(places, found, strict=True):
        for name in SAME if each.resolved and found[0].resolved else ():
            if (here := each.resolved.get(name)) != (first := found[0].resolved.get(name)):
                another = f"{name} is {here!r:.80} there and {first!r:.80} in {places[0]}"
                raise ConfigError(f"{place} has another model than {places[0]}: {another}")
        for engine in each.engines:
            if (other := owners.setdefault(engine.index, place)) is not place:
                both = f"engine {engine.index} is in {other} and in {place}"
                raise ConfigError(f"{both}: start each host's with a data_parallel_rank of its own")
