"""`wavecore bench serve`: latencies and throughput of an OpenAI server under load, ours or another."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wavecore.frontend.cli.parser import CommandParser
from wavecore.frontend.cli.remote import api_key, endpoint, served_model
from wavecore.frontend.cli.workload import WorkItem, chosen_work
from wavecore.frontend.load.load_run import LAG_MARK, report, run_load
from wavecore.frontend.load.plot import PANELS, plotter
from wavecore.transport.errors import ConfigError, RequestError


def run(args: Sequence[str]) -> int:
    about = "Measures an OpenAI server. A request's clock runs from the moment when it was due."
    options = ("server", "workload", "bench serve")
    values = CommandParser("wavecore bench serve", "URL", about, ["url"], options).parse(args)
    draw = plotter(values.plot) if values.plot else None
    if min(values.request_rate, values.max_concurrency) < 0:
        raise ConfigError("--request-rate and --max-concurrency must be at least 0")
    model = served_model(values)
    bodies = [request_body(item, model, values.chat) for item in chosen_work(values)]
    goals = {name: limit / 1e3 for name in PANELS if (limit := getattr(values, f"goal_{name}_ms")) is not None}
    url = endpoint(values, "chat/completions" if values.chat else "completions")
    load = asyncio.run(run_load(url, bodies, values.request_rate, values.max_concurrency, api_key(values)))
    figures = report(load, goals)
    print("\n".join(_lines(figures)))
    if values.output_json:
        Path(values.output_json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if draw is not None:
        draw(load.samples)
    if figures["failed"]:
        raise RequestError(f"{figures['failed']} of {figures['requests']} requests failed")
    return 0


def request_body(item: WorkItem, model: str, chat: bool) -> dict[str, Any]:
    asked = {"model": model, "max_tokens": item.max_tokens, "temperature": item.temperature, "ignore_eos": True}
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    if not chat:
        return {**body, "prompt": item.prompt}
    text = item.prompt if isinstance(item.prompt, str) else " ".join(map(str, item.prompt))
    return {**body, "messages": [{"role": "user", "content": text}]}


def _lines(figures: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            shown = " / ".join(f"{value[mark]:.1f}" for mark in ("p50", "p90", "p99", "max")) if value else "-"
            lines.append(f"{name:<26}{shown} (p50 / p90 / p99 / max)")
        else:
            lines.append(f"{name:<26}{value:.2f}" if isinstance(value, float) else f"{name:<26}{value}")
    if figures["client_lagged"]:
        lines.append(f"this program woke up more than {1e3 * LAG_MARK:.0f} ms late: in part it has measured itself")
    return lines
