"""Host to device and back without a wait: one vector in and one out, each at one address for the engine's life.

A step fills a vector of pinned memory and queues its copy; what comes back lands in pinned memory behind an event. The
pinned vectors form rings, so that none is rewritten while a step in flight may read it. On a CPU host and device are
the same memory and nothing is copied.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32

DEPTH = 3  # steps whose pinned vectors live: two in flight, one being filled or read
Kind = type[np.int32] | type[np.float32]


def zeros(*shape: int, dtype: torch.dtype = torch.int32, device: torch.device) -> Tensor:
    """Zeros; on a CPU numpy's, whose memory the system hands out when it is first written, not all at once."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, pinned until the tensor goes: copies to and from a GPU run beside the program.

    Exactly as large as asked for, where torch's own allocator rounds up to a power of two.

    Raises:
        RuntimeError: it cannot be had, or not be pinned.
    """
    memory = torch.zeros(shape, dtype=dtype)
    if memory.nbytes:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            raise torch.cuda.CudaError(code)
        unpin = weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
        unpin.atexit = False  # the end of the process does it, and CUDA may be gone by then
    return memory


def _ring(vector: Tensor) -> list[Tensor]:
    """Pinned vectors like one on a device; on a CPU the vector itself."""
    if vector.is_cpu:
        return [vector]
    return list(torch.zeros((DEPTH, len(vector)), dtype=vector.dtype, pin_memory=vector.is_cuda))


def _events(vector: Tensor) -> list[torch.cuda.Event]:
    """One for each pinned vector, to be recorded behind its copy; none on a CPU."""
    return [torch.cuda.Event() for _ in range(DEPTH)] if vector.is_cuda else []  # type: ignore[no-untyped-call]


def _stream(vector: Tensor) -> torch.cuda.Stream | None:
    """The one that the steps run on, looked up once: that takes torch as long as a small copy."""
    return torch.cuda.current_stream(vector.device) if vector.is_cuda else None


class CopyIn:
    """The vector that steps bring to the device.

    Args:
        sizes: int32 values of its parts.

    Attributes:
        target: int32 [sum of sizes] on the device, valid until the next `send`.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.target = zeros(sum(sizes), device=device)
        ring = _ring(self.target)
        self._values = [vector.numpy() for vector in ring]
        parts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self._parts = [[(self.target[part], vector[part]) for part in parts] for vector in ring]
        self._copied, self._stream = _events(self.target), _stream(self.target)
        self._turn = 0

    def room(self) -> I32:
        """int32 [size] on the host for the next step's values; holds those of an earlier step."""
        self._turn = (self._turn + 1) % len(self._values)
        if self._copied:
            self._copied[self._turn].synchronize()  # long past: the copy was DEPTH steps ago
        return self._values[self._turn]

    def send(self, parts: int) -> None:
        """Queue the copies of the first parts of `room`'s vector to the same places on the device."""
        if not self._copied:
            return
        for target, source in self._parts[self._turn][:parts]:
            target.copy_(source, non_blocking=True)
        self._copied[self._turn].record(self._stream)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of a step's output lies in the vector that comes back."""

    begin: int
    shape: tuple[int, ...]
    kind: Kind

    def read(self, values: I32) -> npt.NDArray[Any]:
        """A copy of the part, from the vector on the host: the vector is used again soon."""
        size = math.prod(self.shape)
        return np.array(values[self.begin : self.begin + size].view(self.kind).reshape(self.shape))


class CopyOut:
    """The vector that steps bring back: tokens and faults of every row, then what rows want besides.

    Args:
        extras: int32 values of room for what rows want.

    Attributes:
        tokens, faults: int32 [max_num_seqs] on the device.
    """

    def __init__(self, max_num_seqs: int, extras: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.vector = zeros(2 * max_num_seqs + extras, device=device)
        self.tokens, self.faults = self.vector[: 2 * max_num_seqs].view(2, max_num_seqs)
        self._ring = _ring(self.vector)
        self._values = [vector.numpy() for vector in self._ring]
        self._plain = [(vector[: 2 * max_num_seqs], self.vector[: 2 * max_num_seqs]) for vector in self._ring]
        self._copied, self._stream = _events(self.vector), _stream(self.vector)
        self._turn = 0
        self._used = 2 * max_num_seqs

    def clear(self) -> None:
        """Begin with the output of a new step."""
        self._used = 2 * self.max_num_seqs

    def take(self, *shape: int, kind: Kind) -> tuple[Tensor, Place]:
        """Room on the device for a part of the step's output, and its place for the host."""
        place = Place(self._used, shape, kind)
        self._used += math.prod(shape)
        assert self._used <= self.vector.numel(), "the rows of a step want more than a plan can hold"
        part = self.vector[place.begin : self._used]
        return (part if kind is np.int32 else part.view(torch.float32)).view(shape), place

    def send(self) -> Fetched:
        """Queue the copy of all that the step wrote: always one."""
        self._turn += 1
        at = self._turn % len(self._ring)
        if self._copied:
            target, source = self._plain[at]
            if self._used > len(source):
                target, source = self._ring[at][: self._used], self.vector[: self._used]
            target.copy_(source, non_blocking=True)
            self._copied[at].record(self._stream)
        return Fetched(self, self._turn, self._values[at], self._copied[at] if self._copied else None)

    def keeps(self, turn: int) -> bool:
        """No later step was given the pinned vector of this turn."""
        return self._turn - turn < len(self._ring)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A vector on its way to the host.

    Attributes:
        event: recorded behind the copy; None on a CPU.
    """

    source: CopyOut
    turn: int
    values: I32
    event: torch.cuda.Event | None

    def wait(self) -> I32:
        """The vector, once it is here; valid until DEPTH more calls of `send` (one on a CPU)."""
        if self.event is not None:
            self.event.synchronize()
        assert self.source.keeps(self.turn), "a step was waited for after its vector was used again"
        return self.values

    def drawn(self, rows: int) -> I32:
        """Tokens and faults [2, rows] in the vector."""
        width = self.source.max_num_seqs
        return self.values[: 2 * width].reshape(2, width)[:, :rows]
