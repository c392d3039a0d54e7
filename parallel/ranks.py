"""How the ranks of one engine find each other, on one host."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from wavecore.parallel.collectives import ProcessGroup

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Ranks of one host: no socket on an interface that others reach."""
QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast cannot be had on some hosts, and NCCL then hangs."""
TIMEOUT = timedelta(days=1)
"""Nobody waits for it: a rank that dies or hangs is seen by the supervisor, which ends the group."""


def join(
    store_fd: int,
    rank: int,
    size: int,
    device: torch.device,
    wait_for: Callable[[int | None], object],
    custom_all_reduce: bool = True,
) -> ProcessGroup:
    """Meet the other ranks of this group; returns when all are there.

    They meet in a file without a name, which each life of the group has anew. torch's TCPStore would listen on every
    interface, whatever host it is given.

    Args:
        store_fd: an anonymous file that all ranks inherited.
        device: of this rank's tensors. On a GPU NCCL sets its communicator up at once, rather than in a later capture.
        wait_for: see `ProcessGroup`.
        custom_all_reduce: sum small tensors by a kernel of ours, where the GPUs reach each other's memory.

    Raises:
        ResourceError: they do, and yet the driver shares none.
    """
    for name, value in (LOOPBACK | QUIET).items():
        os.environ.setdefault(name, value)
    store = FileStore(f"/proc/self/fd/{store_fd}", size)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    assert dist.group.WORLD is not None
    ranks = ProcessGroup(dist.group.WORLD, device, wait_for)
    if on_gpu and custom_all_reduce:
        from wavecore.parallel.peer_memory import reaches_peers, share_buffers

        if ranks.least(int(reaches_peers(device, size))):
            ranks.peers = share_buffers(dist.group.WORLD, device)
            ranks.least(0)  # the zeros are there on all ranks
    return ranks
