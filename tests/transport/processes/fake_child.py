"""A child for the supervisor's tests: `python -m fake_child`. Its config names what it does after it is ready, or
instead of it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ModelError, StartError
from wavecore.transport.processes import logs
from wavecore.transport.processes.child import SupervisedChild, parser


def main() -> int:
    arguments = parser("fake_child")
    for name in ("--index", "--keys", "--input", "--output"):
        arguments.add_argument(name)
    args = arguments.parse_args()
    child = SupervisedChild(args)
    config = json.loads(child.config)
    logs.set_up("fake child")
    do = what_to_do(config)
    print(f"doing {do}", file=sys.stderr, flush=True)  # not logged: a child that is killed at once has said it
    child.report_phase("load", 0.5)
    status = fail_while_loading(do, child, args.input)
    if status is not None:
        return status
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    report_ready(do, child, args.input, args.output)
    misbehave_once_ready(do, child, config)
    stop.wait()
    return 0


def what_to_do(config: dict[str, Any]) -> str:
    """The config's word; with `once`, a file, in the first life alone, and `later`, or to serve, in all others."""
    once = Path(config.get("once", "/nonexistent/once"))
    if once.exists():
        return str(config.get("later", "serve"))
    if "once" in config:
        once.touch()
    return str(config["do"])


def fail_while_loading(do: str, child: SupervisedChild, input_address: str) -> int | None:
    """Ways to end before it is ready; the exit status of one that returns, None for a child that goes on."""
    if do == "fail":
        child.report_failure(ModelError("model.safetensors is truncated"))
        return 4
    if do == "surprise":
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            child.report_failure(error)
        return 5
    if do == "missing library":
        print("ImportError: libfoo.so.3: cannot open shared object file: No such file or directory", file=sys.stderr)
        os._exit(1)
    if do == "babble":
        babble(child)
    if do == "die in load":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "end":
        return 0
    if do == "hang in load":
        threading.Event().wait()
    if do == "serve on port 5" and input_address.endswith(":5"):  # only its first child gets that port
        child.report_phase("bind", 0.0)
        child.report_failure(StartError("port 5 is taken"))
        return 3
    return None


def babble(child: SupervisedChild) -> None:
    """Lines on the status pipe that no child of ours writes."""
    words = [
        b"",
        b"null",
        b"5",
        b'"ready phase failed"',
        b"[" * 100_000,
        b'{"phase": 3, "at": 1}',
        b'{"phase": "x", "fraction": NaN, "at": 1}',
    ]
    words += [
        b'{"ready": null, "at": 1}',
        b'{"ready": {"epoch": 1}, "at": 1}',
        b'{"ready": {}, "at": 1}',
        b'{"failed": [], "at": 1}',
        b'{"failed": {"code": 5}, "at": 1}',
    ]
    words += [
        b'{"new": "of a later version", "at": 1}',
        b'{"phase": "x", "fraction": "half", "at": 1}',
        b"\xff\xfe",
        b'{"pha',
    ]
    for word in words:
        os.write(child._status_fd, word + b"\n")


def report_ready(do: str, child: SupervisedChild, input_address: str, output_address: str) -> None:
    resolved = {"pid": os.getpid()}
    if do == "grandchild":
        resolved["grandchild"] = subprocess.Popen(["sleep", "600"]).pid
    if do == "leave something in the memory" and child.group is not None:
        resolved |= {"ranks": child.group.ranks, "found": child.group.words[child.rank]}
        child.group.words[child.rank] = 1
    if do == "serve on port 5":
        input_address = "tcp://127.0.0.1:5"
    epoch = os.urandom(16).hex()
    child.report_ready({"input": input_address, "output": output_address, "epoch": epoch, "resolved": resolved})


def misbehave_once_ready(do: str, child: SupervisedChild, config: dict[str, Any]) -> None:
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "hold the GIL":  # stuck: work, and nothing moves
        child.progress.busy(True)
        ctypes.PyDLL(None).usleep(600_000_000)
    elif do == "compute":
        compute(child, config)
    elif do == "ignore signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        threading.Event().wait()


def compute(child: SupervisedChild, config: dict[str, Any]) -> None:
    """A long step: no beat, but the CPU works."""
    child.progress.busy(True)
    if "core" in config:
        os.sched_setaffinity(0, [config["core"]])
    os.nice(config.get("nice", 0))
    end = time.process_time() + config["seconds"]
    while time.process_time() < end:
        pass
    child.progress.busy(False)


if __name__ == "__main__":
    sys.exit(main())
