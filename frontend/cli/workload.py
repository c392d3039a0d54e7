"""Workloads for measuring: the same token ids for every run of the same arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ValidationError

TOP = 10_000  # token ids stay below it: every model of real size has them


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; end-of-sequence is ignored, so `max_tokens` tokens are generated whatever the weights say."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float = 0.0


def random_work(
    count: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Random prompts; lengths uniform in [length x (1 - range_ratio), length]."""
    if not 0 <= range_ratio < 1 or min(count, input_len, output_len) < 1:
        raise ValidationError("workload", "needs counts and lengths of at least 1 and 0 <= range_ratio < 1")
    draw = random.Random(seed)

    def length(longest: int) -> int:
        return draw.randint(max(1, round(longest * (1 - range_ratio))), longest)

    top = min(vocab_size, TOP)
    return [WorkItem(_ids(draw, length(input_len), top), length(output_len)) for _ in range(count)]


def ragged_work(
    count: int, low: int = 100, high: int = 1024, temperature: float = 0.6, seed: int = 0
) -> list[WorkItem]:
    """Lengths of prompt and output both uniform in [low, high]."""
    draw = random.Random(seed)
    return [WorkItem(_ids(draw, draw.randint(low, high)), draw.randint(low, high), temperature) for _ in range(count)]


def fixed_work(count: int, input_len: int, output_len: int, seed: int = 0) -> list[WorkItem]:
    """All of one length, greedy."""
    draw = random.Random(seed)
    return [WorkItem(_ids(draw, input_len), output_len) for _ in range(count)]


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
    "ragged-256": lambda: ragged_work(256),
    "ragged-1024": lambda: ragged_work(1024),
    "in1024-out256-x512": lambda: fixed_work(512, 1024, 256),
    "decode-heavy-x256": lambda: fixed_work(256, 32, 512),
    "prefill-heavy-x128": lambda: fixed_work(128, 4096, 8),
    "shared-prefix-16x32": lambda: shared_prefix_work(16, 32),
    "single-in128-out256": lambda: fixed_work(1, 128, 256),
    "single-in8192-out16": lambda: fixed_work(1, 8192, 16),
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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
