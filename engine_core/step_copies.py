"""Host to device and back without a wait: one packed copy in and one copy out a step, through pinned memory.

On a CPU host and device are the same memory and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32

DEPTH = 4  # steps whose pinned buffers live: two in flight, one being filled, one being read


@dataclass(slots=True)
class _Pinned:
    buffer: Tensor
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CopyIn:
    """A ring of pinned vectors and one device vector; each grows to the largest step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.turn = 0
        self.target = torch.empty(0, dtype=torch.int32, device=device)
        self.ring = [_Pinned(torch.empty(0, dtype=torch.int32)) for _ in range(DEPTH)] if device.type == "cuda" else []

    def __call__(self, values: I32) -> Tensor:
        """The values on the device, valid until the next call on the same stream."""
        if not self.ring:
            return torch.from_numpy(values)
        size = len(values)
        if size > len(self.target):
            self.target = torch.empty(2 * size, dtype=torch.int32, device=self.device)
        self.turn = (self.turn + 1) % DEPTH
        slot = self.ring[self.turn]
        if size > len(slot.buffer):
            slot.buffer = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        slot.copied.synchronize()  # long past: the copy was DEPTH steps ago
        slot.buffer[:size].copy_(torch.from_numpy(values))
        target = self.target[:size]
        target.copy_(slot.buffer[:size], non_blocking=True)
        slot.copied.record()
        return target


def fetch(tensor: Tensor) -> Tensor:
    """The tensor in host memory; on CUDA pinned, and valid only after an event recorded later has passed."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, for rare things of any size; on CUDA through pinned memory, so that nothing waits."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
