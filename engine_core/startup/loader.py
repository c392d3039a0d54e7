"""From settings and a model's files to a runner: load the weights, size the KV cache. Imports torch."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from threading import Thread

import torch
import torch.nn.functional as F
from triton.runtime.cache import triton_key

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import cuda_number
from wavecore.engine_core.execution.inspection import Profiler
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.models.files import ModelSource, Progress
from wavecore.engine_core.models.gguf_weights import open_gguf
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weights import Parameters, draw, fill, open_folder
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.startup.compilation import KernelCompiler
from wavecore.engine_core.startup.free_memory import free_memory
from wavecore.engine_core.startup.kv_cache_size import allocate_kv_cache, most_blocks
from wavecore.engine_core.startup.memory_budget import SMALLER_STEPS, gib, no_room, refused, would_fit
from wavecore.kernels import ops
from wavecore.kernels.attention.shapes import refusal
from wavecore.parallel.collectives import Collectives
from wavecore.parallel.experts import Exchange
from wavecore.parallel.layers import exact_float32
from wavecore.parallel.ranks import Ranks
from wavecore.transport.errors import ConfigError, ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_BYTES = 2 << 20
CPU_FLOPS = 1e10  # of a core, at the least; how fast it really is shows with the first steps


def load_runner(
    config: EngineConfig,
    source: ModelSource,
    progress: Progress,
    meet: Callable[[torch.device], Ranks] = lambda _device: Ranks(),
    compiler: KernelCompiler | None = None,
) -> ModelRunner:
    """Load the weights and allocate the KV cache.

    Args:
        meet: called with this rank's device; gives the ranks that compute together, of which this one loads its part.
        compiler: compiles the kernels while the weights load.

    Raises:
        ModelError: the model's files.
        ConfigError: a setting that this model or device cannot have, or settings under which memory would do.
        ResourceError: not enough memory, and no setting makes room.
    """
    progress("device", 0.0)
    device = find_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything touches CUDA: no other GPU gets a context of this process
        Thread(target=triton_key, daemon=True).start()  # a part of every kernel's key: it reads all of Triton, 400 MB
    ranks = meet(device)
    group, exchange = ranks.tensor, Exchange(ranks.data)
    shard = Shard(source.spec, group.size, group.rank, config.expert_ranks, ranks.rank % config.expert_ranks)
    spec = shard.spec
    dtype, block_size, length = resolve(config, spec, device)
    if reason := refusal(spec.num_heads, spec.num_kv_heads, spec.head_dim, device):
        raise ModelError(f"{source.path}: {reason}")
    if dtype == torch.float32:
        exact_float32()
    _register_ops(config.custom_ops or {}, torch.empty(0, dtype=dtype, device=device))
    length = exchange.least(group.least(length))
    progress("load", 0.0)
    if config.load_format == "dummy":
        check_weights(source, shard.spec, dtype, device)
        parameters = draw(shard, dtype, device)
    else:
        parameters = _load_weights(source, shard, dtype, device, progress)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else tables would keep large segments that tensors passed through
    progress("tables", 0.0)
    with refused("the tables of all requests do not fit into memory", SMALLER_STEPS):
        runner = make_runner(config, source, shard, parameters, block_size, length, group, exchange)
    runner.marks, runner.profiler = config.nvtx and device.type == "cuda", Profiler(device, config.torch_profiler_dir)
    if device.type == "cuda":
        progress("compile", 0.0)
        if compiler is not None:
            _first_uses(dtype, device)
            compiler.wait()
        group.least(0)  # rank 0 waited for all
    allocate_kv_cache(runner, config, progress)
    return runner


def _first_uses(dtype: torch.dtype, device: torch.device) -> None:
    """While kernels compile: import them, and have torch load what steps use of its own, which takes 0.3 s."""
    for operation in ops.OPERATIONS.values():
        _ = operation.kernel
    x = torch.ones(2, 64, dtype=dtype, device=device)
    F.linear(x, x)
    F.normalize(x.float()).topk(2).values.log_softmax(-1).norm()


def make_runner(
    config: EngineConfig,
    source: ModelSource,
    shard: Shard,
    parameters: Parameters,
    block_size: int,
    length: int,
    group: Collectives,
    exchange: Exchange | None = None,
) -> ModelRunner:
    """A runner without a KV cache, on the device of the parameters, which are this rank's share."""
    spec, device = shard.spec, parameters["embed"].device
    info = RunnerInfo(
        num_blocks=0,
        num_host_blocks=0,
        block_size=block_size,
        max_model_len=length,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        eos_token_ids=source.eos_token_ids,
        dtype=str(parameters["embed"].dtype).removeprefix("torch."),
        device=str(device),
        model_path=str(source.path),
        token_seconds=2 * spec.num_parameters / (CPU_FLOPS * torch.get_num_threads()) if device.type == "cpu" else 0.0,
        max_logprobs=config.max_logprobs,
    )
    model = Decoder(spec, parameters, length, group, exchange)
    sizes = config.cudagraph_capture_sizes
    return ModelRunner(model, info, config.max_num_seqs, config.max_num_batched_tokens, sizes, shard)


def _load_weights(
    source: ModelSource, shard: Shard, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Parameters:
    """Names and shapes are checked first: a config that lies about sizes says so, and allocates nothing."""
    spec, path = source.spec, source.path
    opened = open_folder(path, spec) if source.gguf is None else nullcontext(open_gguf(source.gguf, spec))
    half = would_fit(["dtype bfloat16"] if dtype == torch.float32 else [])
    with opened as tensors:
        check_weights(source, shard.spec, dtype, device)
        with refused(f"the weights of {path} do not fit into memory", half):  # by their sizes they do: half surely does
            return fill(tensors, shard, dtype, device, progress)


def check_weights(source: ModelSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose weights, or this rank's share of them, cannot fit, before any of them is read.

    Raises:
        ConfigError: with the bytes that they take and the bytes that are free, where half of them would fit.
        ResourceError: likewise, where no setting makes room.
    """
    need, (free, total) = spec.num_parameters * dtype.itemsize, free_memory(device)
    if need <= free:
        return
    weights = f"the weights of {source.path} take {gib(need)} as {str(dtype).removeprefix('torch.')}"
    half = would_fit(["dtype bfloat16"] if 2 * spec.num_parameters <= free else [])
    raise no_room(f"{weights}, and of {device}'s {gib(total)} only {gib(free)} are free", half)


def _register_ops(custom_ops: Mapping[str, str], like: torch.Tensor) -> None:
    """Replace kernels by the user's functions, given as "module:function", tried on the engine's device and dtype."""
    for name, target in custom_ops.items():
        module, _, function = target.partition(":")
        try:
            ops.register_op(name, getattr(import_module(module), function), like)
        except Exception as error:  # the user's module may raise anything
            raise ConfigError(f"custom_ops {name}={target!r}: {error!r}") from error


def find_device(name: str) -> torch.device:
    number = cuda_number(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index, count = number or 0, torch.cuda.device_count()
    if index >= count:
        way_out = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set device cpu"
        raise ConfigError(f"device {name!r}: this process sees {count} CUDA devices; {way_out}")
    return torch.device("cuda", index)


def resolve(config: EngineConfig, spec: ModelSpec, device: torch.device) -> tuple[torch.dtype, int, int]:
    """What the settings leave to the model and its device: dtype, tokens of a KV block, and of the longest sequence.

    Raises:
        ConfigError: no model of this kind can be so long.
    """
    dtype = _dtype(config, spec, device)
    block_size = config.block_size or choose_block_size(spec.kv_values_per_token * dtype.itemsize)
    return dtype, block_size, _max_model_len(config, spec, block_size, dtype, device)


def _dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES.get(spec.dtype, torch.bfloat16)
    return DTYPES[config.dtype]


def choose_block_size(kv_bytes_per_token: int) -> int:
    """Tokens a block, a power of two from 16 to 128: the smallest that makes a block 2 MiB.

    Small blocks share prefixes finely; large ones make block tables, hashing and copies cheap. A model with little KV
    a token can afford many tokens a block.
    """
    size = 16
    while size < 128 and size * kv_bytes_per_token < BLOCK_BYTES:
        size *= 2
    return size


def _max_model_len(
    config: EngineConfig, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The length asked for, or the model's, but no more than the KV cache could ever hold: tables have this length."""
    asked, rope, known = config.max_model_len, spec.ropes[0], spec.max_model_len
    if rope.kind == "longrope" and asked is None:  # tables that reach further rotate short texts differently as well
        known = min(known, rope.settings["original_max_position_embeddings"])
    if asked is None:
        most = most_blocks(config, spec.kv_values_per_token * block_size * dtype.itemsize, device)
        return min(known, max(1, most - 1) * block_size)
    if asked > known:
        way_out = "give no more, or leave it out, or stretch them by rope_scaling in its config.json"
        raise ConfigError(f"max_model_len {asked} is above the {known} positions that the model knows; {way_out}")
    return asked
