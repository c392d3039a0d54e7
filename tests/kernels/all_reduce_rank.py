"""A program, not a test: one of two ranks that add up tensors in shared memory, by Triton's interpreter.

all_reduce_rank.py RANK DESCRIPTOR
"""

from __future__ import annotations

import faulthandler
import mmap
import random
import sys
import time

import torch

from wavecore.kernels import all_reduce
from wavecore.kernels.all_reduce import LINE, PeerBuffers

CALLS, SECONDS = 200, 90.0


def main(area: int, channels: int, memory: int, rank: int) -> None:
    all_reduce.CHANNELS = channels
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    words = PeerBuffers.num_bytes(area) // 8
    buffers = torch.frombuffer(mmap.mmap(memory, 2 * words * 8), dtype=torch.int64).view(2, words)
    peers = PeerBuffers(tuple(buffers), rank, area, 1 << 20)
    flags = buffers[rank, : channels * LINE.value].view(channels, LINE.value)
    data = buffers[rank, channels * LINE.value :].view(channels, 2, area // 8)
    shared, own = random.Random(0), random.Random(rank + 1)
    for call in range(1, CALLS + 1):
        rows, hidden = shared.choice([1, 2, 3, 5, 11]), shared.choice([16, 33, 128])
        base = torch.arange(rows * hidden, dtype=torch.float32).view(rows, hidden) % 61 + call
        x = base * (rank + 1)
        if own.random() < 0.3:
            time.sleep(own.random() * 1e-3)
        peers.all_reduce(x)
        assert torch.equal(x, base * 3), (call, rows, hidden)
        data[torch.arange(channels), (flags[:, rank] + 1) % 2] = -1  # NaN where the next call is published


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
