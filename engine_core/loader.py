"""From settings to a runner: find the files, read the spec, load the weights, size the KV cache. Imports torch."""

from __future__ import annotations

import torch

from wavecore.engine_core import families, gguf_weights, model_files, weights
from wavecore.engine_core.config import EngineConfig
from wavecore.engine_core.gguf_file import read_gguf
from wavecore.engine_core.kv_manager import choose_block_size
from wavecore.engine_core.model import Decoder
from wavecore.engine_core.model_files import Progress
from wavecore.engine_core.model_spec import ModelSpec
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.runner import ModelRunner
from wavecore.transport.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_runner(config: EngineConfig, progress: Progress) -> ModelRunner:
    """Load the model that the settings name.

    Raises:
        ModelError, NotSupportedError: the model's files.
        ConfigError: a setting that this model or device cannot have.
    """
    path = model_files.resolve_model(config.model, progress)
    device = _device(config.device)
    progress("load", 0.0)
    if path.is_file():
        file = read_gguf(path)
        spec, eos = gguf_weights.from_gguf(file), gguf_weights.eos_token_ids(file)
        dtype = _dtype(config, spec, device)
        parameters = gguf_weights.load_gguf(file, spec, dtype, device, progress)
    else:
        raw = model_files.read_config(path)
        spec, eos = families.from_config(raw, path / "config.json"), model_files.eos_token_ids(path, raw)
        dtype = _dtype(config, spec, device)
        parameters = weights.load_folder(path, spec, dtype, device, progress)
    length = _max_model_len(config, spec)
    block_size = config.block_size or choose_block_size(spec.kv_values_per_token * dtype.itemsize)
    info = RunnerInfo(
        num_blocks=_num_blocks(config, spec, dtype, block_size, length),
        num_host_blocks=int(config.swap_space_gib * (1 << 30)) // _block_bytes(spec, dtype, block_size),
        block_size=block_size,
        max_model_len=length,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        eos_token_ids=tuple(i for i in eos if i < spec.vocab_size),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        model_path=str(path),
    )
    progress("kv_cache", 0.0)
    return ModelRunner(Decoder(spec, parameters, length), info, config.max_num_seqs, config.max_num_batched_tokens)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device {name!r}: give "auto", "cpu", "cuda" or "cuda:N"') from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name!r}: this process sees {count} CUDA devices; look at CUDA_VISIBLE_DEVICES")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigError(f'device {name!r}: give "auto", "cpu", "cuda" or "cuda:N"')
    return device


def _dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES.get(spec.dtype, torch.bfloat16)
    return DTYPES[config.dtype]


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    length = config.max_model_len or spec.max_model_len
    if length > spec.max_model_len:
        raise ConfigError(f"max_model_len {length} is above the {spec.max_model_len} positions that the model knows")
    return length


def _block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> int:
    return spec.kv_values_per_token * dtype.itemsize * block_size


def _num_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, block_size: int, length: int) -> int:
    """Blocks of the KV cache, the null block included: as many as fit, but no more than all slots could use."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    fit = int(config.kv_cache_memory_gib * (1 << 30)) // _block_bytes(spec, dtype, block_size)
    if fit < 2:
        raise ConfigError(
            f"kv_cache_memory_gib {config.kv_cache_memory_gib} holds {fit} blocks of {block_size} tokens; raise it "
            "or lower block_size"
        )
    return min(fit, config.max_num_seqs * -(-length // block_size) + 1)
