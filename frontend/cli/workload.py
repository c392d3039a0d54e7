"""Workloads for measuring: the same token ids for every run of the same arguments."""

import json
import random
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ValidationError
from wavecore.transport.small_files import read_small

TOP = 10_000  # token ids stay below it: every model of real size has them
Span = tuple[int, int]  # the shortest and the longest length


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; end-of-sequence is ignored, so `max_tokens` tokens are generated whatever the weights say."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float = 0.0


def chosen_work(values: Namespace, vocab_size: int = TOP) -> list[WorkItem]:
    """What the options "workload" say.

    Raises:
        ValidationError: see `open_work` and `random_work`.
    """
    if values.workload:
        return open_work(values.workload)
    inputs, outputs = (values.input_len, values.input_len), (values.output_len, values.output_len)
    return random_work(values.num_prompts, inputs, outputs, top=min(vocab_size, TOP))


def random_work(
    count: int, inputs: Span, outputs: Span, temperature: float = 0.0, top: int = TOP, seed: int = 0
) -> list[WorkItem]:
    """Random tokens below `top`; lengths of prompts and outputs uniform in their spans.

    Raises:
        ValidationError: no requests, or no tokens.
    """
    if min(count, *inputs, *outputs) < 1:
        raise ValidationError("workload", "needs at least one request, and one token of prompt and of output each")
    draw = random.Random(seed)
    return [
        WorkItem(random_ids(draw, draw.randint(*inputs), top), draw.randint(*outputs), temperature)
        for _ in range(count)
    ]


def random_ids(draw: random.Random, count: int, top: int = TOP) -> list[int]:
    return [draw.randrange(min(10, top - 1), top) for _ in range(count)]


def open_work(file: str) -> list[WorkItem]:
    """Requests of a file that holds a JSON list of
    {"prompt": text or "prompt_token_ids": [...], "max_tokens": n, "temperature": t}.

    Raises:
        ValidationError: it holds something else.
    """
    try:
        rows = json.loads(read_small(Path(file)))
        if not isinstance(rows, list) or not rows:
            raise ValueError("no list, or an empty one")
        return [_item(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValidationError("workload", f"{file} holds no list of requests: {error!r:.200}") from error


def _item(row: Any) -> WorkItem:
    prompt = row["prompt_token_ids"] if "prompt_token_ids" in row else row["prompt"]
    return WorkItem(prompt, int(row["max_tokens"]), float(row.get("temperature", 0.0)))
