"""What ranks do together: each calls the same with tensors of the same shape, in the same order. Knows no model.

The result is the same bits on every rank. All that ranks decide from results, tokens above all, is therefore decided
alike without a word.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wavecore.kernels import ops

if TYPE_CHECKING:
    from wavecore.kernels.all_reduce import PeerBuffers

Collective = tuple[str, tuple[int, ...], torch.dtype]
"""A method of `Collectives`, with the shape and the dtype of what it is called with."""
# The second names are those until torch 2.12
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives(Protocol):
    """The ranks of one group, as one of them sees it.

    Attributes:
        rank: of this one, from 0.
        size: how many there are.
        calls: of all methods but `least` that came to their end.
    """

    rank: int
    size: int
    calls: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which it may overwrite."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor]:
        """`ops.add_rms_norm` of the sum of all ranks' x, which counts as an `all_reduce`."""
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps, weight_offset)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x [n, ...], in order: [size, n, ...]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's n rows [n, ...] of the sum of all ranks' x [size * n, ...]."""

    def least(self, value: int) -> int:
        """The least of all ranks' numbers. For the start: it waits for the device."""


class Alone(Collectives):
    """A group of one rank."""

    rank, size, calls = 0, 1, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def least(self, value: int) -> int:
        return value


class ProcessGroup(Collectives):
    """Ranks in processes of their own, over NCCL or gloo.

    Args:
        group: of torch.distributed; all its calls are made from one thread, on the current stream.
        device: of this rank's tensors.
        wait_for: told, on a CPU, the rank that this one waits for, and None when it waits no more. Of ranks that all
            wait for the next one, only one that does not is to blame.

    Attributes:
        peers: where small sums are done without NCCL; None where they are not.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, wait_for: Callable[[int | None], object]
    ) -> None:
        self._group, self._device = group, device
        self._waits = device.type == "cpu"
        self._wait_for = wait_for
        self.rank, self.size, self.calls = group.rank(), group.size(), 0
        self.peers: PeerBuffers | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._call():
            if self.peers is not None and self.peers.hold(x):
                self.peers.all_reduce(x)
            else:
                dist.all_reduce(x, group=self._group)
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor]:
        if self.peers is None or not self.peers.hold(x) or ops.add_rms_norm.custom is not None:
            return super().add_rms_norm(x, residual, weight, eps, weight_offset)
        with self._call():
            return self.peers.add_rms_norm(x, residual, weight, eps, weight_offset)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device)
        with self._call():
            _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = torch.empty((len(x) // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        with self._call():
            _reduce_scatter(own, x.contiguous(), group=self._group)
        return own

    def least(self, value: int) -> int:
        number = torch.tensor(value, device=self._device)
        with self._call(counts=False):
            dist.all_reduce(number, dist.ReduceOp.MIN, group=self._group)
        return int(number.item())

    @contextmanager
    def _call(self, counts: bool = True) -> Iterator[None]:
        if self._waits:
            self._wait_for((self.rank + 1) % self.size)
        yield
        if self._waits:
            self._wait_for(None)
        self.calls += counts


ALONE = Alone()
