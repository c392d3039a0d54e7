"""How many KV blocks a device can hold: measured on a GPU, set by kv_cache_memory_gib on a CPU.

On a GPU the largest steps run once, before the KV cache is there; it takes what they and the weights leave of the
engine's share, `shares.Shares`. What does not fit is refused with the numbers and the settings under which it would;
where only smaller steps would help, these are measured, too, before they are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.out_of_memory import unless_short_of_memory
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.startup.free_memory import fitting_gib, gib, host_memory, processes
from wavecore.engine_core.startup.measure import measure
from wavecore.engine_core.startup.memory_budget import GIB, MARGIN, Blocks, Settings, Shares, no_room

logger = logging.getLogger(__name__)

Make = Callable[[EngineConfig], ModelRunner]
MOST_CACHED = 1 << 20
"""Blocks that are worth having for cached prefixes alone: each takes a hundred bytes of host memory."""


def most_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Upper bound of the KV blocks that the settings and the device allow, before anything is loaded."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    if device.type == "cpu":
        return int(config.kv_cache_memory_gib * GIB) // block_bytes
    return int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization) // block_bytes


def sized_runner(make: Make, config: EngineConfig, dtype: str) -> ModelRunner:
    """A runner with its KV cache; on a GPU every kind of step has run once, which also compiles.

    Args:
        make: gives a runner without a KV cache, with tables for the settings' max_num_seqs and max_num_batched_tokens.
        dtype: of the model.

    Raises:
        ConfigError: it does not fit; the message names the settings that would.
        ResourceError: it does not fit, and no setting changes that.
    """
    runner, fault = unless_short_of_memory(partial(make, config))
    if runner is None:
        what = f"the tables of all requests do not fit into memory: {fault}"
        raise no_room(what, smaller_steps(make, config), dtype=dtype)
    host_blocks = int(config.swap_space_gib * GIB) // runner.block_bytes
    _check_swap_space(config, host_blocks * runner.block_bytes)
    shares: Shares | None = None
    if runner.device.type == "cpu":
        num_blocks, ways = _host_blocks(runner, config)
        if ways != [{}]:
            raise no_room(_too_few(num_blocks, _blocks(runner, config)), ways, dtype=dtype)
    else:
        num_blocks, shares, what, ways = _device_blocks(runner, config)
        table = _table(shares, runner, num_blocks)
        if what:
            del runner  # its tables would stand beside those of smaller steps
            if not ways or len(ways[0]) > 1:
                ways = smaller_steps(make, config, ways)
            raise no_room(what, ways, dtype=dtype, table=f"\n{table}")
        logger.info("%s", table)
        if shares.others > shares.total * (1 - shares.utilization) and not config.num_gpu_blocks_override:
            others = gib(shares.others)
            logger.warning("others hold %s of the GPU: less is left than gpu_memory_utilization allows", others)
    _, fault = unless_short_of_memory(partial(runner.allocate, num_blocks, host_blocks))
    if fault:
        size = gib(num_blocks * runner.block_bytes)
        what = f"the KV cache of {num_blocks} blocks, {size}, does not fit into memory: {fault}"
        raise no_room(what, _smaller_cache(runner, config, shares, host_blocks), dtype=dtype)
    if config.max_model_len is None:  # no sequence can grow past the cache
        length = min(runner.info.max_model_len, (num_blocks - 1) * runner.info.block_size)
        if length < runner.info.max_model_len:
            logger.warning(
                "max_model_len is %d, as the KV cache holds no more tokens; setting it also makes the tables smaller",
                length,
            )
        runner.info = replace(runner.info, max_model_len=length)
    return runner


def smaller_steps(make: Make, config: EngineConfig, otherwise: list[Settings] | None = None) -> list[Settings]:
    """The largest steps below the settings' that fit, in powers of two, with what must change besides; measured.

    Args:
        otherwise: what to say where smaller steps do not fit with a single other change.
    """
    tokens, rows = (1 << size.bit_length() for size in (config.max_num_batched_tokens, config.max_num_seqs))
    while tokens > 1:
        tokens, rows = tokens // 2, max(1, rows // 2)
        steps: Settings = {"max_num_batched_tokens": tokens, "max_num_seqs": rows}
        smaller = replace(config, max_num_batched_tokens=tokens, max_num_seqs=rows)
        if smaller == config:
            continue
        logger.info("the start does not fit: trying steps of %d tokens and %d rows", tokens, rows)
        ways = _tried(make, smaller)
        if ways and len(ways[0]) < 2:
            return [steps | way for way in ways]
        otherwise = otherwise or [steps | way for way in ways]
    return otherwise or []


def _tried(make: Make, config: EngineConfig) -> list[Settings]:
    """What must change for a start with these steps, as in `Shares.ways_out`."""
    runner, _ = unless_short_of_memory(partial(make, config))
    if runner is None:
        return []
    if runner.device.type == "cpu":
        return _host_blocks(runner, config)[1]
    shares, fault = measure(runner, config)
    return [] if fault else shares.ways_out(config, _blocks(runner, config))


def _blocks(runner: ModelRunner, config: EngineConfig) -> Blocks:
    spec, info = runner.model.spec, runner.info
    position = 12 * config.max_num_seqs + 4 * sum(rope.dim for rope in spec.ropes)
    return Blocks(
        size=info.block_size,
        nbytes=runner.block_bytes,
        least=1 + (runner.state.max_blocks if config.max_model_len else 1),
        longer_tables=0 if config.max_model_len else position * (spec.max_model_len - info.max_model_len),
    )


def _device_blocks(runner: ModelRunner, config: EngineConfig) -> tuple[int, Shares, str, list[Settings]]:
    """Blocks on a GPU and what was measured; then "", or what does not fit and what must change for these steps."""
    shares, fault = measure(runner, config)
    asked, blocks = config.num_gpu_blocks_override, _blocks(runner, config)
    room = (replace(shares, utilization=1.0) if asked else shares).kv_cache // blocks.nbytes
    num_blocks = asked or min(_useful_blocks(runner, config), room)
    if fault:
        return num_blocks, shares, f"the largest step does not fit beside the weights: {fault}", []
    if room >= (asked or blocks.least):
        return num_blocks, shares, "", []
    what = _too_few(num_blocks, blocks)
    if asked:
        what = f"num_gpu_blocks_override {asked} takes {gib(asked * blocks.nbytes)} of KV cache"
    return num_blocks, shares, what, shares.ways_out(config, blocks)


def _host_blocks(runner: ModelRunner, config: EngineConfig) -> tuple[int, list[Settings]]:
    """Blocks on a CPU, and what must change, as in `Shares.ways_out`."""
    num_blocks, blocks = most_blocks(config, runner.block_bytes, runner.device), _blocks(runner, config)
    if config.num_gpu_blocks_override:
        return num_blocks, [{}]
    num_blocks = min(_useful_blocks(runner, config), num_blocks)
    if num_blocks >= blocks.least:
        return num_blocks, [{}]
    ways: list[Settings] = [{"max_model_len": (num_blocks - 1) * blocks.size}] if num_blocks > 1 else []
    return num_blocks, [*ways, {"kv_cache_memory_gib": fitting_gib(blocks.least * blocks.nbytes)}]


def _useful_blocks(runner: ModelRunner, config: EngineConfig) -> int:
    useful: int = config.max_num_seqs * runner.state.max_blocks + 1  # all slots full, and the null block
    return max(useful, MOST_CACHED) if config.enable_prefix_caching else useful


def _too_few(num_blocks: int, blocks: Blocks) -> str:
    return f"the KV cache would hold {num_blocks} blocks of {blocks.size} tokens and needs {blocks.least}"


def _smaller_cache(
    runner: ModelRunner, config: EngineConfig, shares: Shares | None, host_blocks: int
) -> list[Settings]:
    """The device did not give what was free when it was measured: others hold more. A host nobody had measured."""
    blocks = _blocks(runner, config)
    if shares is None:
        fits = host_memory()[0] * 9 // 10 // blocks.nbytes - host_blocks
        if fits < 2:
            return []
        if config.num_gpu_blocks_override:
            return [{"num_gpu_blocks_override": fits}]
        shorter: Settings = {} if fits >= blocks.least else {"max_model_len": (fits - 1) * blocks.size}
        return [{"kv_cache_memory_gib": fitting_gib(fits * blocks.nbytes), **shorter}]
    free, total = torch.cuda.mem_get_info(runner.device)
    others = total - free - torch.cuda.memory_reserved(runner.device)
    share = (total - others - MARGIN) * 100 // total / 100
    ways = replace(shares, others=others, utilization=share).ways_out(config, blocks)
    return ways if config.num_gpu_blocks_override else [{"gpu_memory_utilization": share, **way} for way in ways]


def _check_swap_space(config: EngineConfig, size: int) -> None:
    """Refuse swap space that the host has not free, as pinned memory is taken at once; suggest half of what is."""
    free, _ = host_memory()
    if size > free:
        what = f"swap_space_gib {config.swap_space_gib:g}: only {gib(free)} of host memory are free"
        raise no_room(what, [{"swap_space_gib": free * 5 // GIB / 10}])


def _table(shares: Shares, runner: ModelRunner, num_blocks: int) -> str:
    return shares.table(num_blocks, runner.block_bytes, processes(runner.device))
