"""Workloads for measuring: the same token ids for every run of the same arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ValidationError

TOP = 10_000  # token ids stay below it: every model of real size has them
Span = tuple[int, int]  # the shortest and the longest length


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; end-of-sequence is ignored, so `max_tokens` tokens are generated whatever the weights say."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float = 0.0


def random_work(
    count: int, inputs: Span, outputs: Span, temperature: float = 0.0, top: int = TOP, seed: int = 0
) -> list[WorkItem]:
    """Random tokens below `top`; lengths of prompts and outputs uniform in their spans."""
    if count < 1:
        raise ValidationError("workload", f"needs at least one request, not {count}")
    draw = random.Random(seed)
    return [WorkItem(_ids(draw, draw.randint(*inputs), top), draw.randint(*outputs), temperature) for _ in range(count)]


def span(longest: int, range_ratio: float) -> Span:
    """From `longest` x (1 - range_ratio) to `longest`.

    Raises:
        ValidationError: no such lengths.
    """
    if longest < 1 or not 0 <= range_ratio < 1:
        raise ValidationError("workload", "needs lengths of at least 1 and 0 <= range_ratio < 1")
    return max(1, round(longest * (1 - range_ratio))), longest


def shared_prefix_work(
    groups: int, per_group: int, prefix_len: int = 2048, tail_len: int = 64, output_len: int = 64, seed: int = 0
) -> list[WorkItem]:
    """Groups of requests that begin with the same tokens, as under one system prompt; in mixed order, greedy."""
    draw = random.Random(seed)
    work: list[WorkItem] = []
    for _ in range(groups):
        prefix = _ids(draw, prefix_len)
        work += [WorkItem(prefix + _ids(draw, tail_len), output_len) for _ in range(per_group)]
    draw.shuffle(work)
    return work


def _ids(draw: random.Random, count: int, top: int = TOP) -> list[int]:
    return [draw.randrange(min(10, top - 1), top) for _ in range(count)]


WORKLOADS: Mapping[str, Callable[[], list[WorkItem]]] = {
    "ragged-256": lambda: random_work(256, (100, 1024), (100, 1024), temperature=0.6),
    "ragged-1024": lambda: random_work(1024, (100, 1024), (100, 1024), temperature=0.6),
    "in1024-out256-x512": lambda: random_work(512, (1024, 1024), (256, 256)),
    "decode-heavy-x256": lambda: random_work(256, (32, 32), (512, 512)),
    "prefill-heavy-x128": lambda: random_work(128, (4096, 4096), (8, 8)),
    "shared-prefix-16x32": lambda: shared_prefix_work(16, 32),
    "single-in128-out256": lambda: random_work(1, (128, 128), (256, 256)),
    "single-in8192-out16": lambda: random_work(1, (8192, 8192), (16, 16)),
}
"""The workloads of docs/benchmarks.md by name; token ids lie in [10, 10,000)."""


def open_work(name: str) -> list[WorkItem]:
    """One of WORKLOADS, or a file of a JSON list of
    {"prompt": text or "prompt_token_ids": [...], "max_tokens": n, "temperature": t}.

    Raises:
        ValidationError: it is neither.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]()
    try:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not rows:
            raise ValueError("the file holds no list, or an empty one")
        return [_item(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{name} is neither one of {', '.join(WORKLOADS)} nor a list of requests: {error!r:.200}"
        raise ValidationError("workload", message) from error


def _item(row: Any) -> WorkItem:
    prompt = row["prompt_token_ids"] if "prompt_token_ids" in row else row["prompt"]
    return WorkItem(prompt, int(row["max_tokens"]), float(row.get("temperature", 0.0)))
