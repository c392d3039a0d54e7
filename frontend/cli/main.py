"""The `wavecore` command: picks the subcommand and turns errors into one line and an exit code.

Exit codes: 0 done, 2 usage or a setting, 3 a resource (port, memory), 4 the model's files, 5 the engine, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from wavecore.transport.errors import WavecoreError
from wavecore.transport.headroom import raise_descriptor_limit
from wavecore.transport.version import VERSION

COMMANDS = {
    "generate": ("frontend.cli.generate", "answer one prompt and stream the answer"),
    "chat": ("frontend.cli.chat", "talk to the model, with history"),
    "engine": ("frontend.cli.engine", "run an engine that other processes attach to"),
    "bench": ("frontend.cli.bench", "measure: `wavecore bench offline`"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"wavecore {VERSION}")
        return 0
    if name not in COMMANDS:
        from wavecore.frontend.compat import did_you_mean, refused  # slow to import, for the sake of a typo

        reason = refused("commands", name) or f"{name}: no such command{did_you_mean(name, COMMANDS, '')}"
        print(f"wavecore: {reason}\n\n{_help()}", file=sys.stderr)
        return 2
    raise_descriptor_limit()
    try:
        code: int = import_module(f"wavecore.{COMMANDS[name][0]}").run(args[1:])
        sys.stdout.flush()
    except WavecoreError as error:
        print(f"wavecore {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _help() -> str:
    lines = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    where = "`wavecore engine --help` explains the engine's settings, `wavecore COMMAND --help` a command's options."
    return "\n".join(["usage: wavecore COMMAND ...", "", *lines, "", where])


if __name__ == "__main__":
    sys.exit(main())
