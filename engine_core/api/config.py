"""The engine's settings: one frozen dataclass, resolved once at start. Names follow vLLM's. Knows no torch.

The same class is command line flags, YAML, environment variables and `--print_config` (frontend/cli_parser.py).
A rank's copy is `dataclasses.replace(config, ...)`; nothing writes to a config later.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from wavecore.engine_core.api.bounds import shown
from wavecore.transport.errors import ConfigError, NotSupportedError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority", "hybrid"]
# Above these an engine would only die later, of memory
MOST = {
    "max_model_len": 1 << 24,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 22,
    "max_num_queued_reqs": 1 << 24,
    "block_size": 1 << 16,
    "num_gpu_blocks_override": (1 << 31) - 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: a folder in Hugging Face form, a `.gguf` file, "default" (SmolLM2-135M-Instruct), or
            "scripted:PATH" (a JSON script for tests).
        tokenizer: a folder or tokenizer.json; None takes the model's.
        skip_tokenizer_init: token ids in, token ids out; no text.
        served_model_name: name shown to clients; None takes the model's folder or file name.
        dtype: "auto" takes the checkpoint's on a GPU and float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        seed: base of random seeds for requests without one; None draws entropy.
        max_model_len: longest sequence, prompt and output together; None takes the model's.
        max_num_seqs: requests that run at once (rows of the batch).
        max_num_batched_tokens: token budget of one step.
        enable_chunked_prefill: split prompts over steps; off, a prompt must fit into one step's budget.
        block_size: tokens a KV block; None chooses from the model.
        num_gpu_blocks_override: KV blocks, whatever gpu_memory_utilization says, as far as the device holds them.
        gpu_memory_utilization: share of the device's memory for this engine's weights, activations and KV cache, which
            takes what the others leave. Each engine on a device has its own share: two run beside each other with 0.45.
            What other processes hold limits only what is really free. The CUDA context, about half a GiB, comes on top.
            With prefix caching the KV cache takes its whole share; without, only what max_num_seqs sequences can fill.
        kv_cache_memory_gib: size of the KV cache on a CPU; memory is taken when a block is first written.
        swap_space_gib: pinned host memory for KV blocks of requests that were pushed out, and for a copy of each cached
            prefix, which outlives its blocks on the device.
        enable_prefix_caching: reuse the KV blocks of shared prompt prefixes.
        watermark: share of KV blocks kept free when a waiting request is admitted.
        scheduling_policy: "fcfs", "priority" (lower first) or "hybrid" (priority with linear ageing).
        ageing_seconds: hybrid policy: waiting this long counts as much as one level of priority.
        async_scheduling: keep two steps in flight.
        max_num_queued_reqs, max_num_queued_bytes: bounds of the waiting queue; more is refused as overloaded.
        max_queue_seconds: longest wait for the first step; None waits on.
        max_holding_seconds: longest time a request may hold KV blocks; None holds on.
        log_stats: log where the time of the loop goes, throughput, queue and cache every ten seconds.
        disable_tqdm: no progress bar while weights load.
        address: None binds ipc sockets in the runtime directory; "tcp://HOST" binds two ports on that interface.
        runtime_dir: folder of deployment.json and sockets; None makes a fresh one.
        ready_timeout: seconds from start to ready.
        step_timeout: seconds that one step may compute before the engine counts as stuck (an engine that does nothing
            at all while there is work is ended after 5 s).
        shutdown_timeout: seconds to drain on a first SIGTERM or SIGINT.
        custom_ops: kernel name to "module:function" that replaces it.
        tensor_parallel_size, data_parallel_size: ranks; more than one is not supported yet.
    """

    model: str = "default"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_gib: float = 2.0
    swap_space_gib: float = 0.0
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    scheduling_policy: Policy = "fcfs"
    ageing_seconds: float = 10.0
    async_scheduling: bool = True
    max_num_queued_reqs: int = 16384
    max_num_queued_bytes: int = 1 << 30
    max_queue_seconds: float | None = None
    max_holding_seconds: float | None = None
    log_stats: bool = False
    disable_tqdm: bool = False
    address: str | None = None
    runtime_dir: str | None = None
    ready_timeout: float = 600.0
    step_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    custom_ops: dict[str, str] | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in _KINDS:
            if words := fault(name, getattr(self, name)):
                raise ConfigError(f"{name} {words}")
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be at most {most}, not {shown(getattr(self, name))}")
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise NotSupportedError(f"{name}={shown(getattr(self, name))}: only 1 is supported in this version")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_queued_reqs",
            "max_num_queued_bytes",
            "max_model_len",
            "block_size",
        ):
            self._at_least(name, 1)
        self._at_least("num_gpu_blocks_override", 2)
        for name in ("kv_cache_memory_gib", "ready_timeout", "step_timeout", "ageing_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {shown(getattr(self, name))}")
        for name in ("swap_space_gib", "shutdown_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, not {shown(getattr(self, name))}")
        for name in ("max_queue_seconds", "max_holding_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 or null, not {shown(getattr(self, name))}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be from 0 to below 1, not {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step of all running requests would not fit; raise the one or lower the other"
            )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} must be at least {low}, not {shown(value)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`; an unknown field is a ConfigError."""
        values = json.loads(text)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown settings: {', '.join(unknown)}")
        return cls(**values)


_KINDS = get_type_hints(EngineConfig)


def fault(name: str, value: Any) -> str | None:
    """What is wrong with the kind of a setting's value, None for nothing."""
    kind = _KINDS[name]
    return None if _is_a(value, kind) else f"must be {_in_words(kind)}, not {shown(value)}"


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value fits a field's annotation; a whole number is a float too, a bool is neither."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, UnionType):
        return any(_is_a(value, part) for part in get_args(kind))
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair)
    if kind is float:
        return type(value) in (float, int)
    return type(value) is kind


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(part) for part in get_args(kind))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(kind, "a mapping of texts")
