"""Answers to "what is my request waiting for?" and "where is the memory?"."""

from __future__ import annotations

from typing import Any

import psutil

from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.requests import Lifecycle


def debug_requests(life: Lifecycle, blocked: str, limit: int) -> list[dict[str, Any]]:
    """One entry a request, running ones first, then the queue in order; at most `limit`.

    Args:
        blocked: why the last plan did not admit the head of the queue.
    """
    queue = life.waiting.requests()
    running = [request for request in life.all() if not request.queued]
    place = {id(request): i for i, request in enumerate(queue)}
    now = life.clock()
    return [
        {
            "client": request.client.hex(),
            "handle": request.handle,
            "state": request.state.value,
            "reason": _reason(life, request, place.get(id(request), 0), blocked),
            "age": now - request.arrival,
            "priority": request.options.priority,
            "prompt_tokens": request.num_prompt,
            "output_tokens": _known(life, request) - request.num_prompt,
            "cached_tokens": request.cached_tokens,
            "blocks": len(request.blocks),
            "host_blocks": len(request.host_blocks),
            "preemptions": request.preemptions,
        }
        for request in (*running, *queue)[:limit]
    ]


def _known(life: Lifecycle, request: Request) -> int:
    return len(request.tokens) if request.slot < 0 else int(life.slots.known[request.slot])


def _reason(life: Lifecycle, request: Request, place: int, blocked: str) -> str:
    if request.state is State.FORKING:
        return "the first choice must compute the prompt that they share"
    if request.state is State.LOADING:
        return "its blocks are on their way from host memory"
    if request.state is State.DRAINING:
        return f"preempted; {life.slots.in_flight[request.slot]} steps in flight must come back first"
    if request.queued:
        return blocked or "the next plan takes it" if place == 0 else f"{place} requests are ahead of it"
    return ""


def memory_stats(life: Lifecycle, runner: dict[str, int]) -> dict[str, Any]:
    """KV blocks by state, the runner's bytes by use, and the resident size of this process."""
    device, host = life.kv.device, life.kv.host
    return {
        "block_size": life.kv.block_size,
        "blocks": device.usable,
        "blocks_in_use": device.usable - device.num_free,
        "blocks_cached": device.num_cached,
        "blocks_evicted": device.evictions,
        "host_blocks": host.usable,
        "host_blocks_in_use": host.usable - host.num_free,
        "host_blocks_cached": host.num_cached,
        "process_bytes": psutil.Process().memory_info().rss,
        **runner,
    }
