"""Looks into a running engine: requests, memory, steps, prefix cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.frontend.client.client import EngineClient
from wavecore.transport.wire.tensors import to_numpy


def call_all(client: EngineClient, method: str, **args: Any) -> list[Any]:
    """The answers of every engine, in order of index.

    Raises:
        EngineDead, RequestTimeout: an engine did not answer.
        ValidationError: no such method, or wrong arguments.
    """
    futures = [client.call(method, args, engine=index) for index in client.engines]
    return [future.result().value for future in futures]


def reset_prefix_cache(client: EngineClient) -> bool:
    return all(call_all(client, "reset_prefix_cache"))


def debug_requests(client: EngineClient) -> list[dict[str, Any]]:
    return [row for rows in call_all(client, "debug_requests") for row in rows]


def step_stats(client: EngineClient) -> list[dict[str, Any]]:
    return call_all(client, "stats")


def attention_map(client: EngineClient, prompt: list[int], layer: int, head: int) -> npt.NDArray[np.float32]:
    """float32 [n, n]; see `LLM.visualize_attention`."""
    answer = client.call("attention_map", {"prompt": prompt, "layer": layer, "head": head}).result()
    return to_numpy(answer.frames[0]).astype(np.float32)


def print_memory_stats(client: EngineClient) -> None:
    for index, stats in zip(client.engines, call_all(client, "memory_stats"), strict=False):
        sys.stdout.write(memory_table(index, stats) + "\n")


def memory_table(index: int, stats: Mapping[str, Any]) -> str:
    """One line an entry; numbers of bytes as MiB."""
    lines = [f"engine {index}"]
    for name, value in stats.items():
        size = f"{value / 2**20:12.1f} MiB" if name.endswith("bytes") and isinstance(value, int) else f"{value!s:>16}"
        lines.append(f"  {name.removesuffix('_bytes').replace('_', ' '):<28}{size}")
    return "\n".join(lines)
