"""`python -m wavecore.frontend.serve --attach DIR --fd N`: one API process at a socket that listens already.

`wavecore serve` starts it as a supervised child, with its settings on a descriptor; by itself it has the defaults.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

from wavecore.frontend.serve.api_process import Sessions, run
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
    parser.add_argument("--attach", required=True, help="runtime directory of the engines")
    parser.add_argument("--fd", "--listener-fd", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--name", default="api server", help="in logs and in ps")
    parsed = parser.parse_args(words)
    raise_descriptor_limit()
    if not supervised:
        logs.set_up(parsed.name)
        return _serve(ServerConfig(attach=parsed.attach), parsed.fd, lambda _: None)
    process = child.SupervisedChild(parsed)
    logs.set_up(parsed.name)
    try:
        return _serve(ServerConfig.from_json(process.config), parsed.fd, partial(_report, process))
    except WavecoreError as error:
        process.report_failure(error)
        return error.exit_code


def _report(process: child.SupervisedChild, sessions: Sessions) -> None:
    told = {str(index): [part.hex() for part in session] for index, session in sessions.items()}
    process.report_ready({"resolved": told})


def _serve(config: ServerConfig, fd: int, report: Callable[[Sessions], None]) -> int:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ResourceError(f"--fd {fd} is no socket: {error}") from error
    return run(config, listener, report)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WavecoreError as error:
        logging.getLogger("wavecore.frontend.serve").error("%s", error)
        sys.exit(error.exit_code)
