"""A program, not a test: one rank of those that test_all_reduce.py starts. Prints JSON lines of what it found.

all_reduce_rank.py RANK SIZE DESCRIPTOR dies|CHECK ...
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_all_reduce import graph_of, join, world
from torch import Tensor

from wavecore.kernels.all_reduce import CHANNELS, LINE
from wavecore.kernels.reference.layers import rms_norm
from wavecore.parallel import peer_memory
from wavecore.parallel.collectives import ProcessGroup

SECONDS = 90.0
EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 4096), (2, 64), (3, 1000), (127, 576), (128, 1024), (129, 1024), (300, 4096), (640, 896))


def parts_of(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's x, by NCCL."""
    return group.all_gather(x.flatten()).view(group.size, *x.shape)


def in_rank_order(x: Tensor, group: ProcessGroup, residual: Tensor | None = None) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in (*parts_of(x, group), *([] if residual is None else [residual])):
        total += part.float()
    return total.to(x.dtype)


def same_on_all(x: Tensor, group: ProcessGroup) -> bool:
    return all(torch.equal(part, x) for part in parts_of(x, group))


def held(shape: tuple[int, int], dtype: torch.dtype, group: ProcessGroup) -> bool:
    return group.peers is not None and group.peers.hold(torch.empty(shape, dtype=dtype, device="meta"))


def random_parts(shape: tuple[int, int], dtype: torch.dtype, group: ProcessGroup, seed: int) -> list[Tensor]:
    """This rank's x, and residual and weight, which are the same on all."""
    own, shared = (torch.Generator().manual_seed(n) for n in (seed * 64 + group.rank + 1, seed * 64))
    device = torch.device("cuda", group.rank)
    x = torch.randn(shape, generator=own)
    residual, weight = torch.randn(shape, generator=shared), torch.randn(shape[1], generator=shared)
    return [tensor.to(dtype).to(device) for tensor in (x, residual, weight)]


def complaints(group: ProcessGroup, x: Tensor, residual: Tensor | None, weight: Tensor) -> list[str]:
    """What is wrong with one sum alone, and one with residual and norm."""
    assert group.peers is not None
    found = []
    want = in_rank_order(x, group)
    own = x.clone()
    group.peers.all_reduce(own)
    if not torch.equal(own, want):
        found.append(f"sum of {x.dtype} {list(x.shape)}: off by {float((own.float() - want.float()).abs().max())}")
    want = in_rank_order(x, group, residual)
    normed, total = group.add_rms_norm(x.clone(), residual, weight, EPS, 1.0)
    if not torch.equal(total, want):
        found.append(f"residual sum of {x.dtype} {list(x.shape)}: {float((total.float() - want.float()).abs().max())}")
    formula = rms_norm(want.double(), weight.double(), EPS, 1.0)
    error, unit = float((normed.double() - formula).abs().max()), torch.finfo(x.dtype).eps
    if error > 4 * max(unit, 1e-6) * float(formula.abs().max()):
        found.append(f"norm of {x.dtype} {list(x.shape)}: off by {error}")
    if not (same_on_all(normed, group) and same_on_all(total, group)):
        found.append(f"other bits on other ranks: {x.dtype} {list(x.shape)}")
    return found


def check_equality(group: ProcessGroup) -> list[str]:
    found = []
    for seed, shape in enumerate(SHAPES):
        for dtype in [dtype for dtype in DTYPES if held(shape, dtype, group)]:
            x, residual, weight = random_parts(shape, dtype, group, seed)
            found += complaints(group, x, residual, weight) + complaints(group, x, None, weight)
    return found


def check_graph(group: ProcessGroup) -> list[str]:
    """A graph of an odd number of sums of many sizes, replayed with other values, and between replays sums outside."""
    peers = group.peers
    assert peers is not None
    shapes = [shape for shape in (*SHAPES, *SHAPES[:3]) if held(shape, torch.bfloat16, group)]
    cases = [random_parts(shape, torch.bfloat16, group, i) for i, shape in enumerate(shapes)]
    results: list[tuple[Tensor, Tensor]] = []

    def calls() -> None:
        results.clear()
        copies = [x.clone() for x, _, _ in cases]  # so that sums follow each other, each launched before the last ends
        results.extend(peers.add_rms_norm(x, *case[1:], EPS, 0.0) for x, case in zip(copies, cases, strict=True))

    graph, found = graph_of(calls), []
    for replay in range(20):
        for x, _, _ in cases:
            x.mul_(-0.5 if replay % 2 else -2.0)
        graph.replay()
        for (x, residual, _), (normed, total) in zip(cases, results, strict=True):
            if not torch.equal(total, in_rank_order(x, group, residual)) or not same_on_all(normed, group):
                found.append(f"replay {replay}: {list(x.shape)}")
        found += complaints(group, *cases[replay % len(cases)])
    return found


def check_bound(group: ProcessGroup) -> list[str]:
    """What is too large goes to NCCL, and so does everything without peers; all the same sums."""
    peers, found = group.peers, []
    assert peers is not None
    most = peer_memory.MOST_BYTES[group.size]
    for rows, held in ((most // 8192, True), (most // 8192 + 1, False)):
        x, residual, weight = random_parts((rows, 4096), torch.bfloat16, group, rows)
        want = in_rank_order(x, group, residual).float()
        if peers.hold(x) != held:
            found.append(f"{rows} rows held: {peers.hold(x)}")
        for group.peers in (peers, None):
            normed, total = group.add_rms_norm(x.clone(), residual, weight, EPS, 0.0)
            error = float((total.float() - want).abs().max())
            if error > 0.07 or not same_on_all(normed, group):
                found.append(f"{rows} rows with {group.peers is not None=}: off by {error}")
        group.peers = peers
    return found


def check_poison(group: ProcessGroup) -> list[str]:
    """100,000 sums of many sizes with random delays; what is not published must not be read, since it is NaN.

    Behind each call a rank spoils what it publishes next, which all peers have read by then. Values are small whole
    numbers, exact in bfloat16, and change with each call.
    """
    device = torch.device("cuda", group.rank)
    peer_memory.AREA = 4096  # little to spoil
    peers = peer_memory.share_buffers(world(), device)
    group.least(0)
    own = peers.buffers[group.rank]
    calls_made = own[: CHANNELS * LINE.value].view(CHANNELS, LINE.value)[:, group.rank]
    data = own[CHANNELS * LINE.value :].view(CHANNELS, 2, -1)
    channels = torch.arange(CHANNELS, device=device)
    shared, mine = random.Random(0), random.Random(group.rank + 1)
    weights = [1 + rank % 2 for rank in range(group.size)]
    numbers = torch.randint(-4, 5, (256 * 1024,), generator=torch.Generator().manual_seed(0)).to(device)
    spoilt = torch.tensor(-1, device=device)  # all bits, which is NaN; a copy of a number would break the capture
    counter, wrong = torch.zeros((2,), dtype=torch.int64, device=device)
    kinds = [(rows, 64 << shared.randrange(5), shared.choice(DTYPES)) for rows in (1, 2, 100, 128, 129, 200) * 8]
    kinds = [kind for kind in kinds if peers.hold(torch.empty(kind[:2], dtype=kind[2], device="meta"))]

    def one(rows: int, hidden: int, dtype: torch.dtype) -> None:
        counter.add_(1)
        base = numbers[: rows * hidden].view(rows, hidden) * (counter % 5 + 1)
        x = (base * weights[group.rank]).to(dtype)
        if mine.random() < 0.3:
            torch.cuda._sleep(mine.randrange(40_000))
        peers.all_reduce(x)
        wrong.add_((x != base * sum(weights)).sum())
        data[channels, (calls_made + 1) % 2] = spoilt

    def chain() -> None:
        for kind in kinds * 4:
            one(*kind)

    graph = graph_of(chain)
    replays = -(-100_000 // (4 * len(kinds)))
    for replay in range(replays):
        graph.replay()
        if replay % 50 == 0:
            one(*shared.choice(kinds))
            time.sleep(mine.random() * 1e-3)
    done, bad = counter.item(), wrong.item()
    return [] if bad == 0 and done >= 100_000 else [f"{bad} wrong values in {done} sums"]


CHECKS: dict[str, Callable[[ProcessGroup], list[str]]] = {
    "equality": check_equality,
    "graph": check_graph,
    "bound": check_bound,
    "poison": check_poison,
}


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")  # at once: both ranks write to one file
    sys.stdout.flush()


def main(rank: int, size: int, store: int, *tasks: str) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a kernel that waits for ever ends with its process
    begin = time.monotonic()
    group = join(rank, size, store)
    say(rank=rank, joined=round(time.monotonic() - begin, 1))
    if tasks != ("dies",):
        for name in tasks:
            begin = time.monotonic()
            say(rank=rank, begins=name)
            say(rank=rank, check=name, found=CHECKS[name](group)[:8], seconds=round(time.monotonic() - begin, 1))
        os._exit(0)
    else:
        x = torch.ones(4, 1024, device=f"cuda:{rank}")
        group.all_reduce(x)
        torch.cuda.synchronize()
        group.least(0)
        if rank == size - 1:
            os._exit(0)
        group.all_reduce(x)
        say(rank=rank, waits=True)
        torch.cuda.synchronize()
        say(rank=rank, waits=False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
