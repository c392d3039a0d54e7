"""Swaps: whole KV pages between device and pinned host memory, beside the steps, on a stream of their own.

A plan's swaps are one transfer, see `plan.StepPlan`. On a CPU a transfer is done when it is started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32, StepPlan


class SwapStream:
    """The transfers of one device, in the order of their plans."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.in_flight: deque[tuple[int, torch.cuda.Event]] = deque()  # step id, recorded behind its copies
        self.done = -1

    def start(self, plan: StepPlan, pages: Tensor, host_pages: Tensor) -> None:
        """Begin the plan's transfer behind everything that the current stream holds so far.

        Args:
            pages, host_pages: [blocks, ...] on the device and pinned on the host. A block, all its layers, is one copy;
                neighbours go together.
        """
        if not len(plan.swap_out) and not len(plan.swap_in):
            return
        if self.stream is None:
            _copy(plan, pages, host_pages)
            self.done = plan.step_id
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(pages.device))
        with torch.cuda.stream(self.stream):
            _copy(plan, pages, host_pages)
            event.record()
        self.in_flight.append((plan.step_id, event))

    def join(self, step_id: int) -> None:
        """Let the current stream wait for the transfers of plans up to this one; the host does not wait."""
        event: torch.cuda.Event | None = None
        while self.in_flight and self.in_flight[0][0] <= step_id:
            self.done, event = self.in_flight.popleft()
        if event is not None:
            event.wait()

    def poll(self) -> int:
        """Step id of the last plan whose transfer is done, with all before it; -1 for none."""
        while self.in_flight and self.in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self.done, _ = self.in_flight.popleft()
        return self.done


def _copy(plan: StepPlan, pages: Tensor, host_pages: Tensor) -> None:
    for block, host_block, count in _runs(plan.swap_out):
        host_pages[host_block : host_block + count].copy_(pages[block : block + count], non_blocking=True)
    for host_block, block, count in _runs(plan.swap_in):
        pages[block : block + count].copy_(host_pages[host_block : host_block + count], non_blocking=True)


def _runs(pairs: I32) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of neighbours on both sides: one copy moves them all."""
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    for run in np.split(pairs, breaks):
        if len(run):
            yield int(run[0, 0]), int(run[0, 1]), len(run)
