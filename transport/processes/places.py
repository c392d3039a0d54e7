"""Where clients find engines: a runtime directory of this host, or an access file, which any host may have.

An access file is JSON: {"engines": [{"index", "input", "output", "server_key", "stage"}], "resolved": what the engines
resolved at start, "public", "secret": the key pair of the deployment's clients}. Whoever has it may use the engines, so
nobody else may read it. It says where engines listen, and nothing of how they are.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from wavecore.transport.curve import CurveClient, KeyPair, read_secret
from wavecore.transport.errors import ConfigError, ProtocolError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment, EngineEntry, Few, Text

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
        return replace(found, file=str(file), engines=tuple(replace(e, state="ready") for e in found.engines))

    @property
    def pair(self) -> KeyPair:
        return KeyPair(self.public.encode(), self.secret.encode())

    def __str__(self) -> str:
        return self.file


Place = Path | AccessFile


def access_to(runtime_dir: Path) -> str:
    """An access file to the engines of a runtime directory.

    Raises:
        StartError: there is no deployment.
        ConfigError: its engines are not to be reached from other hosts, or not yet.
    """
    found, keys = deployment.read(runtime_dir), runtime_dir / "keys" / "client.key"
    if not all(engine.server_key and engine.input for engine in found.engines):
        raise ConfigError(f"{runtime_dir}: other hosts cannot reach these engines; start them with --address")
    engines = [{name: getattr(engine, name) for name in TOLD} for engine in found.engines]
    pair = {"public": KeyPair.load(keys).public.decode(), "secret": KeyPair.load(keys).secret.decode()}
    return json.dumps({"engines": engines, "resolved": found.resolved, **pair}, indent=1)


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
    numbers = Counter(engine.index for each in found for engine in each.engines)
    if twice := [number for number, count in numbers.items() if count > 1]:
        way_out = "start those of each host with a data_parallel_rank of their own"
        raise ConfigError(f"engine {twice[0]} is at two of {', '.join(map(str, places))}: {way_out}")
    known = [(place, each.resolved) for place, each in zip(places, found, strict=True) if each.resolved]
    models = {str({name: resolved.get(name) for name in SAME}): place for place, resolved in known}
    if len(models) > 1:
        facts = "; ".join(f"{place} {model:.200}" for model, place in models.items())
        raise ConfigError(f"engines of different models cannot share a client: {facts}")
