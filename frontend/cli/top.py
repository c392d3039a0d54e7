"""`wavecore top DIR`: what the engines of a deployment do, and which of their requests are slow, or wait and why."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wavecore.frontend.base import places_of
from wavecore.frontend.cli.parser import CommandParser
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.utilities import answers
from wavecore.transport.errors import ConfigError
from wavecore.transport.processes.places import read_place

MAX_REQUESTS = 1000  # that an engine tells of at once
ANSWER_SECONDS = 5.0
RATES = {"output_tokens": "out/s", "prompt_tokens": "prompt/s", "finished": "ended/s"}

View = dict[str, Any]
"""What `--json` prints: "time" (unix seconds), "engines" and "requests", lists of dictionaries.

An engine: index, state, restarts, cause ("" or why it died last); while it answers all counters of its utility
`metrics`, and with `_per_second` what `RATES` names. A request: engine, and what `LLM.debug_requests` says; first those
that run, the oldest first, then the queue in order.
"""


def run(args: Sequence[str]) -> int:
    about = "Watches the engines of a deployment. Ctrl-C ends it."
    values = CommandParser("wavecore top", "DIR", about, ["attach"], ("attach", "top")).parse(args)
    if not values.attach or values.interval <= 0 or not 0 <= values.requests <= MAX_REQUESTS:
        raise ConfigError(f"usage: wavecore top DIR, --interval above 0, --requests from 0 to {MAX_REQUESTS}")
    client = EngineClient(*places_of(values.attach))
    try:
        views = views_of(client, values.interval, values.requests)
        _show([next(views)] if values.once else views, as_json=values.json)
    finally:
        client.close()
    return 0


def _show(views: Iterable[View], as_json: bool) -> None:
    if as_json:
        for view in views:
            print(json.dumps(view), flush=True)
        return
    console = Console()
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for view in views:
            if live is None:
                console.print(tables(view))
            else:
                live.update(tables(view), refresh=True)


def views_of(client: EngineClient, interval: float, requests: int) -> Iterator[View]:
    """For ever, the first one after an interval."""
    before, looked = _look(client, requests), time.monotonic()
    while True:
        time.sleep(interval)
        view, now = _look(client, requests), time.monotonic()
        counted = {engine["index"]: engine for engine in before["engines"]}
        for engine in view["engines"]:
            for name in RATES.keys() & engine.keys():
                rise = engine[name] - counted.get(engine["index"], {}).get(name, 0)
                engine[f"{name}_per_second"] = max(0.0, rise / (now - looked))  # below 0 after a restart
        before, looked = view, now
        yield view


def _look(client: EngineClient, requests: int) -> View:
    entries = [entry for place in client.places for entry in read_place(place).engines]
    limit = min(int(client.resolved["max_num_seqs"]) + requests, MAX_REQUESTS)
    counters = answers(client, ANSWER_SECONDS, "metrics")
    listed = answers(client, ANSWER_SECONDS, "debug_requests", limit=limit)
    engines = []
    for entry in entries:
        told = counters.get(entry.index, {})
        told.pop("histograms", None)
        cause = "" if entry.cause is None else entry.cause.message
        engines.append({"index": entry.index, "state": entry.state, "restarts": entry.restarts, "cause": cause, **told})
    shown = [{"engine": e.index, **row} for e in entries for row in listed.get(e.index, ())]
    shown.sort(key=lambda row: (bool(row["reason"]), 0.0 if row["reason"] else -row["age"]))
    return {"time": time.time(), "engines": engines, "requests": shown[:requests]}


def tables(view: View) -> Group:
    engines = _table("engine", "state", "run", "wait", "KV", "hits", *RATES.values(), "preempt")
    for engine in view["engines"]:
        state = f"{engine['state']} ({engine['restarts']} restarts)" if engine["restarts"] else engine["state"]
        if "steps" not in engine:
            engines.add_row(str(engine["index"]), state)
            continue
        parts = [f"{engine[name]:.0%}" for name in ("cache_usage", "hit_rate")]
        rates = [f"{engine[f'{name}_per_second']:.1f}" for name in RATES]
        cells = (engine["index"], state, engine["running"], engine["waiting"], *parts, *rates, engine["preemptions"])
        engines.add_row(*map(str, cells))
    causes = [Text(f"engine {e['index']}: {e['cause']}") for e in view["engines"] if e["cause"]]
    requests = _table("request", "age, s", "state", "prompt", "out", "blocks")
    requests.add_column("why it waits")
    for row in view["requests"]:
        name = f"{row['engine']}:{row['client'][:6]}/{row['handle']}"
        counts = [str(row[key]) for key in ("prompt_tokens", "output_tokens", "blocks")]
        requests.add_row(name, f"{row['age']:.1f}", row["state"], *counts, Text(row["reason"]))
    return Group(engines, *causes, "", requests)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table
