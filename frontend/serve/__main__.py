"""`python -m wavecore.frontend.serve --attach DIR --fd N`: one API process at a socket that listens already.

`wavecore serve` starts it as a supervised child, with its settings on a descriptor; by itself it has the defaults.
"""

import argparse
import logging
import socket
import sys
from collections.abc import Sequence

from wavecore.frontend.serve.api_process import run
from wavecore.frontend.serve.server_config import ServerConfig
from wavecore.transport.errors import ResourceError, WavecoreError
from wavecore.transport.headroom import raise_descriptor_limit
from wavecore.transport.processes import child, logs


def main(args: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if args is None else args)
    supervised = "--config-fd" in words
    parser = (
        child.parser("wavecore.frontend.serve") if supervised else argparse.ArgumentParser("wavecore.frontend.serve")
    )
    parser.add_argument(
        "--attach", required=True, action="append", help="runtime directory of the engines, or access file"
    )
    parser.add_argument("--fd", "--listener-fd", type=int, required=True, help="descriptor of the socket")
    if not supervised:
        parser.add_argument("--name", default="api server", help="in logs and in ps")
    parsed = parser.parse_args(words)
    raise_descriptor_limit()
    process = child.SupervisedChild(parsed) if supervised else None
    logs.set_up(parsed.name)
    config = ServerConfig.from_json(process.config) if process else ServerConfig(attach=tuple(parsed.attach))
    try:
        run(config, _listener(parsed.fd), process.report_ready if process else lambda _: None)
    except WavecoreError as error:
        if process is None:
            logging.getLogger("wavecore.frontend.serve").error("%s", error)
        else:
            process.report_failure(error)
        return error.exit_code
    return 0


def _listener(fd: int) -> socket.socket:
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ResourceError(f"--fd {fd} is no socket: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
