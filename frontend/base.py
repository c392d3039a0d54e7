"""What `LLM` and `AsyncLLM` share: how they start or attach, what they know of their model, how they end."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from wavecore.engine_core.api.config import OF_SETTING, EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import Service
from wavecore.frontend.compat import engine_config, from_environment, missing
from wavecore.frontend.progress_bars import StartBar
from wavecore.transport.errors import ConfigError, NotSupportedError
from wavecore.transport.processes import logs
from wavecore.transport.processes.deployment import MAX_ENTRIES
from wavecore.transport.processes.places import AccessFile, Place


def places_of(named: str | Path | Sequence[str | Path]) -> tuple[Place, ...]:
    """Where a user says that engines are found: a runtime directory, an access file, which is read, or several.

    Raises:
        ConfigError: no path, or an access file that cannot be used.
    """
    several = [named] if isinstance(named, str | Path) else OF_SETTING.entries("runtime_dir", named, MAX_ENTRIES)
    paths = [OF_SETTING.path("runtime_dir", each) for each in several]
    if not paths or any(str(path).startswith("tcp:/") for path in paths):
        raise ConfigError(f"runtime_dir {named}: give a directory, or an access file of `wavecore access` in its place")
    return tuple(AccessFile.load(path) if path.is_file() else path for path in paths)


class BaseLLM:
    """A model in an engine process of its own, or one that somebody else started."""

    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        self._start(engine_config({"model": model, **settings}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a whole config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    from_engine_args = from_config  # vLLM's name

    @classmethod
    def connect(
        cls,
        runtime_dir: str | Path | Sequence[str | Path],
        timeout: float = 30.0,
        *,
        tokenizer: str | Path | None = None,
        stage: str = "",
    ) -> Self:
        """A client of a running engine; any number may attach, from any process. `shutdown` only lets go of it.

        Args:
            runtime_dir: as `wavecore engine` prints it, or `LLM.runtime_dir`. From another host, an access file, as
                `wavecore access` writes it. Or several, of engines of one model: requests go to the best of all.
            timeout: seconds until the engine must have answered.
            tokenizer: a folder or tokenizer.json, where the engine's is not on this machine.
            stage: of a `ModelPipeline`, whose stages have a model each.

        Raises:
            ConfigError: an argument that cannot be.
            StartError: nothing runs there, or it does not answer.
            EngineDead: what ran there is over; with the cause.
            ModelError: the tokenizer is not there.
        """
        logs.show(from_environment(["log_level"]).get("log_level", "warning"))
        timeout = OF_SETTING.real("timeout", timeout, 0.0, math.inf, above=True)
        own = None if tokenizer is None else OF_SETTING.path("tokenizer", tokenizer)
        places = places_of(runtime_dir)
        llm = cls.__new__(cls)
        llm._attach(Service(places, None, timeout, own, stage))
        return llm

    def _start(self, config: EngineConfig) -> None:
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, not {type(config).__name__}")
        with StartBar(config.disable_tqdm) as bar:
            self._attach(Service.start(config, bar))

    def _attach(self, service: Service) -> None:
        self._service = service
        self._detach = service.close_when_dropped(self)

    @property
    def runtime_dir(self) -> Path:
        """What other processes of this machine give to `connect`.

        Raises:
            NotSupportedError: this client is attached to an access file, or to several places.
        """
        places = self._service.places
        if len(places) != 1 or isinstance(places[0], AccessFile):
            raise NotSupportedError(f"runtime_dir: attached to {', '.join(map(str, places))}; give others these")
        return places[0]

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._service.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """The model authors' recommendation (generation_config.json), else the defaults."""
        return self._service.default_params

    def has_engine(self) -> bool:
        """Whether an engine takes requests, or is being started again and will."""
        return self._service.client.can_recover()

    def shutdown(self) -> None:
        """End the engine (or let go of an attached one). Idempotent; requests that run fail."""
        self._detach()
        self._service.close()

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name)
