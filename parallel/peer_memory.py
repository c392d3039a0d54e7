"""Memory of every rank that the GPUs of all ranks reach directly, for sums over ranks without NCCL."""

import ctypes
from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from wavecore.kernels.all_reduce import PeerBuffers
from wavecore.transport.errors import ResourceError

AREA = 1 << 16
"""Bytes a channel: a row of the widest model, and with all channels the largest sum."""
MOST_BYTES = {2: 8 << 20, 4: 2 << 20, 8: 1 << 20}
"""By number of ranks, the largest sum that `kernels.all_reduce` does: it reads the parts of all peers. NCCL moves less
than two parts, but takes longer to begin. Of two H200 ours takes 33 us with its norm at 8 MiB, NCCL's 54
(`scripts/bench_all_reduce.py`); the others move about as many bytes."""
NEEDED = (2, 3)
"""CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED and _NATIVE_ATOMIC_SUPPORTED, which not all of PCIe has (driver API)."""


def reaches_peers(device: torch.device, gpus: Sequence[int]) -> bool:
    """Whether kernels of `device`, one of these GPUs, can use the memory of the others as their own, flags included;
    and a sum over so many is known."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for attribute, peer in product(NEEDED, gpus):
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), attribute, device.index, peer)
        if peer != device.index and (failed or not found.value):
            return False
    return len(gpus) in MOST_BYTES


def share_buffers(group: dist.ProcessGroup, device: torch.device) -> PeerBuffers:
    """Allocate this rank's buffer and map those of its peers. All ranks call it, before any capture of a CUDA graph;
    none may use the buffers before all have returned and their devices have come so far.

    The ranks meet at the group's store, and hand each other file descriptors at a socket in TMPDIR.

    Raises:
        ResourceError: the driver refuses, or there is no room.
    """
    numbers = PeerBuffers.num_bytes(AREA) // 8
    try:
        own = symmetric_memory.empty(numbers, dtype=torch.int64, device=device).zero_()
        peers = symmetric_memory.rendezvous(own, group)
    except RuntimeError as error:
        raise ResourceError(f"GPUs share no memory: {error}; set disable_custom_all_reduce") from error
    # `own` keeps the mappings of all of them alive.
    buffers = [own if r == group.rank() else peers.get_buffer(r, (numbers,), torch.int64) for r in range(group.size())]
    return PeerBuffers(tuple(buffers), group.rank(), AREA, MOST_BYTES[group.size()])
