"""Looks into running engines: their requests, times, memory and health, traces, the attention map as a PNG."""

import asyncio
import json
import struct
import sys
import zlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.service import Service
from wavecore.frontend.prompts import PromptType, as_prompt
from wavecore.transport.errors import EngineDead, NotSupportedError, ValidationError, WavecoreError
from wavecore.transport.wire.checks import OF_REQUEST
from wavecore.transport.wire.messages import Result
from wavecore.transport.wire.tensors import to_numpy

P = ParamSpec("P")
R = TypeVar("R")
F32 = npt.NDArray[np.float32]
MAX_SHOWN = 1000  # requests of an engine in one answer
UPDATE_TIMEOUT = 3600.0  # seconds until `update_weights` is given up
LEAST_PIXELS = 512
# Dark to bright at even steps, near viridis
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float32)


def start_calls(client: EngineClient, method: str, timeout: float = 60.0, **args: Any) -> dict[int, Future[Result]]:
    """A call of all engines that are up, by their index; a pause or its end is a call of one, which asks the others.

    Raises:
        EngineDead: no engine is up.
        NotSupportedError: a pause of engines that do not run in lockstep.
    """
    client.check_health()
    asked = client.engines
    if method in ("pause", "resume"):
        if not client.resolved.get("lockstep"):
            raise NotSupportedError(f"{method}() is for engines that run in lockstep; start with dp_lockstep")
        asked = asked[:1]
    return {index: client.call(method, args, engine=index, timeout=timeout) for index in asked}


def call_all(client: EngineClient, method: str, timeout: float = 60.0, **args: Any) -> dict[int, Any]:
    """The answers to `start_calls`.

    Args:
        timeout: seconds.

    Raises:
        EngineDead, RequestTimeout: no engine is up, or one did not answer.
        ValidationError: no such method, or wrong arguments.
    """
    return {index: call.result().value for index, call in start_calls(client, method, timeout, **args).items()}


def answers(client: EngineClient, seconds: float, method: str, **args: Any) -> dict[int, Any]:
    """As `call_all`, by index, of those engines that answer in time."""
    calls, found = dict[int, Future[Result]](), {}
    with suppress(EngineDead):  # none is there just now
        calls = start_calls(client, method, seconds, **args)
    for index, call in calls.items():
        with suppress(WavecoreError):
            found[index] = call.result().value
    return found


class Inspection:
    """What `LLM` offers to look into its engines; `AsyncLLM` makes coroutines of it.

    Raises:
        EngineDead, RequestTimeout: an engine did not answer within a minute.
    """

    _service: Service

    def check_health(self) -> None:
        """Raises:
        EngineDead: no engine takes requests; with the cause.
        """
        self._service.client.check_health()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, for instance after a change of weights."""
        call_all(self._service.client, "reset_prefix_cache")
        return True

    def pause(self) -> None:
        """Stop the engines of a lockstep group; returns when all their devices are idle.

        Requests keep their place and their KV cache, and new ones queue up. Deadlines pass on. Any client may `resume`.

        Raises:
            NotSupportedError: the engines do not run in lockstep.
        """
        call_all(self._service.client, "pause")

    def resume(self) -> None:
        """End a pause, whoever began it.

        Raises:
            NotSupportedError: the engines do not run in lockstep.
        """
        call_all(self._service.client, "resume")

    def update_weights(self, path: str | Path) -> None:
        """Load other weights of the same model into all engines, between two steps; in lockstep, in a pause of all.

        Requests go on with the KV cache that they have; cached prefixes are forgotten. A pause that was there is over
        then. An engine that is started again has the weights of its start.

        Args:
            path: a folder on the engines' host, of safetensors files with the names and shapes of the engines' own.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape, or a file cannot be read; nothing changed.
            ValidationError: another update is on its way.
            EngineDead: it failed later, and ended the engine, or all engines in lockstep.
        """
        folder, client = str(OF_REQUEST.path("path", path)), self._service.client
        # Of several updates the first engine lets one begin, and ends that of a client that left.
        first = min(call_all(client, "check_weights", folder=folder))
        client.call("begin_update", engine=first).result()
        try:
            if self._service.resolved.get("lockstep"):
                self.pause()
            call_all(client, "update_weights", UPDATE_TIMEOUT, folder=folder)
        finally:
            with suppress(EngineDead):
                client.call("end_update", engine=first).result()

    def debug_requests(self, limit: int = MAX_SHOWN, offset: int = 0) -> list[dict[str, Any]]:
        """A page of the requests in each engine: those that hold a slot, then the queue in order.

        Args:
            limit: at most so many of an engine, up to 1,000.
            offset: requests before the first that is shown.

        Returns:
            One dictionary a choice of a request:
                engine: that has it, from 0.
                client, handle: its name on the wire; the client's in hex.
                state: "waiting" or "preempted" (queued), "forking" (waits for the prompt of the first choice),
                    "loading" (its blocks come from the host), "running", or "draining" (preempted in this moment).
                reason: why it does not run; "" when it does.
                age: seconds since it arrived.
                priority: as it was given.
                prompt_tokens, output_tokens: how many tokens.
                cached_tokens: of the prompt, found in the prefix cache.
                blocks, host_blocks: KV blocks held on the device and on the host.
                preemptions: how often its blocks were taken.
                last_token_ids: its last ten tokens, of prompt and output together.
        """
        limit = OF_REQUEST.whole("limit", limit, 0, MAX_SHOWN)
        offset = OF_REQUEST.whole("offset", offset, 0, sys.maxsize)
        pages = call_all(self._service.client, "debug_requests", limit=limit, offset=offset)
        return [{"engine": index, **row} for index, page in pages.items() for row in page]

    debug_sequence_states = debug_requests

    def step_stats(self) -> list[dict[str, Any]]:
        """What each engine has done since its start, and its load now.

        Returns:
            One dictionary an engine that is up:
                engine: its number, from 0.
                steps: of the model.
                prompt_tokens, output_tokens: computed, and drawn.
                preemptions: times that a request lost its blocks to another.
                recomputed_tokens, swapped_tokens: tokens that were computed again, or moved to the host, for that.
                finished: choices that ended.
                waves, dummy_steps: of engines in lockstep: times between two moments in which all were idle, and
                    forward passes of an engine that had no step, beside those of others.
                schedule_seconds, launch_seconds, wait_seconds, update_seconds: time in each phase of the loop: plan a
                    step, queue it on the device, wait for its tokens, hand them out. On a CPU `wait` computes.
                schedule_share, ...: the same as parts of their sum, 0 to 1.
                cache_queries, cache_hits: prompt tokens looked up and found in the prefix cache; hit_rate: their ratio.
                running, waiting: choices that hold a slot, and that are queued.
                cache_usage: part of the KV blocks that is in use, 0 to 1.
        """
        return [{"engine": index, **stats} for index, stats in call_all(self._service.client, "stats").items()]

    def print_memory_stats(self) -> None:
        """Print a table of what each engine's memory holds; of several devices, use by use, the largest."""
        for index, stats in call_all(self._service.client, "memory_stats").items():
            sys.stdout.write(memory_table(index, stats) + "\n")

    def export_trace(self, path: str | Path = "trace.json") -> dict[str, Any]:
        """The last thousand turns of each engine's loop, as a Chrome trace (https://ui.perfetto.dev, chrome://tracing).

        Args:
            path: the file to write.

        Returns:
            What the file holds: {"traceEvents": [...]}. A turn has an event a phase, see `step_stats`, whose `args` are
            the step's rows and tokens, and a counter of the load. Times are microseconds; `pid` is the engine.
        """
        file = OF_REQUEST.path("path", path)
        found = merged_trace(call_all(self._service.client, "export_trace"))
        file.write_text(json.dumps(found), encoding="utf-8")
        return found

    def start_profile(self) -> None:
        """Trace what the engines run, until `stop_profile`.

        With the setting `torch_profiler_dir` torch's profiler does, into that folder; without it, Nsight Systems
        (`nsys profile --capture-range=cudaProfilerApi`).

        Raises:
            NotSupportedError: a CPU without `torch_profiler_dir`.
            ValidationError: a profile runs already.
        """
        call_all(self._service.client, "profile", on=True)

    def stop_profile(self) -> None:
        """End what `start_profile` began; a trace is written by then, for https://ui.perfetto.dev.

        Raises:
            ValidationError: no profile runs.
        """
        call_all(self._service.client, "profile", on=False)

    def visualize_attention(self, prompt: PromptType, layer: int, head: int, path: str | Path = "attention.png") -> F32:
        """Attention of one head over a prompt, as a PNG heat map and as numbers.

        Args:
            prompt: at most 2,048 tokens. To see how an answer was drawn, give prompt and answer as one prompt.
            layer, head: numbers from 0.
            path: the file to write; rows are queries, columns keys.

        Returns:
            float32 [n, n] of probabilities; row i sums to 1 over columns 0..i.
        """
        file = OF_REQUEST.path("path", path)
        request = self._service.prepare(as_prompt(prompt), SamplingParams(max_tokens=0))
        if request.prompt_embeds is not None:
            raise ValidationError("prompt", "must be text or token ids")
        places = {name: OF_REQUEST.whole(name, at, 0, 1 << 16) for name, at in (("layer", layer), ("head", head))}
        answer = self._service.client.call("attention_map", {"prompt": request.prompt.tolist(), **places}).result()
        weights = to_numpy(answer.frames[0]).astype(np.float32)
        file.write_bytes(png(heat_map(weights)))
        return weights


def merged_trace(traces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Chrome traces of several engines, by index, as one; `pid` is the engine."""
    events = [{**event, "pid": index} for index, trace in traces.items() for event in trace["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def beside_loop(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A method that waits as a coroutine, which waits in one of asyncio's worker threads."""

    @wraps(method)
    async def waits(self: Any, /, *args: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **options)

    return waits


def memory_table(index: int, stats: Mapping[str, Any]) -> str:
    """One line an entry; numbers of bytes as MiB."""
    lines = [f"engine {index}"]
    for name, value in stats.items():
        size = f"{value / 2**20:12.1f} MiB" if name.endswith("bytes") and isinstance(value, int) else f"{value!s:>16}"
        lines.append(f"  {name.removesuffix('_bytes').replace('_', ' '):<28}{size}")
    return "\n".join(lines)


def heat_map(values: F32) -> npt.NDArray[np.uint8]:
    """RGB pixels uint8 [height, width, 3] of `values` [rows, columns]: the largest brightest, small ones magnified."""
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / ((high - low) or 1.0) * (len(COLOURS) - 1)
    mixed = np.stack([np.interp(scaled, np.arange(len(COLOURS)), channel) for channel in COLOURS.T], axis=-1)
    pixels: npt.NDArray[np.uint8] = mixed.round().astype(np.uint8)
    zoom = -(-LEAST_PIXELS // max(values.shape))
    return np.repeat(np.repeat(pixels, zoom, axis=0), zoom, axis=1)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A file's bytes (https://www.w3.org/TR/png-3/: 8-bit RGB, one IDAT chunk); nobody needs a plotting library."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line starts with its filter type, 0
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
