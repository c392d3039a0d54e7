"""How much memory CUDA graphs of steps need: measured on one, because its arena serves those of all sizes.

The captured step is the largest that graphs are for. Bytes are the allocator's: what a graph keeps of its own in the
driver is small beside them.
"""

from __future__ import annotations

import gc

import torch

from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.execution.sampling_state import draw
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.plan import StepPlan


def graph_bytes(runner: ModelRunner, plan: StepPlan) -> int:
    """Capture the plan's rows on a GPU and throw the graph away; the plan may not ask for log-probabilities.

    Raises:
        OutOfMemory: the step does not fit.
        torch.OutOfMemoryError, RuntimeError: likewise, while it is captured.
    """
    device, shape = runner.device, StepShape(plan, runner.bucket_limits)
    runner.start(plan).wait()  # what must be compiled or loaded cannot be while a graph is captured
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    _capture(runner, shape, graph)
    size = torch.cuda.memory_reserved(device) - before
    graph.reset()
    torch.cuda.empty_cache()
    return size


@torch.inference_mode()
def _capture(runner: ModelRunner, shape: StepShape, graph: torch.cuda.CUDAGraph) -> None:
    rows, sampling = runner.rows(shape), runner.sampling_rows(shape, truncates=True, edits=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        draw(runner.logits(*runner.forward(rows)), sampling, runner.out)
