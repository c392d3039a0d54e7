"""How many KV blocks a device can hold: measured on a GPU, set by kv_cache_memory_gib on a CPU.

A GPU's memory is shared out as: weights, what the largest step needs beside them (measured by running it once), what
others hold, and the KV cache, which takes the rest of gpu_memory_utilization.
"""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass, replace

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


def most_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Upper bound of the KV blocks that the settings and the device allow, before anything is loaded."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    if device.type == "cpu":
        return int(config.kv_cache_memory_gib * GIB) // block_bytes
    return int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization) // block_bytes


def allocate_kv(runner: ModelRunner, config: EngineConfig) -> None:
    """Size and allocate the runner's KV cache; on a GPU also run, and so compile, every kind of step once.

    Raises:
        ConfigError: it does not fit; the message names the setting that would.
    """
    block_bytes = runner.block_bytes
    most = most_blocks(config, block_bytes, runner.device)
    shares = measure(runner, config) if runner.device.type == "cuda" else None
    if config.num_gpu_blocks_override:
        num_blocks = most
    else:
        useful = config.max_num_seqs * runner.state.max_blocks + 1  # all slots full, and the null block
        num_blocks = min(useful, most if shares is None else shares.kv_cache // block_bytes)
        if shares is not None:
            logger.info("%s", shares.table(num_blocks, block_bytes, _processes()))
        _check_room(runner, config, shares, num_blocks)
    runner.allocate(num_blocks, int(config.swap_space_gib * GIB) // block_bytes)
    if config.max_model_len is None:  # no sequence can grow past the cache
        length = min(runner.info.max_model_len, (num_blocks - 1) * runner.info.block_size)
        runner.info = replace(runner.info, max_model_len=length)


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
    """The largest prefill, decode and mixed steps, sampled and greedy, with every position on block 1."""
    state, info, seqs = runner.state, runner.info, config.max_num_seqs
    length = min(info.max_model_len, config.max_num_batched_tokens)
    rows = min(seqs, config.max_num_batched_tokens // length)
    last = info.max_model_len - 1
    prefill, decode = [(0, length)] * rows, [(last, 1)] * seqs
    mixed = [(last, 1)] * (seqs - 1) + [(0, min(length, config.max_num_batched_tokens - seqs + 1))]
    sampled = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)
    state.block_table.fill_(1)
    try:
        for params in (sampled, SamplingParams(temperature=1.0, seed=0), SamplingParams(temperature=0.0, seed=0)):
            admitted = tuple(Admission(i, np.zeros(1, np.int32), 1, params) for i in range(seqs))
            for step in (prefill, decode, mixed):
                runner.start(_plan(step, admitted)).wait()
                admitted = ()
    finally:
        state.block_table.zero_()


def _plan(rows: list[tuple[int, int]], admitted: tuple[Admission, ...]) -> StepPlan:
    """Rows of (start, length), all of which sample."""
    none, pairs = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    starts, lengths = np.array(rows, np.int32).T.copy()
    return StepPlan(
        step_id=0,
        slots=np.arange(len(rows), dtype=np.int32),
        starts=starts,
        query_lens=lengths,
        samples=np.ones(len(rows), np.uint8),
        swap_out=pairs,
        swap_in=pairs,
        copies=pairs,
        admitted=admitted,
        block_slots=none,
        block_indices=none,
        block_ids=none,
    )


def _check_room(runner: ModelRunner, config: EngineConfig, shares: Shares | None, num_blocks: int) -> None:
    """The null block and one sequence of full length must fit; without a max_model_len any length will do."""
    size, need = runner.info.block_size, 1 + (runner.state.max_blocks if config.max_model_len else 1)
    if num_blocks >= need:
        return
    settings = [f"max_model_len {(num_blocks - 1) * size}"] if num_blocks > 1 else []
    if shares is None:
        settings.append(f"kv_cache_memory_gib {need * runner.block_bytes / GIB:.3g}")
    else:
        settings.append("a lower max_num_batched_tokens or max_num_seqs")
        share = (need * runner.block_bytes + shares.usable - shares.kv_cache) / shares.total
        if share < 0.98:
            settings.append(f"gpu_memory_utilization {share + 0.01:.2f}")
    raise ConfigError(
        f"the KV cache would hold {num_blocks} blocks of {size} tokens and needs {need}; "
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
