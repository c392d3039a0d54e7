"""The engine's settings: one frozen dataclass, resolved once at start. Names follow vLLM's.

The same class is command line flags, YAML, environment variables and `--print_config` (frontend/cli/parser.py).
A rank's copy is `dataclasses.replace(config, ...)`; nothing writes to a config later.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

from wavecore.engine_core.api.fields import Bounds, field_checks, make_plain
from wavecore.engine_core.api.request_options import DEADLINE, MAX_ENGINES
from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SEED
from wavecore.transport.errors import ConfigError, NotSupportedError
from wavecore.transport.wire.checks import MAX_TEXT, MAX_TOKEN_ID, Checker

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority", "hybrid"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192  # defaults
MAX_LOCKSTEP_RANKS = 256  # engines, by the words of a group's memory
MAX_NAMES = 64  # of one model
# Bounds of settings; above the most of a whole number an engine would only die later, of memory
COUNT = Bounds(1, (1 << 63) - 1)
ABOVE_ZERO = Bounds(0.0, math.inf, above=True)
FROM_ZERO = Bounds(0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: a folder in Hugging Face form, a `.gguf` file, "default" (SmolLM2-135M-Instruct), or
            "scripted:PATH" (a JSON script for tests, with scripts/ of a checkout on the path).
        tokenizer: a folder or tokenizer.json; None takes the model's.
        skip_tokenizer_init: token ids in, token ids out; no text.
        served_model_name: name shown to clients, or several, of which answers have the first; None takes the model's
            folder or file name.
        load_format: "dummy" draws random weights, to try or measure a model of which only config.json is here.
        generation_config: "vllm" leaves what generation_config.json recommends for sampling; its end tokens stay ends.
        dtype: "auto" takes the checkpoint's on a GPU and float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N", the visible GPU of this number. Each rank has a GPU of its own.
        seed: base of random seeds for requests without one; None draws entropy.
        max_model_len: longest sequence, prompt and output together; None takes the model's, of LongRoPE the original.
        max_num_seqs: requests that run at once (rows of the batch).
        max_num_batched_tokens: token budget of one step, at least a token a row: where only one of the two is given,
            the other one's default gives way. On a CPU steps take less of it: about a second of work.
        max_logprobs: most alternatives that a request may ask for as logprobs or prompt_logprobs; -1 for the whole
            vocabulary. Each takes 8 bytes a token, on the wire and in the client. Above 64 steps take 8 MiB more of the
            device's memory and 24 MiB more of pinned memory; with a very large vocabulary, what two tokens of all take.
        max_inter_token_ms: target for the gap between two tokens of a request. A step with decoding rows holds only as
            many prompt tokens as fit into this time, judged by the steps before; where decoding alone takes more
            than half of it, prompts get as much time again. None gives prompts the whole budget. Needs
            chunked prefill.
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
        watermark: share of KV blocks that stay free when a waiting request starts.
        scheduling_policy: "fcfs", "priority" (lower first) or "hybrid" (priority with linear ageing).
        ageing_seconds: hybrid policy: waiting this long counts as much as one level of priority.
        async_scheduling: keep two steps in flight.
        max_num_queued_reqs, max_num_queued_bytes: bounds of the waiting queue; more is refused as overloaded.
        max_queue_seconds: longest wait for the first step; None waits on.
        max_holding_seconds: longest time a request may hold KV blocks; None holds on.
        enforce_eager: no CUDA graphs: every kernel of a step is launched by itself, which takes the host 10 to 15 ms.
        cudagraph_capture_sizes: rows of decode steps, and tokens of steps with prompts, that are run from CUDA graphs;
            steps are padded to them. None takes all rows to max_num_seqs and tokens to 2,048, in steps of an eighth.
            Graphs are captured while the engine serves, between steps.
        log_level: what engines, their supervisor and this program's client log: "debug", "info" (each preemption, the
            table of memory at the start), "warning" or "error". A program that attaches has WAVECORE_LOG_LEVEL.
        log_stats: log where the time of the loop goes, throughput, queue and cache every ten seconds, at any log_level.
        torch_profiler_dir: folder for the traces of torch's profiler between start_profile() and stop_profile(). None
            only tells Nsight Systems when to trace: `nsys profile --capture-range=cudaProfilerApi`.
        nvtx: name the parts of each step in the timeline of a profiler (Nsight Systems), on a GPU.
        disable_tqdm: no progress bar while weights load.
        address: None binds ipc sockets in the runtime directory; "tcp://HOST:PORT" binds PORT and the next one on that
            interface, for clients on other hosts, too; "tcp://HOST" two ports that are free, for those that read the
            runtime directory.
        keys: folder of CURVE keys that `wavecore keys` made, for engines on several hosts: each host has a copy, under
            the same name where Ray starts them. None makes own keys in the runtime directory.
        runtime_dir: folder of deployment.json, sockets and keys; None makes a fresh one. A named one may hold other
            files, which are never touched, and keeps its keys and allow-list for later starts.
        ready_timeout: seconds from start to ready.
        step_timeout: seconds that one step may compute before the engine counts as stuck. Where a step has to be long,
            such as a prompt on a CPU without chunked prefill, it has ten times what its size should take, if that is
            more. (An engine that does nothing at all while there is work is ended within 5 s.)
        shutdown_timeout: seconds to drain on a first SIGTERM or SIGINT.
        custom_ops: kernel name to "module:function" that replaces it.
        tensor_parallel_size: devices of one engine, which share the model. They divide its heads and its MLP evenly.
        disable_custom_all_reduce: leave all sums over the devices of an engine to NCCL. Small ones else have a kernel,
            where 2, 4 or 8 GPUs reach each other's memory over NVLink.
        check_ranks: compare after each step what an engine's devices did: the plan and the tokens drawn. Where they
            differ the engine ends, and its error names rank, step and row. To look for faults: it costs some time.
        data_parallel_size: engines of one deployment, each with the whole model and devices of its own, or a share of
            the CPU's threads; requests go to the least loaded.
        data_parallel_rank: number of the first engine that is started here, where other hosts or programs start the
            others (docs/several-hosts.md); None starts all.
        data_parallel_size_local: engines that are started here; None: one where data_parallel_rank is given, else all.
        data_parallel_address: "tcp://HOST:PORT" on the host of rank 0, where ranks of several hosts meet: those of
            engines in lockstep, or of an engine with `nnodes`; others need none.
        nnodes: hosts over which the ranks of one engine lie, equally many on each (docs/several-hosts.md).
        node_rank: which of them this one is; clients talk to host 0.
        data_parallel_backend: "mp" starts engines as processes of this host; "ray" each in a Ray actor, on any node of
            a cluster (docs/several-gpus.md; needs `pip install wavecore[ray]`).
        ray_address: of the cluster to join, "HOST:PORT" or "auto"; None starts a private one on this host, if the
            program has not called `ray.init` itself.
        ray_without_token: join a cluster that does not ask for a token (RAY_AUTH_MODE), where whoever reaches a port of
            Ray's runs code as this user.
        dp_lockstep: data-parallel engines run the same number of forward passes, as models need whose engines share
            some of the work: all wait for the slowest, pause and end together, and are one failure domain.
        enable_expert_parallel: of a mixture of experts each rank of all engines holds some experts whole, as many as
            the others, and computes them for the tokens of all; data-parallel engines then run in lockstep.
    """

    model: str = "default"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    served_model_name: Annotated[str | list[str] | None, _names] = None
    load_format: Literal["auto", "dummy"] = "auto"
    generation_config: Literal["auto", "vllm"] = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    seed: Annotated[int | None, SEED] = None
    max_model_len: Annotated[int | None, Bounds(1, 1 << 24)] = None
    max_num_seqs: Annotated[int, Bounds(1, 1 << 16)] = MAX_NUM_SEQS
    max_num_batched_tokens: Annotated[int, Bounds(1, 1 << 22)] = MAX_NUM_BATCHED_TOKENS
    max_logprobs: Annotated[int, Bounds(-1, MAX_TOKEN_ID)] = MAX_LOGPROBS
    max_inter_token_ms: Annotated[float | None, ABOVE_ZERO] = 200.0
    enable_chunked_prefill: bool = True
    block_size: Annotated[int | None, Bounds(1, 1 << 16)] = None
    num_gpu_blocks_override: Annotated[int | None, Bounds(2, (1 << 31) - 1)] = None
    gpu_memory_utilization: Annotated[float, Bounds(0.0, 1.0, above=True)] = 0.9
    kv_cache_memory_gib: Annotated[float, ABOVE_ZERO] = 2.0
    swap_space_gib: Annotated[float, FROM_ZERO] = 0.0
    enable_prefix_caching: bool = True
    watermark: Annotated[float, Bounds(0.0, 0.99)] = 0.01
    scheduling_policy: Policy = "fcfs"
    ageing_seconds: Annotated[float, Bounds(0.0, 1e9, above=True)] = 10.0
    async_scheduling: bool = True
    max_num_queued_reqs: Annotated[int, Bounds(1, 1 << 24)] = 16384
    max_num_queued_bytes: Annotated[int, COUNT] = 1 << 30
    max_queue_seconds: Annotated[float | None, DEADLINE] = None
    max_holding_seconds: Annotated[float | None, ABOVE_ZERO] = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: Annotated[list[int] | None, Bounds(1, 1 << 16)] = None
    log_level: LogLevel = "warning"
    log_stats: bool = False
    torch_profiler_dir: str | None = None
    nvtx: bool = False
    disable_tqdm: bool = False
    address: str | None = None
    keys: str | None = None
    runtime_dir: str | None = None
    ready_timeout: Annotated[float, ABOVE_ZERO] = 600.0
    step_timeout: Annotated[float, ABOVE_ZERO] = 60.0
    shutdown_timeout: Annotated[float, FROM_ZERO] = 30.0
    custom_ops: dict[str, str] | None = None
    tensor_parallel_size: Annotated[int, Bounds(1, 1 << 8)] = 1
    disable_custom_all_reduce: bool = False
    check_ranks: bool = False
    data_parallel_size: Annotated[int, Bounds(1, MAX_ENGINES)] = 1
    data_parallel_rank: Annotated[int | None, Bounds(0, MAX_ENGINES - 1)] = None
    data_parallel_size_local: Annotated[int | None, Bounds(1, MAX_ENGINES)] = None
    data_parallel_address: str | None = None
    nnodes: Annotated[int, Bounds(1, 1 << 8)] = 1
    node_rank: Annotated[int, Bounds(0, (1 << 8) - 1)] = 0
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    ray_address: str | None = None
    ray_without_token: bool = False
    dp_lockstep: bool = False
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        make_plain(self, CHECKS)
        if self.enable_expert_parallel and self.data_parallel_size > 1:
            object.__setattr__(self, "dp_lockstep", True)
        if self.dp_lockstep and not 1 < self.data_parallel_size <= MAX_LOCKSTEP_RANKS:
            size = f"data_parallel_size is {self.data_parallel_size}"
            raise ConfigError(f"dp_lockstep needs a data_parallel_size of 2 to {MAX_LOCKSTEP_RANKS}; {size}")
        if self.data_parallel_backend == "ray":
            self._check_ray()
        elif self.ray_address is not None:
            raise ConfigError(f"ray_address {self.ray_address} is for data_parallel_backend ray, and that is mp")
        self._check_hosts()
        if self.max_num_batched_tokens >= self.max_num_seqs:
            return
        if self.max_num_seqs == MAX_NUM_SEQS:
            object.__setattr__(self, "max_num_seqs", self.max_num_batched_tokens)
        elif self.max_num_batched_tokens == MAX_NUM_BATCHED_TOKENS:
            object.__setattr__(self, "max_num_batched_tokens", self.max_num_seqs)
        else:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step of all running requests would not fit; raise the one or lower the other"
            )

    @property
    def is_scripted(self) -> bool:
        """Whether it runs no model, but what a test has written down."""
        return self.model.startswith("scripted:")

    @property
    def engines_here(self) -> range:
        """Numbers of the engines that are started here, of the data_parallel_size of all."""
        first, every = self.data_parallel_rank or 0, self.data_parallel_rank is None
        return range(first, first + (self.data_parallel_size_local or (self.data_parallel_size if every else 1)))

    @property
    def ranks_here(self) -> range:
        """Numbers of an engine's ranks that are started here, of the tensor_parallel_size of all."""
        each = self.tensor_parallel_size // self.nnodes
        return range(each * self.node_rank, each * (self.node_rank + 1))

    @property
    def spans_hosts(self) -> bool:
        """Ranks that compute together with others that are started elsewhere."""
        return self.nnodes > 1 or (self.dp_lockstep and len(self.engines_here) < self.data_parallel_size)

    @property
    def expert_ranks(self) -> int:
        """Ranks of all engines, over which whole experts are spread; 1 where they are not."""
        return self.data_parallel_size * self.tensor_parallel_size if self.enable_expert_parallel else 1

    def _check_hosts(self) -> None:
        if self.keys is not None and self.address is None and self.data_parallel_backend == "mp":
            raise ConfigError(f"keys {self.keys}: they are for tcp; give address, too")
        if (here := self.engines_here).stop > self.data_parallel_size:
            asked = f"data_parallel_rank and data_parallel_size_local ask for engines {here.start} to {here[-1]}"
            raise ConfigError(f"{asked}, and data_parallel_size is {self.data_parallel_size}")
        if self.node_rank >= self.nnodes or self.tensor_parallel_size % self.nnodes:
            sizes = f"tensor_parallel_size is {self.tensor_parallel_size}, node_rank {self.node_rank}"
            raise ConfigError(f"nnodes {self.nnodes}: {sizes}; hosts have equally many ranks, and are counted from 0")
        head = self.data_parallel_address
        if self.spans_hosts and not (self.address and self.keys and head):
            needs = "data_parallel_address (the same on all hosts), address (this host's) and keys"
            raise ConfigError(f"ranks that compute together on several hosts need {needs}")
        if head is not None and not re.fullmatch(r"tcp://\S+:[1-9]\d{0,4}", head):
            raise ConfigError(f"data_parallel_address {head!r}: expected tcp://HOST:PORT, on the host of rank 0")
        if self.nnodes > 1 and (self.dp_lockstep or len(here) > 1 or self.is_scripted):
            way_out = "of several, start each with its data_parallel_rank; those in lockstep have one host each"
            raise NotSupportedError(f"nnodes {self.nnodes} is for one engine, and not for a scripted one: {way_out}")

    def _check_ray(self) -> None:
        if self.dp_lockstep and not (self.data_parallel_address and self.keys):
            needs = "data_parallel_address, on the node of engine 0, and keys, a folder that every node has"
            raise ConfigError(f"dp_lockstep with data_parallel_backend ray needs {needs}")
        if self.nnodes > 1:
            raise NotSupportedError("nnodes with data_parallel_backend ray: an engine has one node; start it by hand")
        if self.address is not None:
            way_out = "an engine listens at its node's address, with CURVE; leave address out"
            raise NotSupportedError(f"address with data_parallel_backend ray: {way_out}")
        if len(self.engines_here) < self.data_parallel_size:
            raise NotSupportedError("data_parallel_rank with data_parallel_backend ray: leave it out, Ray starts all")
        if self.device.startswith("cuda:"):
            raise ConfigError(f'device {self.device!r}: Ray chooses the GPUs; give "cuda"')
        if self.ray_address is not None and not re.fullmatch(r"auto|[^/:\s]+:\d{1,5}", self.ray_address):
            raise ConfigError(f'ray_address {self.ray_address!r}: give "HOST:PORT" of the cluster\'s head, or "auto"')

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from `to_json`."""
        return cls(**json.loads(text))


# What transport, which knows no settings, tells when a process ran out of memory or was not ready in time.
MEMORY_ADVICE = "lower kv_cache_memory_gib, max_num_seqs or max_model_len, or give the machine or container more memory"
SLOW_START_ADVICE = "raise ready_timeout"

OF_SETTING = Checker(lambda name, reason: ConfigError(f"{name} {reason}"))


def _names(name: str, value: Any) -> str | list[str]:
    if isinstance(value, str):
        return OF_SETTING.text(name, value, 0, MAX_TEXT)
    return list(OF_SETTING.texts(name, value, MAX_NAMES, MAX_TEXT))


CHECKS = field_checks(EngineConfig, OF_SETTING)
"""Setting -> its check, which takes a value and what an error shall call it."""
