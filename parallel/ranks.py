"""How the ranks of a group find each other, and which of them do what together."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from wavecore.parallel.collectives import ALONE, Collectives, ProcessGroup
from wavecore.transport.errors import NotSupportedError

LOOPBACK = "lo"
"""Ranks of one host: no socket on an interface that others reach."""
GRAPHS_OVER_HOSTS = (2, 30, 4)
"""NCCL's first version whose CUDA graphs do not hang over several hosts (vllm-project/vllm#52504)."""
QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast cannot be had on some hosts, and NCCL then hangs."""
LINKED = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Ranks of several hosts: torch neither looks at the store each second, for a timeout that nobody has, nor aborts a
rank when a peer is gone. The link between the hosts knows why, and ends it."""
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


def check_graphs(nccl: tuple[int, ...]) -> None:
    """Whether CUDA graphs may hold collectives of ranks on several hosts.

    Args:
        nccl: its version.

    Raises:
        NotSupportedError: they would hang.
    """
    if nccl < GRAPHS_OVER_HOSTS:
        found, least = (".".join(map(str, version)) for version in (nccl, GRAPHS_OVER_HOSTS))
        way_out = f"set enforce_eager (--enforce-eager), or install NCCL {least} or newer"
        raise NotSupportedError(f"CUDA graphs over several hosts with NCCL {found}, where they hang: {way_out}")


def join(
    store: int | Store,
    rank: int,
    size: int,
    tensor_size: int,
    exchanges: bool,
    device: torch.device,
    wait_for: Callable[[int | None], object],
    custom_all_reduce: bool = True,
    interface: str = LOOPBACK,
) -> Ranks:
    """Meet the other ranks of this group; returns when all are there.

    On one host they meet in a file without a name, which each life of the group has anew. torch's TCPStore would listen
    on every interface, whatever host it is given.

    Args:
        store: an anonymous file that all ranks inherited; or where those of several hosts meet.
        tensor_size: ranks of an engine.
        exchanges: engines share experts.
        device: of this rank's tensors; on a GPU that of its rank's number. NCCL sets its communicators up at once,
            rather than in a later capture.
        wait_for: see `ProcessGroup`; told ranks of the group.
        custom_all_reduce: sum small tensors by a kernel of ours, where the GPUs reach each other's memory. For ranks
            of one host.
        interface: the network interface that NCCL and gloo use, without encryption.

    Raises:
        ResourceError: they do, and yet the driver shares none.
    """
    interfaces = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    for name, value in (interfaces | QUIET | ({} if isinstance(store, int) else LINKED)).items():
        os.environ.setdefault(name, value)
    if isinstance(store, int):
        store = FileStore(f"/proc/self/fd/{store}", size)
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
