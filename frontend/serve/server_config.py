"""The settings of the server, as the process that binds the port hands them to the processes that serve it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from wavecore.transport.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the API processes of one server.

    Attributes:
        attach: the runtime directory of the engines.
        api_keys: who gives one of them may enter; empty lets everybody in.
        chat_template: jinja2 text in place of the model's.
        max_body_bytes: of a request; a larger one is refused while it is read.
        write_timeout: seconds without progress after which a reader that stopped is cut off.
        shutdown_timeout: seconds for running requests to finish at the end.
        index: number of the API process.
        metrics_compat: "vllm" shows vLLM's names in /metrics as well, "none" ours alone.
        ssl_keyfile, ssl_certfile: files in PEM form; both or none.
    """

    attach: str
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    max_body_bytes: int = 32 << 20
    write_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    index: int = 0
    metrics_compat: str = "vllm"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "api_keys", tuple(self.api_keys))
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both or none")
        if self.metrics_compat not in ("vllm", "none"):
            raise ConfigError(f"metrics_compat must be vllm or none, not {self.metrics_compat!r:.80}")
        for name in ("max_body_bytes", "write_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`."""
        return cls(**json.loads(text))
