"""`deployment.json`: what runs, where it listens and what happened to it. All that a client needs to attach.

The supervisor alone writes it, atomically, before anything else learns of a change. A reader need not trust it when
the supervisor is gone: `read` asks the lock that lives exactly as long as the supervisor.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import psutil

from wavecore.transport.errors import (
    ProtocolError,
    RequestError,
    ResourceError,
    StartError,
    WavecoreError,
    from_code,
)
from wavecore.transport.processes.runtime_dir import LOCK, is_held
from wavecore.transport.small_files import read_small
from wavecore.transport.wire.checks import MAX_TEXT, table

FILE = "deployment.json"
SCRATCH = f".{FILE}"
MAX_BYTES = 1 << 24
MAX_ENTRIES = 1024  # of engines, of an engine's ranks, and of lines in a log's tail
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Whole = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Few = msgspec.Meta(max_length=MAX_ENTRIES)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an engine ended.

    Attributes:
        code: a code of transport.errors, or "signal", "exit", "stuck", "deadline".
        message: a full sentence: what, why, what next.
        phase: what the engine was doing ("load", "serve", ...).
        rank: which of its ranks failed first; the others were ended because of that.
        signal, status: how the process ended; 0 and -1 when it does not apply.
        log_tail: its last lines of output.
    """

    code: Text
    message: Text
    phase: Text = ""
    rank: Whole = 0
    signal: Whole = 0
    status: Whole = -1
    traceback: Text = ""
    log_tail: Annotated[tuple[Text, ...], Few] = ()

    def located(self, who: str = "") -> Cause:
        """With who it was and in which phase in its message, of which alone clients learn."""
        where = f" (while: {self.phase})" if self.phase else ""
        return replace(self, message=f"{who}{self.message}{where}")

    def as_error(self) -> WavecoreError:
        """What a start raises: the child's own error where it is one of the tree, else a StartError with all that is
        known."""
        error = from_code(self.code, self.message)
        if type(error) in (RequestError, WavecoreError):  # "signal", "exit", "internal", ...
            error = StartError(self.message)
            error.add_note(self.traceback or "\n".join(("Its last output:", *self.log_tail[-20:])))
        return error


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One process of an engine.

    Attributes:
        device: what it computes on, for people: "GPU 1", "GPU-8f3a2c1e", "cpu".
        state: starting, ready, or ended.
        seconds: that each phase of its start took, once it is ready.
        host: of an engine over several hosts, this rank's; its own host alone knows more of it.
    """

    rank: Whole
    pid: Whole = 0
    device: Text = ""
    state: Text = "starting"
    seconds: Annotated[Mapping[Text, float], Few] = field(default_factory=dict)
    host: Text = ""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine.

    Attributes:
        state: starting, ready, draining, waiting (it died and waits for its next start), restarting, stopped, failed
            (stays down), or dead (with its supervisor).
        pid: of rank 0.
        epoch: hex of the life that `state` speaks of; empty until ready.
        input, output: endpoints; kept over restarts.
        server_key: CURVE public key, empty on ipc.
        cause: of its last death, kept until it is ready again.
        restarts: how often it was started again.
        ranks: the processes of its present or last life.
        last_cause: of its last death, also when it is ready again.
        stage: of a pipeline, whose stages have a model each; empty in a deployment of one model.
    """

    index: Whole
    state: Text = "starting"
    pid: Whole = 0
    epoch: Text = ""
    input: Text = ""
    output: Text = ""
    server_key: Text = ""
    cause: Cause | None = None
    restarts: Whole = 0
    ranks: Annotated[tuple[RankEntry, ...], Few] = ()
    last_cause: Cause | None = None
    stage: Text = ""

    @property
    def host(self) -> str:
        """Where it listens, over tcp; empty on ipc, and before its start."""
        return self.input.removeprefix("tcp://").rpartition(":")[0] if self.input.startswith("tcp:") else ""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything in the file.

    Attributes:
        state: starting, ready, draining, stopped, failed (every engine is), degraded (some do not serve now), or dead
            (the supervisor is).
        resolved: what the engines resolved at start (model, lengths, block counts); of a pipeline, its first stage.
        started: unix seconds.
    """

    state: Text
    supervisor_pid: Whole
    engines: Annotated[tuple[EngineEntry, ...], Few]
    resolved: Mapping[str, Any] = field(default_factory=dict)
    started: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0

    def __post_init__(self) -> None:
        table(self.resolved)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """What another process wrote, whatever it is.

    Raises:
        ProtocolError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None


def from_plain(cls: type[T], value: Any) -> T:
    """A dataclass, such as those above, from the object that JSON made of it. What a newer version adds is skipped.

    Raises:
        ProtocolError: a value is missing or of another kind.
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from None


def overall(engines: tuple[EngineEntry, ...]) -> str:
    """The deployment's state while its supervisor lives."""
    states = {e.state for e in engines}
    if "starting" in states:
        return "starting"
    return next(iter(states)) if len(states) == 1 and not states & {"waiting", "restarting"} else "degraded"


def write(runtime_dir: Path, deployment: Deployment) -> None:
    """Replace the file in one step, so that a reader sees the old text or the new one."""
    scratch = runtime_dir / SCRATCH
    scratch.write_text(deployment.to_json())
    scratch.rename(runtime_dir / FILE)


def read(runtime_dir: str | Path) -> Deployment:
    """The deployment in a runtime directory.

    Raises:
        StartError: there is none, or the file is not one of ours.
        ResourceError: this process has no descriptor left to read it.
    """
    path = Path(runtime_dir) / FILE
    try:
        deployment = from_plain(Deployment, parse_json(read_small(path, MAX_BYTES)))
    except FileNotFoundError:
        raise StartError(
            f"no deployment at {path}: it was never started or has been stopped; start one with `wavecore engine`"
        ) from None
    except (OSError, ValueError, ProtocolError) as error:  # ValueError: a NUL in the path
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # says nothing of the file
            raise ResourceError(f"cannot read {path}: {error.strerror}; close some, or raise `ulimit -n`") from error
        raise StartError(
            f"{path} is not a deployment file ({error}); name the runtime directory of a running engine"
        ) from error
    # A fork of the supervisor's program that outlives it has the lock, too. A lock that a cleaner took is made again.
    if psutil.pid_exists(deployment.supervisor_pid) and (is_held(path.parent) or not (path.parent / LOCK).exists()):
        return deployment
    gone = Cause(
        "engine_dead",
        f"the supervisor (pid {deployment.supervisor_pid}) of {path.parent} is gone and its engines with it; "
        "start the deployment again",
    )
    return replace(deployment, state="dead", engines=tuple(_dead(engine, gone) for engine in deployment.engines))


def _dead(engine: EngineEntry, gone: Cause) -> EngineEntry:
    ranks = tuple(replace(rank, state="ended") for rank in engine.ranks)
    return replace(engine, state="dead", cause=engine.cause or gone, ranks=ranks)


def running() -> list[Path]:
    """The runtime directories of this user's running deployments, wherever they lie: a supervisor has the lock open."""
    files = [file.path for process in psutil.process_iter(["open_files"]) for file in process.info["open_files"] or ()]
    found = {Path(file).parent for file in files if file.endswith(f"/{LOCK}")}
    ours = (path for path in found if (path / FILE).exists() and path.stat().st_uid == os.geteuid())
    return sorted(path for path in ours if is_held(path))


def why_dead(runtime_dir: str | Path, index: int, epoch: bytes) -> Cause | None:
    """The cause of death of the life `epoch` of an engine; None while nothing says that it is over.

    For a client whose connection broke. The supervisor writes the cause within milliseconds, but maybe after the
    client noticed: look again.
    """
    try:
        entry = next((e for e in read(runtime_dir).engines if e.index == index), None)
    except ResourceError:
        return None
    except StartError:
        return Cause("engine_dead", f"the deployment in {runtime_dir} was stopped; what it had not finished is lost")
    if entry is not None and entry.state not in ("stopped", "failed", "dead"):
        # Another life may be an earlier one, if the disk was full when ours began; a later one says so itself (READY).
        well = entry.epoch != epoch.hex() or entry.state in ("starting", "ready", "draining")
        return None if well else entry.cause
    stopped = Cause("engine_dead", f"engine {index} was stopped; what it had accepted and not finished is lost")
    return entry.cause or stopped if entry else stopped
