"""The settings of the server, as the process that binds the port hands them to the processes that serve it."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import msgspec

from wavecore.engine_core.api.config import ABOVE_ZERO, FROM_ZERO, OF_SETTING
from wavecore.engine_core.api.fields import Bounds, field_checks, make_plain
from wavecore.transport.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the API processes of one server.

    Attributes:
        attach: where the engines are found: runtime directories and access files.
        runtime_dir: folder of the operator's sockets; empty for the first of `attach`.
        api_keys: who gives one of them may enter; empty lets everybody in.
        chat_template: jinja2 text in place of the model's.
        max_body_bytes: largest request; a larger one is refused while it is read.
        write_timeout: seconds until a reader that takes nothing is cut off.
        shutdown_timeout: seconds for running requests to finish at the end.
        tokenizer: a folder or tokenizer.json; None takes the engines'.
        index: number of the API process.
        metrics_compat: "vllm" shows vLLM's names in /metrics as well, "none" ours alone.
        ssl_keyfile, ssl_certfile: key of TLS and its certificate, in PEM form; both or none.
    """

    attach: tuple[str, ...]
    runtime_dir: str = ""
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    max_body_bytes: Annotated[int, Bounds(1, 1 << 40)] = 32 << 20
    write_timeout: Annotated[float, ABOVE_ZERO] = 60.0
    shutdown_timeout: Annotated[float, FROM_ZERO] = 30.0
    tokenizer: str | None = None
    index: int = 0
    metrics_compat: Literal["vllm", "none"] = "vllm"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    def __post_init__(self) -> None:
        make_plain(self, _CHECKS)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both or none")

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`."""
        return msgspec.json.decode(text, type=cls)


_CHECKS = field_checks(ServerConfig, OF_SETTING)
