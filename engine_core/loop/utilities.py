"""The closed set of methods that a client may call by name: questions to the engine, its prefix cache, its profiler."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import psutil

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.fields import defaults
from wavecore.engine_core.kv_cache.block_pool import BlockPool
from wavecore.engine_core.loop.stats import Stats
from wavecore.engine_core.plan import I32, Runner
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling import integrity
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.scheduler import Reason, Scheduler
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import OF_REQUEST
from wavecore.transport.wire.messages import TensorFrame
from wavecore.transport.wire.tensors import from_numpy

MAX_SHOWN = 1000  # requests in one answer, about half a megabyte
LAST_TOKENS = 10  # of each request, shown to people


class Utilities:
    """Reads what the loop works on; called between steps, in its thread."""

    def __init__(
        self,
        config: EngineConfig,
        requests: Requests,
        scheduler: Scheduler,
        runner: Runner,
        stats: Stats,
        update_weights: Callable[[str], None],
    ) -> None:
        self._config, self._stats = config, stats
        self._requests = requests
        self._scheduler = scheduler
        self._runner = runner
        self._methods: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": requests.reset_prefix_cache,
            "check_integrity": self.check_integrity,
            "debug_requests": self.debug_requests,
            "memory_stats": self.memory_stats,
            "settings": self.settings,
            "stats": stats.report,
            "metrics": self.metrics,
            "export_trace": stats.chrome_trace,
            "attention_map": self.attention_map,
            "profile": runner.profile,
            "check_weights": runner.check_weights,
            "update_weights": update_weights,
        }

    def call(self, method: str, args: Mapping[str, Any]) -> tuple[Any, list[TensorFrame]]:
        """Call a method by name. Returns plain values, and tensors.

        Raises:
            ValidationError: no such method, or wrong arguments.
        """
        function = self._methods.get(method)
        if function is None:
            raise ValidationError("method", f"{method!r:.80} is unknown; there are {', '.join(sorted(self._methods))}")
        try:
            inspect.signature(function).bind(**args)
        except TypeError as error:
            raise ValidationError("args", f"{method}: {error}") from None
        result = function(**args)
        return (None, [result]) if isinstance(result, TensorFrame) else (result, [])

    def check_integrity(self) -> bool:
        """Recount blocks, slots and queues; AssertionError names the first difference."""
        integrity.check(self._requests)
        return True

    def metrics(self) -> dict[str, Any]:
        """All that a monitor wants, in one call: `stats`, and histograms and counters by name.

        `ended`: choices by finish reason. `failed`: of those by the code of their error. `refused`: requests at the
        door, by code. `waiting_by_reason`: choices that do not run now.
        """
        histograms = self._requests.histograms
        return {
            **self._stats.report(),
            "ended": dict(histograms.ended),
            "failed": dict(histograms.failed),
            "refused": dict(histograms.refused),
            "waiting_by_reason": self._waiting_by_reason(),
            "histograms": self._stats.histograms(),
        }

    def _waiting_by_reason(self) -> dict[str, int]:
        """The whole queue waits for what its head does. Costs no look at each of its requests."""
        requests, slots = self._requests, self._requests.slots
        held = Counter(request.state for request in slots.requests if request is not None)
        queued = len(requests.waiting)
        here = sum(len(mine) for mine in requests.by_client.values())
        return {
            **dict.fromkeys((reason.value for reason in Reason), 0),
            self._scheduler.blocked_by.value: queued,
            State.FORKING.value: here - queued - int(slots.live.sum()),
            State.LOADING.value: held[State.LOADING],
            State.DRAINING.value: held[State.DRAINING],
        }

    def attention_map(self, prompt: list[int], layer: int, head: int) -> TensorFrame:
        """Attention weights float32 [n, n] of one head over a prompt, computed aside from all requests."""
        return from_numpy(self._runner.attention_map(prompt, layer, head))

    def memory_stats(self) -> dict[str, Any]:
        """KV blocks by state, the runner's bytes by use, and the resident size of this process."""
        kv = self._requests.kv
        return {
            "block_size": kv.block_size,
            **_blocks("blocks", kv.device),
            "blocks_evicted": kv.device.evictions,
            **_blocks("host_blocks", kv.host),
            "process_bytes": psutil.Process().memory_info().rss,
            **self._runner.memory_stats(),
        }

    def settings(self) -> dict[str, dict[str, Any]]:
        """Setting -> value, and origin: "default", "set", or "resolved" where the engine has chosen."""
        usual, resolved = defaults(EngineConfig), asdict(self._runner.info)
        found = {}
        for name, value in asdict(self._config).items():
            chosen = resolved.get(name, value)
            origin = "resolved" if chosen != value else "default" if value == usual[name] else "set"
            found[name] = {"value": chosen, "origin": origin}
        return found

    def debug_requests(self, limit: int = MAX_SHOWN, offset: int = 0) -> list[dict[str, Any]]:
        """State, age and reason for waiting of a page of requests: running ones, then the queue in order.

        What its keys mean stands in `LLM.debug_requests`.

        Args:
            limit: at most so many, up to MAX_SHOWN.
            offset: requests before the first that is shown.
        """
        OF_REQUEST.whole("limit", limit, 0, MAX_SHOWN)
        OF_REQUEST.whole("offset", offset, 0, sys.maxsize)
        requests = self._requests
        queue = requests.waiting.in_order()
        running = [request for request in requests.all() if not request.queued]
        now = requests.clock()
        return [
            {
                "client": request.client.hex(),
                "handle": request.handle,
                "state": request.state.value,
                "reason": self._reason(request, max(place - len(running), 0)),
                "age": now - request.arrival,
                "priority": request.options.priority,
                "prompt_tokens": request.num_prompt,
                "output_tokens": len(self._tokens(request)) - request.num_prompt,
                "cached_tokens": request.cached_tokens,
                "blocks": len(request.blocks),
                "host_blocks": len(request.host_blocks),
                "preemptions": request.preemptions,
                "last_token_ids": self._tokens(request)[-LAST_TOKENS:].tolist(),
            }
            for place, request in enumerate([*running, *queue][offset : offset + limit], offset)
        ]

    def _tokens(self, request: Request) -> I32:
        """All that are known."""
        slots, slot = self._requests.slots, request.slot
        return request.tokens if slot < 0 else slots.tokens[slot, : slots.known[slot]]

    def _reason(self, request: Request, ahead: int) -> str:
        """Why a request does not run; "" when it does. `ahead`: requests before it in the queue."""
        if request.state is State.FORKING:
            return "the first choice must compute the prompt that they share"
        if request.state is State.LOADING:
            return "its blocks are on their way from host memory"
        if request.state is State.DRAINING:
            steps = self._requests.slots.in_flight[request.slot]
            return f"preempted; {steps} steps in flight must come back first"
        if not request.queued:
            return ""
        return f"requests ahead of it: {ahead}" if ahead else self._scheduler.blocked or "the next plan takes it"


def _blocks(name: str, pool: BlockPool) -> dict[str, int]:
    return {name: pool.usable, f"{name}_in_use": pool.usable - pool.num_free, f"{name}_cached": pool.num_cached}
