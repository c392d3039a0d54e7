"""`wavecore status [RUNTIME_DIR]`: the engines of running deployments, what they compute on, their load and last ends.

Exit codes: 0 every engine serves; 5 one does not, or nothing runs there.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.utilities import answers
from wavecore.transport.errors import EngineDead, StartError, WavecoreError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment

ANSWER_SECONDS = 3.0  # an engine that takes longer counts as silent
LOAD = ("running", "waiting", "cache_usage")
COLUMNS = ("engine", "stage", "rank", "device", "pid", "state", *LOAD, "epoch", "restarts", "last cause")


def run(args: Sequence[str]) -> int:
    parser = ArgumentParser("wavecore status", description="Shows running engines; status 0 where all of them serve.")
    where = "as `wavecore engine` prints it; without it all running deployments of this user are shown"
    parser.add_argument("runtime_dir", metavar="RUNTIME_DIR", nargs="?", type=Path, help=where)
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    values = parser.parse_args(args)
    found = [_look(values.runtime_dir)] if values.runtime_dir else []
    for folder in () if values.runtime_dir else deployment.running():
        with suppress(StartError):  # it ended in this moment
            found.append(_look(folder))
    if values.json:
        print(json.dumps({"deployments": found}, indent=1))
    else:
        print("\n\n".join(map(_table, found)) or "no deployment of this user runs; start one with `wavecore engine`")
    return 0 if found and all(one["serves"] for one in found) else EngineDead.exit_code


def _look(folder: Path) -> dict[str, Any]:
    """All of the deployment's file, the load of each engine (None: it gives no answer), and whether all serve.

    Raises:
        StartError: there is no deployment.
    """
    found = deployment.read(folder)
    loads = _loads(folder, found)
    engines = [{**asdict(entry), "load": loads.get(entry.index)} for entry in found.engines]
    serves = found.state == "ready" and len(loads) == len(engines)
    return {**asdict(found), "engines": engines, "runtime_dir": str(folder), "serves": serves}


def _loads(folder: Path, found: Deployment) -> dict[int, dict[str, Any]]:
    """What the engines that answer in time say of themselves."""
    serving = {entry.index for entry in found.engines if entry.state in ("ready", "draining")}
    loads: dict[int, dict[str, Any]] = {}
    with suppress(WavecoreError), closing(EngineClient(folder, timeout=ANSWER_SECONDS)) as client:
        by = time.monotonic() + ANSWER_SECONDS
        while serving - {*client.engines} and time.monotonic() < by:
            time.sleep(0.01)
        for index, stats in answers(client, ANSWER_SECONDS, "stats").items():
            loads[index] = {name: stats[name] for name in LOAD}
    return loads


def _table(found: Mapping[str, Any]) -> str:
    columns = [name for name in COLUMNS if name != "stage" or any(engine["stage"] for engine in found["engines"])]
    rows: list[tuple[str, ...]] = [tuple(columns)]
    for engine in found["engines"]:
        cause = (engine["last_cause"] or {}).get("message", "")
        load = engine["load"] or dict.fromkeys(LOAD, "-")
        first = {**engine, **load, "epoch": engine["epoch"][:8], "last cause": cause}  # in its first row alone
        for place, rank in enumerate(engine["ranks"] or [{"rank": 0}]):
            shown = {**({} if place else first), **rank, "engine": engine["index"], "state": engine["state"]}
            rows.append(tuple(str(shown.get(name, "")) for name in columns))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([f"{found['runtime_dir']}: {found['state']}", *lines])
