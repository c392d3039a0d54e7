"""What an engine takes of a GPU beside its KV cache, seen by running its largest steps once."""

from __future__ import annotations

import gc

import torch

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.graphs import graph_bytes
from wavecore.engine_core.execution.out_of_memory import unless_short_of_memory
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.startup.memory_budget import Shares
from wavecore.engine_core.startup.warm_up import largest_graph, warm_up

SLACK = 256 << 20  # fragments of the allocator, embeddings of a second step in flight, kernels that are loaded later


def measure(runner: ModelRunner, config: EngineConfig) -> tuple[Shares, str]:
    """Run the largest steps once over a cache of two blocks, and see what they take from the device.

    What the allocator took for them it keeps, so that steps find it and ask the device for nothing.

    Returns:
        The shares, and "", or why the steps do not fit beside the weights; if so, activations and graphs are no more
        than what was reached.
    """
    device = runner.device
    gc.collect()
    torch.cuda.empty_cache()
    weights = runner.memory_stats()["weights_bytes"]
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)

    def run() -> int:
        runner.allocate(2, 0)
        # a user's kernel need not be one that can be captured
        graphs = 0 if config.custom_ops else graph_bytes(runner, largest_graph(runner, config))
        torch.cuda.reset_peak_memory_stats(device)
        warm_up(runner, config)
        return graphs

    graphs, fault = unless_short_of_memory(run)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    shares = Shares(
        total=total,
        utilization=config.gpu_memory_utilization,
        weights=weights,
        tables=max(before - weights, 0),
        activations=torch.cuda.max_memory_reserved(device) - before - runner.kv_cache.nbytes + SLACK,
        graphs=graphs or 0,
        others=total - free - torch.cuda.memory_reserved(device),
    )
    return shares, fault
