"""How many KV blocks a device can hold: measured on a GPU, set by kv_cache_memory_gib on a CPU.

On a GPU the largest steps run once, before the KV cache is there; it takes what they and the weights leave of the
engine's share, `shares.Shares`. What does not fit is refused with the numbers and the settings that would fit.
"""

from __future__ import annotations

import gc
import logging
import math
from dataclasses import replace

import torch

from wavecore.engine_core.config import EngineConfig
from wavecore.engine_core.device_memory import gib, host_memory, processes
from wavecore.engine_core.graph_memory import graph_bytes
from wavecore.engine_core.plan import OutOfMemory
from wavecore.engine_core.runner import ModelRunner, first_line, is_out_of_memory
from wavecore.engine_core.shares import GIB, Shares
from wavecore.engine_core.warm_up import full_decode, warm_up
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

logger = logging.getLogger(__name__)

SLACK = 256 << 20  # fragments of the allocator, embeddings of a second step in flight, kernels that are loaded later
MARGIN = 64 << 20  # no two starts measure quite the same: what one suggests should fit the next
MOST_CACHED = 1 << 20
"""Blocks that are worth having for cached prefixes alone: each takes a hundred bytes of host memory."""


def most_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Upper bound of the KV blocks that the settings and the device allow, before anything is loaded."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    if device.type == "cpu":
        return int(config.kv_cache_memory_gib * GIB) // block_bytes
    return int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization) // block_bytes


def allocate_kv(runner: ModelRunner, config: EngineConfig) -> None:
    """Size and allocate the runner's KV cache; on a GPU first run every kind of step once, which also compiles.

    Raises:
        ConfigError: it does not fit; the message names the settings that would.
        ResourceError: it does not fit, and no setting changes that.
    """
    block_bytes = runner.block_bytes
    host_blocks = int(config.swap_space_gib * GIB) // block_bytes
    _check_swap_space(config, host_blocks * block_bytes)
    shares = measure(runner, config) if runner.device.type == "cuda" else None
    num_blocks = _num_blocks(runner, config, shares)
    if shares is not None:
        logger.info("%s", _table(shares, runner, num_blocks))
    try:
        runner.allocate(num_blocks, host_blocks)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            f"the KV cache of {num_blocks} blocks, {gib(num_blocks * block_bytes)}, does not fit into memory: "
            f"{first_line(error)}; lower {_size_setting(config, runner)}"
        ) from error
    if config.max_model_len is None:  # no sequence can grow past the cache
        length = min(runner.info.max_model_len, (num_blocks - 1) * runner.info.block_size)
        if length < runner.info.max_model_len:
            logger.warning(
                "max_model_len is %d: the KV cache holds no more tokens; set it, and the tables become smaller, too",
                length,
            )
        runner.info = replace(runner.info, max_model_len=length)


def measure(runner: ModelRunner, config: EngineConfig) -> Shares:
    """Run the largest steps once over a cache of two blocks, and see what they take from the device.

    What the allocator took for them it keeps, so that steps find it and ask the device for nothing.

    Raises:
        ConfigError, ResourceError: these steps do not fit beside the weights.
    """
    device = runner.device
    gc.collect()
    torch.cuda.empty_cache()
    weights = runner.memory_stats()["weights_bytes"]
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    graphs = 0
    error: Exception | None = None
    try:
        runner.allocate(2, 0)
        if not config.custom_ops:  # a user's kernel need not be one that can be captured
            graphs = graph_bytes(runner, full_decode(runner, config))
        torch.cuda.reset_peak_memory_stats(device)
        warm_up(runner, config)
    except Exception as caught:
        if not isinstance(caught, OutOfMemory) and not is_out_of_memory(caught):
            raise
        error = caught
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    shares = Shares(
        total=total,
        utilization=config.gpu_memory_utilization,
        weights=weights,
        tables=max(before - weights, 0),
        activations=torch.cuda.max_memory_reserved(device) - before - runner.pages.nbytes + SLACK,
        graphs=graphs,
        others=total - free - torch.cuda.memory_reserved(device),
    )
    if error is not None:
        raise _too_large_steps(error, runner, shares) from error
    return shares


def _num_blocks(runner: ModelRunner, config: EngineConfig, shares: Shares | None) -> int:
    most = most_blocks(config, runner.block_bytes, runner.device)
    if config.num_gpu_blocks_override:
        if shares is not None:
            _check_override(runner, shares, most)
        return most
    useful = config.max_num_seqs * runner.state.max_blocks + 1  # all slots full, and the null block
    if config.enable_prefix_caching:
        useful = max(useful, MOST_CACHED)
    if shares is not None:
        most = shares.kv_cache // runner.block_bytes
        if shares.others > shares.total * (1 - shares.utilization):
            logger.warning("others hold %s: less than gpu_memory_utilization is left", gib(shares.others))
    num_blocks = min(useful, most)
    _check_room(runner, config, shares, num_blocks)
    return num_blocks


def _check_room(runner: ModelRunner, config: EngineConfig, shares: Shares | None, num_blocks: int) -> None:
    """The null block and one sequence of full length must fit; without a max_model_len any length will do."""
    size, need = runner.info.block_size, 1 + (runner.state.max_blocks if config.max_model_len else 1)
    if num_blocks >= need:
        return
    need_bytes = need * runner.block_bytes
    settings = [f"max_model_len {(num_blocks - 1) * size}"] if num_blocks > 1 else []
    if shares is None:
        settings.append(f"kv_cache_memory_gib {fitting_gib(need_bytes):g}")
    else:
        share = shares.fitting_utilization(need_bytes + MARGIN) or shares.fitting_utilization(need_bytes)
        if share is not None:
            settings.append(f"gpu_memory_utilization {share:.2f}")
        if replace(shares, activations=SLACK).kv_cache >= need_bytes:
            settings.append("a lower max_num_batched_tokens or max_num_seqs")
    what = f"the KV cache would hold {num_blocks} blocks of {size} tokens and needs {need}"
    raise _refusal(what, settings, runner, shares, num_blocks)


def fitting_gib(size: int) -> float:
    """A little more than `size` bytes, in GiB with few digits."""
    scale: int = 10 ** max(3 - math.floor(math.log10(size / GIB)), 0)
    return (size * scale // GIB + 1) / scale


def _check_override(runner: ModelRunner, shares: Shares, num_blocks: int) -> None:
    """The setting goes before gpu_memory_utilization, but not beyond the device."""
    room, size = replace(shares, utilization=1.0).kv_cache, runner.block_bytes
    if num_blocks * size <= room:
        return
    what = f"num_gpu_blocks_override {num_blocks} takes {gib(num_blocks * size)} of KV cache"
    fits = max((room - MARGIN) // size, min(room // size, 2))
    settings = [f"num_gpu_blocks_override {fits}"] if fits > 1 else []
    raise _refusal(what, settings, runner, shares, num_blocks)


def _too_large_steps(error: Exception, runner: ModelRunner, shares: Shares) -> WavecoreError:
    fits = replace(shares, activations=SLACK, utilization=1.0).kv_cache >= 2 * runner.block_bytes
    settings = ["a lower max_num_batched_tokens or max_num_seqs"] if fits else []
    what = f"the largest step does not fit beside the weights: {first_line(error)}"
    return _refusal(what, settings, runner, shares, 0)


def _refusal(
    what: str, settings: list[str], runner: ModelRunner, shares: Shares | None, num_blocks: int
) -> WavecoreError:
    """What does not fit, the settings that would, and the table."""
    table = "" if shares is None else "\n" + _table(shares, runner, num_blocks)
    if settings:
        return ConfigError(f"{what}; it would fit with {' or '.join(settings)}{table}")
    return ResourceError(
        f"{what}, and no setting makes room beside what others hold: end them, or take another GPU, a smaller dtype "
        f"or a smaller model{table}"
    )


def _check_swap_space(config: EngineConfig, size: int) -> None:
    """Pinned memory is taken at once, and no other process can have it any more."""
    free, _ = host_memory()
    if size > free:
        raise ConfigError(f"swap_space_gib {config.swap_space_gib:g}: only {gib(free)} of host memory are free")


def _size_setting(config: EngineConfig, runner: ModelRunner) -> str:
    if config.num_gpu_blocks_override:
        return "num_gpu_blocks_override"
    return "kv_cache_memory_gib" if runner.device.type == "cpu" else "gpu_memory_utilization"


def _table(shares: Shares, runner: ModelRunner, num_blocks: int) -> str:
    return shares.table(num_blocks, runner.block_bytes, processes(runner.device))
