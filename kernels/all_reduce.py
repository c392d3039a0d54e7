"""The sum over ranks that reach each other's memory, alone or with residual and RMSNorm: one launch, one barrier.

Each rank copies its part into a buffer that all can read, tells the others, waits until all of them told it, and adds
up all parts in rank order, in float32, so that every rank gets the same bits (a "one-shot" all-reduce). Program i of a
rank deals with programs i of the others alone, in *channel* i:

    buffer of a rank   flags   int64 [channels, LINE]      [i, r] counts what rank r published in channel i
                       data    [channels, 2, area] bytes   the two places in turn

One barrier a call is enough: a rank overwrites what it published two calls ago in this channel. Its peers have
published in the call between, which they did after their launch before had ended, with all its reading. Flags only
grow, and kernels count them, so nothing is reset and a CUDA graph can be replayed.

If a peer never publishes, the kernel waits until its own process is ended by a signal: ranks live and die together.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.chain import follow
from wavecore.kernels.device import early

CHANNELS = 128
"""Programs at most, all of which run at once: with half as many, sums from 1 MiB on take a tenth longer or more; twice
as many are no faster (two H200)."""
LINE = tl.constexpr(16)
"""Flags of a channel, of which as many count as there are ranks: a line of the cache, so that channels share none."""


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks, as one of them reaches them.

    All ranks call its methods, each of which launches one kernel, with tensors of one shape and dtype, on one stream.

    Attributes:
        buffers: of each rank, int64 [num_bytes(area) / 8]; zeros at first, and then nobody else's.
        rank: of this one.
        area: bytes that a channel publishes at most; a multiple of 16.
        most: bytes of the largest sum that is worth it.
    """

    buffers: tuple[Tensor, ...]
    rank: int
    area: int
    most: int

    @staticmethod
    def num_bytes(area: int) -> int:
        """Size of a buffer."""
        return CHANNELS * (8 * int(LINE.value) + 2 * area)

    def hold(self, x: Tensor) -> bool:
        """Whether x [T, H] is small enough."""
        return x.nbytes <= self.most and -(-len(x) // CHANNELS) * x.shape[1] * x.itemsize <= self.area

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by the sum of all ranks' x.

        Args:
            x: [T, H], contiguous, float32, float16 or bfloat16; held.
        """
        self._launch(x, None, None, None, 0.0, 0.0)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor]:
        """`norm.add_rms_norm` of the sum of all ranks' x, which is rounded with the residual, once.

        Args:
            x: as for `all_reduce`; residual + sum takes its place.
            residual, weight: the same on all ranks; contiguous.

        Returns:
            (normed [T, H], x).
        """
        assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
        assert weight.shape == x.shape[1:]
        normed = torch.empty_like(x)
        self._launch(x, normed, residual, weight, eps, weight_offset)
        return normed, x

    def _launch(self, x: Tensor, normed: Tensor | None, *norm: Tensor | float | None) -> None:
        rows, hidden = x.shape
        assert x.is_contiguous() and self.hold(x)
        if not rows:
            return
        block = triton.next_power_of_2(hidden)
        ranks = {"RANK": self.rank, "RANKS": len(self.buffers), "CHANNELS": CHANNELS, "AREA": self.area}
        options = {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), **early(x.device)}
        _all_reduce[(min(rows, CHANNELS),)](self.buffers, x, normed, *norm, rows, hidden, **ranks, **options)


@triton.jit(do_not_specialize=["rows"])
def _all_reduce(
    buffers, x_ptr, normed_ptr, residual_ptr, weight_ptr, eps, weight_offset, rows, hidden,
    RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr, AREA: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program handles each `CHANNELS`th row; its rows lie one after the other in its area.

    d [BLOCK]   places in a row, `hidden` of them real
    """
    follow(EARLY)
    channel = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < hidden
    call = tl.load(buffers[RANK] + channel * LINE + RANK) + 1
    area_at = CHANNELS * LINE + (channel * 2 + call % 2) * (AREA // 8)

    for row in range(channel, rows, CHANNELS):
        x = tl.load(x_ptr + row * hidden + d, mask=inside)
        area = (buffers[RANK] + area_at).to(x_ptr.dtype)
        tl.store(area + row // CHANNELS * hidden + d, x, mask=inside)

    # What all threads of the program wrote comes before the flags, each of which one of them writes; what all of them
    # read comes behind the flags that one of them reads.
    tl.debug_barrier()
    rank = tl.arange(0, RANKS)
    flags = tl.zeros((RANKS,), tl.int64)
    for r in tl.static_range(RANKS):
        flags = tl.where(rank == r, (buffers[r] + channel * LINE + RANK).to(tl.int64), flags)
    tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)), call, sem="release", scope="sys")
    for r in tl.static_range(RANKS):
        if r != RANK:
            # A peer may be a call ahead. Adding nothing reads in order with what follows, which no plain load does.
            while tl.atomic_add(buffers[RANK] + channel * LINE + r, 0, sem="acquire", scope="sys") < call:
                pass
    tl.debug_barrier()

    for row in range(channel, rows, CHANNELS):
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(RANKS):
            area = (buffers[r] + area_at).to(x_ptr.dtype)
            total += tl.load(area + row // CHANNELS * hidden + d, mask=inside, other=0.0).to(tl.float32)
        base = row * hidden  # fits into 32 bits, as all of x fits into areas
        if residual_ptr is not None:
            total += tl.load(residual_ptr + base + d, mask=inside, other=0.0).to(tl.float32)
        total = total.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + base + d, total, mask=inside)
        if normed_ptr is not None:
            total = total.to(tl.float32)
            scale = tl.rsqrt(tl.sum(total * total) / hidden + eps)
            weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + weight_offset
            tl.store(normed_ptr + base + d, (total * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
