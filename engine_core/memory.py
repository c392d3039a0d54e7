"""How many KV blocks a device can hold: measured on a GPU, set by kv_cache_memory_gib on a CPU.

A GPU's memory is shared out as: weights, what the largest step needs beside them (measured by running it once), what
others hold, and the KV cache, which takes the rest of gpu_memory_utilization.
"""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass

import numpy as np
import torch

from wavecore.engine_core.config import EngineConfig
from wavecore.engine_core.plan import Admission, StepPlan
from wavecore.engine_core.runner import ModelRunner
from wavecore.engine_core.sampling_params import SamplingParams
from wavecore.transport.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
SLACK = 256 << 20  # fragments of the allocator, and kernels that are loaded later


def allocate_kv(runner: ModelRunner, config: EngineConfig) -> None:
    """Size and allocate the runner's KV cache.

    Raises:
        ConfigError: it does not fit; the message names the setting that would.
    """
    block_bytes = runner.block_bytes
    useful = config.max_num_seqs * runner.state.max_blocks + 1  # all slots full, and the null block
    host_blocks = int(config.swap_space_gib * GIB) // block_bytes
    if config.num_gpu_blocks_override:
        num_blocks = config.num_gpu_blocks_override
    elif runner.device.type == "cpu":
        num_blocks = min(useful, int(config.kv_cache_memory_gib * GIB) // block_bytes)
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_memory_gib {config.kv_cache_memory_gib} holds {num_blocks} blocks of "
                f"{runner.info.block_size} tokens ({block_bytes} bytes each); raise it or lower block_size"
            )
    else:
        shares = measure(runner, config)
        num_blocks = min(useful, shares.kv_cache // block_bytes)
        logger.info("%s", shares.table(num_blocks, block_bytes, _processes()))
        if num_blocks < 1 + runner.state.max_blocks:
            raise ConfigError(_way_out(runner, shares, num_blocks))
    runner.allocate(num_blocks, host_blocks)


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes of one GPU by use."""

    total: int
    usable: int
    weights: int
    activations: int
    others: int

    @property
    def kv_cache(self) -> int:
        return max(0, self.usable - self.weights - self.activations - self.others)

    def table(self, num_blocks: int, block_bytes: int, processes: str) -> str:
        rows = (
            ("weights and tables", self.weights),
            ("activations of the largest step", self.activations),
            (f"KV cache, {num_blocks} blocks", num_blocks * block_bytes),
            (f"others: CUDA context and processes {processes}", self.others),
            ("left free", self.total - self.weights - self.activations - self.others - num_blocks * block_bytes),
            ("total", self.total),
        )
        return "GPU memory\n" + "\n".join(f"  {size / GIB:8.2f} GiB  {name}" for name, size in rows)


def measure(runner: ModelRunner, config: EngineConfig) -> Shares:
    """Run the largest steps once over a cache of one block, and see what they take."""
    device = runner.device
    runner.allocate(2, 0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(runner, config)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Shares(
        total=total,
        usable=int(total * config.gpu_memory_utilization),
        weights=before,
        activations=peak + SLACK,
        others=total - free - torch.cuda.memory_reserved(device),
    )


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """The largest prefill and the largest decode step, every position on block 1. Compiles the kernels, too."""
    state, info = runner.state, runner.info
    state.block_table.fill_(1)
    length = min(info.max_model_len, config.max_num_batched_tokens)
    rows = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // length))
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=0)
    admitted = tuple(Admission(i, np.zeros(1, np.int32), 1, params) for i in range(config.max_num_seqs))
    try:
        runner.start(_plan(rows, 0, length, admitted)).wait()
        runner.start(_plan(config.max_num_seqs, info.max_model_len - 1, 1, ())).wait()
    finally:
        state.block_table.zero_()


def _plan(rows: int, start: int, length: int, admitted: tuple[Admission, ...]) -> StepPlan:
    none, pairs = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    return StepPlan(
        step_id=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, start, np.int32),
        query_lens=np.full(rows, length, np.int32),
        samples=np.ones(rows, np.uint8),
        swap_out=pairs,
        swap_in=pairs,
        copies=pairs,
        admitted=admitted,
        block_slots=none,
        block_indices=none,
        block_ids=none,
    )


def _way_out(runner: ModelRunner, shares: Shares, num_blocks: int) -> str:
    need = (1 + runner.state.max_blocks) * runner.block_bytes + shares.usable - shares.kv_cache
    settings = [f"max_model_len {max(0, num_blocks - 1) * runner.info.block_size}", "a lower max_num_batched_tokens"]
    if need < 0.98 * shares.total:
        settings.insert(0, f"gpu_memory_utilization {need / shares.total + 0.01:.2f}")
    return (
        f"the KV cache would hold {num_blocks} blocks of {runner.info.block_size} tokens, one sequence of "
        f"max_model_len {runner.info.max_model_len} needs {runner.state.max_blocks}; "
        f"it would fit with {' or '.join(settings)}"
    )


def _processes() -> str:
    """Pids on the machine's GPUs as nvidia-smi lists them, for the table only."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(unknown)"
    return ", ".join(done.stdout.split()) or "(none listed)"
