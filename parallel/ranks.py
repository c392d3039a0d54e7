"""How the ranks of a group find each other, on one host, and which of them do what together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from wavecore.parallel.collectives import ALONE, Collectives, ProcessGroup

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Ranks of one host: no socket on an interface that others reach."""
QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast cannot be had on some hosts, and NCCL then hangs."""
TIMEOUT = timedelta(days=1)
"""Nobody waits for it: a rank that dies or hangs is seen by the supervisor, which ends the group."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a group, as one of them sees it: engine after engine, and in each rank after rank.

    Attributes:
        tensor: of this rank's engine; they share each layer.
        data: of the same place in each engine; with the former they share the experts.
    """

    tensor: Collectives = ALONE
    data: Collectives = ALONE

    @property
    def size(self) -> int:
        return self.tensor.size * self.data.size

    @property
    def rank(self) -> int:
        return self.data.rank * self.tensor.size + self.tensor.rank


def join(
    store_fd: int,
    rank: int,
    size: int,
    tensor_size: int,
    exchanges: bool,
    device: torch.device,
    wait_for: Callable[[int | None], object],
    custom_all_reduce: bool = True,
) -> Ranks:
    """Meet the other ranks of this group; returns when all are there.

    They meet in a file without a name, which each life of the group has anew. torch's TCPStore would listen on every
    interface, whatever host it is given.

    Args:
        store_fd: an anonymous file that all ranks inherited.
        tensor_size: ranks of an engine.
        exchanges: engines share experts.
        device: of this rank's tensors; on a GPU that of its rank's number. NCCL sets its communicators up at once,
            rather than in a later capture.
        wait_for: see `ProcessGroup`; told ranks of the group.
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

    def of(groups: Sequence[Sequence[int]], sums: bool) -> Collectives:
        """That of these groups in which this rank is."""
        members = next(group for group in groups if rank in group)
        if len(members) == 1:
            return ALONE
        group = dist.group.WORLD
        if len(groups) > 1:
            group, _ = dist.new_subgroups_by_enumeration([list(one) for one in groups])  # type: ignore[no-untyped-call]
        assert group is not None
        ranks = ProcessGroup(group, device, lambda peer: wait_for(None if peer is None else members[peer]))
        if on_gpu and sums and custom_all_reduce:
            from wavecore.parallel.peer_memory import reaches_peers, share_buffers

            if ranks.least(int(reaches_peers(device, members))):
                ranks.peers = share_buffers(group, device)
                ranks.least(0)  # the zeros are there on all ranks
        return ranks

    engines = [range(first, first + tensor_size) for first in range(0, size, tensor_size)]
    peers = [range(place, size, tensor_size) for place in range(tensor_size)]
    return Ranks(of(engines, sums=True), of(peers, sums=False) if exchanges else ALONE)
