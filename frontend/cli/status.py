"""`wavecore status [PLACE ...]`: the engines of running deployments, what they compute on, their load and last ends.

Exit codes: 0 every engine serves; 5 one does not, or nothing runs there.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

from wavecore.frontend.base import places_of
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.utilities import answers
from wavecore.transport.errors import EngineDead, StartError, WavecoreError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment
from wavecore.transport.processes.places import AccessFile, Place, read_place

ANSWER_SECONDS = 3.0  # an engine that takes longer counts as silent
OF_WAVES = ("waves", "dummy_steps")
LOAD = ("running", "waiting", "cache_usage", *OF_WAVES)
COLUMNS = ("engine", "stage", "host", "rank", "device", "pid", "state", *LOAD, "epoch", "restarts", "last cause")
OPTIONAL = ("stage", "host", *OF_WAVES)  # shown where there is something to show


def run(args: Sequence[str]) -> int:
    parser = ArgumentParser("wavecore status", description="Shows running engines; status 0 where all of them serve.")
    where = "a runtime directory, or an access file; without any, all running deployments of this user here are shown"
    parser.add_argument("places", metavar="PLACE", nargs="*", help=where)
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    values = parser.parse_args(args)
    found = [_look(place) for place in places_of(values.places)] if values.places else []
    for folder in () if values.places else deployment.running():
        with suppress(StartError):  # it ended in this moment
            found.append(_look(folder))
    if values.json:
        print(json.dumps({"deployments": found}, indent=1))
    else:
        print("\n\n".join(map(_table, found)) or "no deployment of this user runs; start one with `wavecore engine`")
    return 0 if found and all(one["serves"] for one in found) else EngineDead.exit_code


def _look(place: Place) -> dict[str, Any]:
    """All of the deployment's file, the load of each engine (None: it gives no answer), and whether all serve.

    Raises:
        StartError: there is no deployment.
    """
    found = read_place(place)
    epochs, loads = _ask(place, found)
    engines = [{**asdict(entry), "host": entry.host, "load": loads.get(entry.index)} for entry in found.engines]
    serves = found.state == "ready" and len(loads) == len(engines)
    if isinstance(place, AccessFile):  # which says nothing of how they are
        found = replace(found, state="ready" if serves else "degraded")
        for engine in engines:
            state = "ready" if engine["load"] else "silent"
            engine |= {"state": state, "epoch": epochs.get(engine["index"], ""), "pid": None, "restarts": None}
    return {**asdict(found), "engines": engines, "runtime_dir": str(place), "serves": serves}


def _ask(place: Place, found: Deployment) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """The epochs of the engines that answer in time, and what they say of themselves."""
    serving = {entry.index for entry in found.engines if entry.state in ("ready", "draining")}
    epochs: dict[int, str] = {}
    loads: dict[int, dict[str, Any]] = {}
    with suppress(WavecoreError), closing(EngineClient(place, timeout=ANSWER_SECONDS)) as client:
        by = time.monotonic() + ANSWER_SECONDS
        while serving - {*client.engines} and time.monotonic() < by:
            time.sleep(0.01)
        for index, stats in answers(client, ANSWER_SECONDS, "stats").items():
            loads[index] = {name: stats[name] for name in LOAD}
        epochs = {index: epoch.hex() for index, (_, epoch) in client.sessions.items()}
    return epochs, loads


def _table(found: Mapping[str, Any]) -> str:
    shown = [{**engine, **(engine["load"] or dict.fromkeys(LOAD, "-"))} for engine in found["engines"]]
    columns = [
        name for name in COLUMNS if name not in OPTIONAL or any(engine[name] not in ("", "-", 0) for engine in shown)
    ]
    rows: list[tuple[str, ...]] = [tuple(columns)]
    for engine in shown:
        cause = (engine["last_cause"] or {}).get("message", "")
        first = {**engine, "epoch": engine["epoch"][:8], "last cause": cause}  # in its first row alone
        for place, rank in enumerate(engine["ranks"] or [{"rank": 0}]):
            row = {**({} if place else first), **rank, "engine": engine["index"], "state": engine["state"]}
            row |= {"host": rank.get("host") or engine["host"], "pid": row.get("pid") or None}
            rows.append(tuple("" if (value := row.get(name)) is None else str(value) for name in columns))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([f"{found['runtime_dir']}: {found['state']}", *lines])
