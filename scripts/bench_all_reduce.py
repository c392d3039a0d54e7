"""Time sums over the GPUs of one host, in CUDA graphs: our kernel, NCCL and torch's one-shot kernel, us a call.

    python scripts/bench_all_reduce.py [--ranks 2]

Rows are of 4,096 values in bfloat16. `sum` is the sum alone; `+ norm` adds a residual and normalises, with NCCL by a
second kernel. The last columns show ours, with the norm, with other numbers of channels. Where NCCL passes it is the
bound in `parallel/peer_memory.py`.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
from torch import Tensor

from wavecore.kernels import all_reduce, ops
from wavecore.parallel import peer_memory, ranks
from wavecore.parallel.collectives import ProcessGroup

HIDDEN = 4096
ROWS = tuple(1 << i for i in range(13))
CHANNELS = (64, 128, 256)
CALLS, REPLAYS = 100, 20
SECONDS = 240.0


def start(program: Path, size: int, *args: str, **how: Any) -> list[subprocess.Popen[bytes]]:
    """Start a program for each rank, as `program RANK SIZE DESCRIPTOR args`; the first three are for `join`."""
    store = os.memfd_create("bench-store")
    command = [sys.executable, str(program)]
    try:
        return [
            subprocess.Popen([*command, str(rank), str(size), str(store), *args], pass_fds=[store], **how)
            for rank in range(size)
        ]
    finally:
        os.close(store)


def join(rank: int, size: int, store: int) -> ProcessGroup:
    """This process as one of the ranks."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ranks.join(store, rank, size, size, False, device, lambda _rank: None).tensor
    assert isinstance(group, ProcessGroup)
    if group.peers is None:
        sys.exit(f"rank {rank}: these GPUs do not reach each other: {peer_memory.reaches_peers(device, range(size))=}")
    return group


def graph_of(calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what the calls do, which ran once before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        calls()
        graph.capture_end()
    return graph


def time_of(call: Callable[[], object], group: ProcessGroup) -> float:
    """Microseconds a call takes on the slowest rank."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    graph = graph_of(calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return -group.least(-int(begin.elapsed_time(end) * 1e6 / (CALLS * REPLAYS))) / 1e3


def with_channels(count: int, device: torch.device) -> all_reduce.PeerBuffers:
    """Buffers of the whole size for so many channels."""
    all_reduce.CHANNELS, peer_memory.AREA = count, ROWS[-1] * HIDDEN * 2 // count
    return peer_memory.share_buffers(world(), device)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def measure(rank: int, size: int, store: int) -> None:
    group = join(rank, size, store)
    device = torch.device("cuda", rank)
    say: Callable[..., None] = print if rank == 0 else lambda *_args, **_options: None
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    say(f"{size} x {torch.cuda.get_device_name()}; torch {torch.__version__}, Triton {triton.__version__}, NCCL {nccl}")
    most = peer_memory.MOST_BYTES[size]
    peer_memory.MOST_BYTES[size] = ROWS[-1] * HIDDEN * 2
    buffers = {count: with_channels(count, device) for count in CHANNELS}
    group.least(0)
    columns = ("bytes", "sum", "NCCL", "torch", "+ norm", "NCCL + norm", "64 channels", "256 channels")
    say("".join(f"{name:>13}" for name in columns))
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    plain = ProcessGroup(world(), device, lambda _rank: None)
    for rows in ROWS:
        x, residual = torch.zeros(2, rows, HIDDEN, dtype=torch.bfloat16, device=device)

        def ours(count: int, x: Tensor = x, residual: Tensor = residual) -> float:
            all_reduce.CHANNELS = count
            return time_of(lambda: buffers[count].add_rms_norm(x, residual, weight, 1e-5, 0.0), group)

        def nccl_and_norm(x: Tensor = x, residual: Tensor = residual) -> object:
            return ops.add_rms_norm(plain.all_reduce(x), residual, weight, 1e-5)

        all_reduce.CHANNELS = 128
        figures = (
            time_of(partial(buffers[128].all_reduce, x), group),
            time_of(partial(plain.all_reduce, x), group),
            torchs(x, group),
            ours(128),
            time_of(nccl_and_norm, group),
            ours(64),
            ours(256),
        )
        say(f"{x.nbytes:13,}" + "".join(f"{figure:13.1f}" for figure in figures), flush=True)
    say(f"sums above {most:,} bytes go to NCCL")


def torchs(x: Tensor, group: ProcessGroup) -> float:
    """Time of torch's kernel, which leaves the copy into its buffer to the caller."""
    own = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=x.device).zero_()
    symmetric_memory.rendezvous(own, world())
    name = world().group_name
    try:
        return time_of(lambda: torch.ops.symm_mem.one_shot_all_reduce(own, "sum", name), group)
    except RuntimeError as error:
        print(f"torch's kernel: {error}", file=sys.stderr)
        return math.nan


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1].isdigit():
        faulthandler.dump_traceback_later(SECONDS, exit=True)  # a kernel that waits for ever ends with its process
        measure(*map(int, sys.argv[1:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    processes = start(Path(__file__), parser.parse_args().ranks)
    sys.exit(max(process.wait() != 0 for process in processes))


if __name__ == "__main__":
    main()
