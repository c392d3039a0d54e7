"""Faults of one rank of an engine with a real model, at a place in its life. The rank's process imports this itself.

A test makes `faults_of_ranks` its environment and writes a `Fault` when it wants one; what has happened once does not
happen again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.environment import environment

FILE = "WAVECORE_TEST_FAULT"
PLACES = {  # modules below engine_core, and what is called there
    "load": ("startup.loader", "_load_weights"),
    "measure": ("startup.kv_cache_size", "warm_up"),  # on a GPU
    "kv_cache": ("execution.runner", "ModelRunner.allocate_swap_space"),
    "step": ("execution.runner", "ModelRunner._forward"),
    "swap": ("execution.block_copies", "_move"),
    "capture": ("execution.graphs", "StepGraphs.capture"),
}
SAYS = {
    "raise": "RuntimeError: as this test wants",
    "kill": "was ended by signal 9",
    "stop": r"it has been stopped \(SIGSTOP",
    "hang": "every thread sleeps",
}


@dataclass(frozen=True)
class Fault:
    """Attributes:
    does: one of `SAYS`, which has what is said of it.
    """

    rank: int
    place: str
    does: str

    def write(self, file: Path) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.rename(file)


def environment_of_ranks(folder: Path) -> dict[str, str]:
    """Of a program whose engines have faults by a file "fault" in this folder."""
    (folder / "sitecustomize.py").write_text("from tests.support import rank_faults\n\nrank_faults.install()\n")
    own = environment()
    return {FILE: str(folder / "fault"), "PYTHONPATH": os.pathsep.join((str(folder), own["PYTHONPATH"]))}


def install() -> None:
    """In a rank: what it loads of the engine has the places where faults happen."""
    if "wavecore.engine_core" not in sys.orig_argv:
        return
    factory: Any = import_module("wavecore.engine_core.startup.factory")
    # "engine 0 rank 1"; one that is alone on its host, and the first, is "engine 0"
    name = sys.orig_argv[sys.orig_argv.index("--name") + 1]
    load, rank = factory._load, int(name.rpartition(" rank ")[2]) if " rank " in name else 0

    def load_with_faults(*args: Any) -> Any:
        for place, (module, name) in PLACES.items():
            owner = import_module(f"wavecore.engine_core.{module}")
            *outer, name = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, name, _failing(getattr(owner, name), rank, place))
        return load(*args)

    factory._load = load_with_faults


def _failing(function: Callable[..., Any], rank: int, place: str) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        file = Path(os.environ[FILE])
        if file.exists() and (place != "swap" or len(args[0])):
            fault = Fault(**json.loads(file.read_text()))
            if (fault.rank, fault.place) == (rank, place):
                file.unlink()
                _happen(fault.does)
        return function(*args, **more)

    return call


def _happen(does: str) -> None:
    match does:
        case "raise":
            raise RuntimeError("as this test wants")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
