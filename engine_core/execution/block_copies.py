"""Copies of whole KV blocks, all layers at once, on two streams beside the steps.

Swaps, between the device and pinned host memory, are a plan's transfer (`plan.StepPlan`): its event says when it is
done, and rows run meanwhile. Copies within the device (copy-on-write) have a stream of their own, so that they never
queue up behind swaps: they run beside the step's upload and bookkeeping, and its rows wait for their event. On a CPU a
copy is done when it is begun. Who owns the blocks meanwhile: `KVCacheManager.transfers` says it for swaps, `copied`
there for the others.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import I32, StepPlan
from wavecore.kernels import ops


class BlockCopies:
    """The copies of one device, in the order of their plans."""

    def __init__(self, device: torch.device, uploads: Uploads) -> None:
        self.uploads = uploads
        self.swaps = _stream(device)
        self.cow = _stream(device)
        self.in_flight: deque[tuple[int, torch.cuda.Event]] = deque()  # step id, recorded behind its transfer
        self.done = -1
        self.copied: torch.cuda.Event | None = None  # recorded behind the copies that the next rows need

    def start(self, plan: StepPlan, kv_cache: Tensor, host_kv_cache: Tensor) -> None:
        """Begin the plan's transfer and its copies behind everything that the current stream holds so far.

        Args:
            kv_cache, host_kv_cache: [blocks, ...] on the device and pinned on the host.
        """
        if len(plan.swap_out) or len(plan.swap_in):
            with _behind_current(self.swaps):
                _move(plan.swap_out, kv_cache, host_kv_cache)
                _move(plan.swap_in, host_kv_cache, kv_cache)
                event = _record(self.swaps)
            if event is None:
                self.done = plan.step_id
            else:
                self.in_flight.append((plan.step_id, event))
        if len(plan.copies):
            with _behind_current(self.cow):
                ops.copy_blocks(kv_cache, self.uploads.new(plan.copies))
                self.copied = _record(self.cow)

    def join(self, step_id: int) -> None:
        """Let the current stream wait for the transfers of plans up to this one; the host does not wait."""
        event: torch.cuda.Event | None = None
        while self.in_flight and self.in_flight[0][0] <= step_id:
            self.done, event = self.in_flight.popleft()
        if event is not None:
            event.wait()

    def join_copies(self) -> None:
        """Let the current stream wait for the copies within the device, likewise."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None

    def poll(self) -> int:
        """Step id of the last plan whose transfer is done, with all before it; -1 for none."""
        while self.in_flight and self.in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self.done, _ = self.in_flight.popleft()
        return self.done


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _behind_current(stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
    """Work inside goes to the stream, behind what the current one holds so far; without a stream nothing changes."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def _record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _move(pairs: I32, sources: Tensor, targets: Tensor) -> None:
    for source, target, count in _runs(pairs):
        targets[target : target + count].copy_(sources[source : source + count], non_blocking=True)


def _runs(pairs: I32) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of neighbours on both sides: one copy moves them all."""
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    for run in np.split(pairs, breaks):
        if len(run):
            yield int(run[0, 0]), int(run[0, 1]), len(run)
