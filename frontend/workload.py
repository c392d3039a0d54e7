"""Workloads for measuring: the same token ids for every run of the same arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ValidationError


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

    top = min(vocab_size, 10_000)
    return [
        WorkItem([draw.randrange(min(10, top - 1), top) for _ in range(length(input_len))], length(output_len))
        for _ in range(count)
    ]


def read_work(path: str) -> list[WorkItem]:
    """A JSON list of {"prompt": text or "prompt_token_ids": [...], "max_tokens": n, "temperature": t}.

    Raises:
        ValidationError: the file is not that.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not rows:
            raise ValueError("the file holds no list, or an empty one")
        return [_item(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValidationError("workload", f"{path} is no list of requests: {error!r:.200}") from error


def _item(row: Any) -> WorkItem:
    prompt = row["prompt_token_ids"] if "prompt_token_ids" in row else row["prompt"]
    return WorkItem(prompt, int(row["max_tokens"]), float(row.get("temperature", 0.0)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
