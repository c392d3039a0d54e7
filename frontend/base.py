"""What `LLM` and `AsyncLLM` share: how they start or attach, what they know of their model, how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import Service
from wavecore.frontend.compat import engine_config, refused
from wavecore.frontend.progress_bars import StartBar
from wavecore.transport.errors import ConfigError


class BaseLLM:
    """A model in an engine process of its own, or one that somebody else started."""

    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        self._start(engine_config({"model": str(model), **settings}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a whole config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    from_engine_args = from_config  # vLLM's name

    @classmethod
    def connect(cls, runtime_dir: str | Path, timeout: float = 30.0) -> Self:
        """A client of a running engine; any number may attach, from any process. `shutdown` only lets go of it.

        Args:
            runtime_dir: as `wavecore engine` prints it, or `LLM.runtime_dir`.
            timeout: seconds until the engine must have answered.

        Raises:
            StartError: nothing runs there, or it does not answer.
            EngineDead: what ran there is over; with the cause.
        """
        if not isinstance(runtime_dir, str | Path):
            raise ConfigError(f"runtime_dir must be the path of a runtime directory, not {runtime_dir!r:.60}")
        llm = cls.__new__(cls)
        llm._attach(Service(Path(runtime_dir), None, timeout))
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
        """What other processes give to `connect`."""
        return self._service.runtime_dir

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
        raise refused("methods", name) or AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
