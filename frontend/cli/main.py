"""The `wavecore` command: picks the subcommand and turns errors into one line and an exit code.

Exit codes: 0 done, also where the reader of the output left; 2 usage or a setting; 3 a resource (port, memory, file,
the output); 4 the model's files; 5 the engine; 128 + N for signal N: 130 Ctrl-C, 143 SIGTERM. 1 is a fault of wavecore
itself, with a traceback.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType

from wavecore.transport.errors import WavecoreError
from wavecore.transport.headroom import raise_descriptor_limit
from wavecore.transport.version import VERSION

COMMANDS = {  # name -> module and function ("run", where none is named), about
    "generate": ("frontend.cli.generate", "answer one prompt and stream the answer"),
    "chat": ("frontend.cli.chat", "talk to the model, with history"),
    "serve": ("frontend.cli.serve", "run the OpenAI server"),
    "engine": ("frontend.cli.engine", "run an engine that other processes attach to"),
    "status": ("frontend.cli.status", "show running engines, their devices, load and last ends"),
    "keys": ("frontend.cli.keys", "make the keys of engines on several hosts"),
    "access": ("frontend.cli.keys:run_access", "print what a client on another host needs"),
    "run-vllm": ("frontend.vllm.run_script", "run a program written for vLLM"),
    "top": ("frontend.cli.top", "watch the engines of a deployment and their requests"),
    "bench": ("frontend.cli.bench", "measure: `wavecore bench offline`, `wavecore bench serve URL`"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    Args:
        args: None takes this program's own, and its streams and signals with them.
    """
    if args is None:
        own_process()
    name, *rest = (sys.argv[1:] if args is None else args) or ["--help"]
    return told(f"wavecore {name}", lambda: _run(name, rest), own=args is None)


def told(name: str, run: Callable[[], int], own: bool = True) -> int:
    """The exit code of a program; an error that it ends with is told in one line.

    Args:
        name: of the program.
        own: this process is the program's own.
    """
    reason, code = "", 0
    try:
        try:
            code = run()
        except SystemExit as end:  # --help, or a signal
            code = int(end.code or 0)
        sys.stdout.flush()
    except WavecoreError as error:
        reason, code = str(error), error.exit_code
    except BrokenPipeError:  # the reader of our output left, as `head` does
        pass
    except OSError as error:
        reason, code = f"cannot use {error.filename or 'the output'}: {error.strerror or error}", 3
    except KeyboardInterrupt:
        if own:
            signal.signal(signal.SIGINT, _end_at_once)
        reason, code = "interrupted", 130
    if reason:
        with contextlib.suppress(OSError):
            print(f"{name}: {reason}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what it still holds is lost, and the interpreter shall not stumble over that
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _run(name: str, args: Sequence[str]) -> int:
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        return int(getattr(import_module(f"wavecore.{module}"), function or "run")(args))
    if name in ("-h", "--help", "help", "-V", "--version"):
        print(f"wavecore {VERSION}" if name in ("-V", "--version") else _help())
        return 0
    from wavecore.frontend.compat import did_you_mean, refused  # slow to import, for the sake of a typo

    reason = refused("commands", name) or f"{name}: no such command{did_you_mean(name, COMMANDS, '')}"
    print(f"wavecore: {reason}\n\n{_help()}", file=sys.stderr)
    return 2


def own_process() -> None:
    """Streams that are there and show any text, signals that end the program in order, and all descriptors allowed."""
    raise_descriptor_limit()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file to be opened would take its place
            # What is printed for nobody may vanish; an answer may not, so that writing it fails.
            os.dup2(os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY), number)
            stream = os.fdopen(number, "w" if number else "r")
            setattr(sys, name, stream)
        os.set_blocking(number, True)
        stream.reconfigure(errors="backslashreplace" if number else "surrogateescape")
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # else nobody learns how an engine ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) is signal.SIG_DFL:
            signal.signal(stop, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    """Leave as Ctrl-C does; at once when told so again."""
    signal.signal(number, _end_at_once)
    with contextlib.suppress(OSError):
        os.write(2, f"wavecore: ended by {signal.Signals(number).name}\n".encode())
    sys.exit(128 + number)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _help() -> str:
    lines = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    where = "`wavecore engine --help` explains the engine's settings, `wavecore COMMAND --help` a command's options."
    return "\n".join(["usage: wavecore COMMAND ...", "", *lines, "", where])


if __name__ == "__main__":
    sys.exit(main())
