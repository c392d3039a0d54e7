"""`wavecore serve [MODEL]`: the OpenAI server, with engines of its own or attached to running ones."""

import os
import socket
import ssl
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from wavecore.engine_core.api.config import OF_SETTING
from wavecore.engine_core.api.fields import defaults
from wavecore.frontend.cli.parser import CommandParser, field_help, settings
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.progress_bars import StartBar
from wavecore.frontend.serve.listener import is_reachable_from_outside, listen, listen_at_file, url_of
from wavecore.frontend.serve.server import Server
from wavecore.frontend.serve.server_config import ServerConfig
from wavecore.transport.errors import ConfigError
from wavecore.transport.processes import logs
from wavecore.transport.small_files import read_small
from wavecore.transport.wire.checks import MAX_TEXT

KEY_VARIABLE = "WAVECORE_API_KEY"
MAX_API_SERVERS = 64
MAX_PORT = 65535
PASSED_ON = ("metrics_compat", "ssl_keyfile", "ssl_certfile", "write_timeout", "max_body_bytes")
"""Options that are fields of `ServerConfig`, which has their defaults and what is said of them."""


def run(args: Sequence[str]) -> int:
    about = "Serves OpenAI's API. SIGTERM or Ctrl-C drains it; a second one ends it at once."
    parser = CommandParser("wavecore serve", "[MODEL]", about, ["model"], ("serve", "attach"))
    usual, abouts = defaults(ServerConfig), field_help(ServerConfig)
    for name in PASSED_ON:
        parser.option(name, type(usual[name] or ""), usual[name], abouts[name])
    values = parser.parse(args)
    engine = settings(values)
    config = _config(values, engine.shutdown_timeout)
    OF_SETTING.whole("--api-server-count", values.api_server_count, 1, MAX_API_SERVERS)
    OF_SETTING.whole("--port", values.port, 0, MAX_PORT)
    if config.ssl_certfile:
        try:
            ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from error
    logs.set_up("server")
    with listen_at_file(values.uds) if values.uds else listen(values.host, values.port) as listener:
        if is_reachable_from_outside(listener) and not config.api_keys:
            print("wavecore serve: whoever reaches this port may use it; see --api-key-file", file=sys.stderr)
        with StartBar(engine.disable_tqdm) as bar:
            supervisor = None if values.attach else make_supervisor(engine)
            on_ready = partial(_tell, bar, listener, bool(config.ssl_keyfile))
            code = Server(config, supervisor, listener, values.api_server_count, bar, on_ready).run()
        if values.uds:
            Path(values.uds).unlink(missing_ok=True)
    return code


def _tell(bar: StartBar, listener: socket.socket, tls: bool, folder: Path) -> None:
    bar.close()
    print(f"serving at {url_of(listener, tls)}; runtime directory: {folder}", flush=True)


def _config(values: Namespace, shutdown_timeout: float) -> ServerConfig:
    """Raises:
    ConfigError: a file that cannot be read, or a value that cannot be.
    """
    keys = [values.api_key, os.environ.pop(KEY_VARIABLE, "")]  # away from what children inherit
    if values.api_key_file:
        keys += _text("--api-key-file", values.api_key_file).splitlines()
        if not any(key.strip() for key in keys):
            raise ConfigError(f"--api-key-file {values.api_key_file}: holds no key")
    template = values.chat_template
    return ServerConfig(
        attach=values.attach,
        api_keys=tuple(key.strip() for key in keys if key.strip()),
        chat_template=_text("--chat-template", template) if template and "{" not in template else template or None,
        shutdown_timeout=shutdown_timeout,
        tokenizer=values.tokenizer if values.attach else None,
        **{name: getattr(values, name) for name in PASSED_ON},
    )


def _text(flag: str, path: str) -> str:
    try:
        return read_small(Path(path).expanduser(), MAX_TEXT).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from error
