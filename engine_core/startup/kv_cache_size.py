"""How many KV blocks a device can hold: measured on a GPU, set by kv_cache_memory_gib on a CPU.

On a GPU the largest steps run once, before the KV cache is there; it takes what they and the weights leave of the
engine's share, `MemoryBudget`. What does not fit is refused with the numbers, and with the settings that would fit
where these can be computed.
"""

import gc
import logging
import math
from dataclasses import replace

import torch

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.out_of_memory import shortage
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.models.files import Progress
from wavecore.engine_core.startup.free_memory import host_memory
from wavecore.engine_core.startup.memory_budget import (
    GIB,
    SLACK,
    KVCacheNeed,
    MemoryBudget,
    gib,
    no_room,
    refused,
    would_fit,
)
from wavecore.engine_core.startup.warm_up import warm_up

logger = logging.getLogger(__name__)

MOST_CACHED = 1 << 20
"""Blocks that are worth having for cached prefixes alone: each takes 140 bytes of host memory."""


def most_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Upper bound of the KV blocks that the settings and the device allow, before anything is loaded."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    if device.type == "cpu":
        return int(config.kv_cache_memory_gib * GIB) // block_bytes
    return int(torch.cuda.get_device_properties(device).total_memory * config.gpu_memory_utilization) // block_bytes


def allocate_kv_cache(runner: ModelRunner, config: EngineConfig, progress: Progress) -> None:
    """Give a runner its KV cache; on a GPU every kind of step has run once then, which also compiles.

    Raises:
        ConfigError: it does not fit; the message names the settings that would, or those to lower.
        ResourceError: it does not fit, and no setting changes that.
    """
    host_blocks = int(config.swap_space_gib * GIB) // runner.block_bytes
    free, _ = host_memory()
    if host_blocks * runner.block_bytes > free:  # it is pinned, so taken at once; half of what is free may do
        what = f"swap_space_gib {config.swap_space_gib:g}: only {gib(free)} of host memory are free"
        raise no_room(what, would_fit([f"swap_space_gib {free * 5 // GIB / 10}"]))
    need = _need(runner, config)
    if runner.device.type == "cpu":
        num_blocks = _blocks_of_host(runner, config, need)
        advice = "lower num_gpu_blocks_override" if config.num_gpu_blocks_override else "lower kv_cache_memory_gib"
    else:
        num_blocks = _blocks_of_gpu(runner, config, need, progress)
        advice = "start again: others took memory meanwhile"
    progress("kv_cache", 0.0)
    num_blocks = runner.model.least(num_blocks)
    size = gib(num_blocks * need.block_bytes)
    with refused(f"the KV cache of {num_blocks} blocks, {size}, does not fit into memory", advice):
        runner.allocate(num_blocks)
    size = gib(host_blocks * need.block_bytes)
    with refused(f"the host cannot give {size} of memory for swapped blocks", would_fit(["swap_space_gib 0"])):
        runner.allocate_swap_space(host_blocks)
    longest = (num_blocks - 1) * need.block_size  # no sequence can grow past the cache
    if config.max_model_len is None and longest < runner.info.max_model_len:
        logger.warning(
            "max_model_len is %d: the KV cache holds no more; set, it makes the tables smaller, too", longest
        )
        runner.info = replace(runner.info, max_model_len=longest)


def measure(runner: ModelRunner, config: EngineConfig, progress: Progress) -> tuple[MemoryBudget, str]:
    """Run the largest steps once over a cache of two blocks, and see what they take from a GPU.

    What the allocator took for them it keeps, so that steps find it and ask the device for nothing.

    Returns:
        The budget, and "", or why the steps do not fit beside the weights; if so, activations and graphs are no more
        than what was reached.
    """
    device = runner.device
    gc.collect()
    torch.cuda.empty_cache()
    weights = runner.memory_stats()["weights_bytes"]
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    activations, graphs, reason = 0, 0, ""
    try:
        runner.allocate(2)
        progress("warm_up", 0.0)
        warm_up(runner, config)
        activations = torch.cuda.max_memory_reserved(device)
        progress("graphs", 0.0)
        if not (config.enforce_eager or config.custom_ops):  # a user's kernel need not be one that can be captured
            graphs = runner.reserve_graphs()
    except Exception as error:
        reason = shortage(error)
        if not reason:
            raise
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    budget = MemoryBudget(
        total=total,
        utilization=1.0 if config.num_gpu_blocks_override else config.gpu_memory_utilization,
        weights=weights,
        tables=max(before - weights, 0),
        activations=(activations or torch.cuda.max_memory_reserved(device)) - before - runner.kv_cache.nbytes + SLACK,
        graphs=graphs,
        others=total - free - torch.cuda.memory_reserved(device),
    )
    return budget, reason


def _need(runner: ModelRunner, config: EngineConfig) -> KVCacheNeed:
    spec, info = runner.model.spec, runner.info
    position = 12 * config.max_num_seqs + 4 * sum(rope.dim for rope in spec.ropes)
    return KVCacheNeed(
        block_size=info.block_size,
        block_bytes=runner.block_bytes,
        least=config.num_gpu_blocks_override or 1 + (runner.state.max_blocks if config.max_model_len else 1),
        longer_tables=0 if config.max_model_len else position * (spec.max_model_len - info.max_model_len),
    )


def _useful_blocks(runner: ModelRunner, config: EngineConfig) -> int:
    useful: int = config.max_num_seqs * runner.state.max_blocks + 1  # all slots full, and the null block
    return max(useful, MOST_CACHED) if config.enable_prefix_caching else useful


def _blocks_of_gpu(runner: ModelRunner, config: EngineConfig, need: KVCacheNeed, progress: Progress) -> int:
    """Blocks for the engine's share of a GPU. Logs where the memory is."""
    budget, reason = measure(runner, config, progress)
    asked, room = config.num_gpu_blocks_override, max(0, budget.kv_cache) // need.block_bytes
    num_blocks = asked or min(_useful_blocks(runner, config), room)
    table = budget.table(num_blocks, need.block_bytes)
    if reason:
        what = f"the largest step does not fit beside the weights: {reason}"
        raise no_room(what, budget.advice_on_steps(need), f"\n{table}")
    if room < need.least:
        raise no_room(_too_few(room, need, budget.kv_cache), budget.advice(config, need), f"\n{table}")
    logger.info("%s", table)
    if not asked and budget.others > budget.total * (1 - budget.utilization):
        others = gib(budget.others)
        logger.warning("others hold %s of the GPU: less is left than gpu_memory_utilization allows", others)
    return num_blocks


def _blocks_of_host(runner: ModelRunner, config: EngineConfig, need: KVCacheNeed) -> int:
    room = most_blocks(config, need.block_bytes, runner.device)
    if room < need.least:
        shorter = [f"max_model_len {(room - 1) * need.block_size}"] if room > 1 else []
        size = f"kv_cache_memory_gib {fitting_gib(need.nbytes)}"
        raise no_room(_too_few(room, need, room * need.block_bytes), would_fit([*shorter, size]))
    return config.num_gpu_blocks_override or min(_useful_blocks(runner, config), room)


def _too_few(room: int, need: KVCacheNeed, left: int) -> str:
    """That only `room` blocks fit, into `left` bytes."""
    found = f"the KV cache would hold {room} blocks of {need.block_size} tokens and needs {need.least}"
    return f"{found}: {gib(need.nbytes - left)} are missing"


def fitting_gib(size: int) -> float:
    """At least `size` bytes, in GiB with few digits."""
    return math.ceil(1000 * size / GIB) / 1000
