"""Sums over ranks: what one rank computes and publishes, and why one barrier a call is enough.

On one GPU, and in the interpreter, programs of several ranks would wait for each other for ever; so the test plays the
peers. Two real ranks: tests/multi_gpu/test_all_reduce.py, and by interpreter `test_two_processes`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.environment import environment
from torch import Tensor

from wavecore.kernels import all_reduce
from wavecore.kernels.all_reduce import LINE, PeerBuffers
from wavecore.kernels.reference.layers import add_rms_norm, rms_norm

AREA, CHANNELS = 2048, 4


@pytest.fixture(autouse=True)
def few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "CHANNELS", CHANNELS)


class Peers:
    """All ranks but one, which have published their parts of each call before that one begins it."""

    def __init__(self, ranks: int, rank: int, device: str) -> None:
        words = PeerBuffers.num_bytes(AREA) // 8
        buffers = torch.zeros((ranks, words), dtype=torch.int64, device=device)
        self.flags = buffers[:, : CHANNELS * LINE.value].view(ranks, CHANNELS, LINE.value)
        self.data = buffers[:, CHANNELS * LINE.value :].view(ranks, CHANNELS, 2, AREA // 8)
        self.rank, self.calls = rank, torch.zeros(CHANNELS, dtype=torch.int64)
        self.buffers = PeerBuffers(tuple(buffers), rank, AREA, 1 << 20)

    def publish(self, parts: Tensor) -> Tensor:
        """Every rank's x [ranks, T, H], but the own one's. Returns a copy of the data."""
        ranks, rows, _ = parts.shape
        self.calls[:rows] += 1
        self.data.fill_(-1)  # of all bits: NaN
        for channel in range(min(rows, CHANNELS)):
            call = int(self.calls[channel])
            for r in range(ranks):
                if r != self.rank:
                    self.flags[self.rank, channel, r] = call + (r + call) % 2  # some are a call ahead
                    published = parts[r, channel::CHANNELS].flatten()
                    self.data[r, channel, call % 2].view(parts.dtype)[: len(published)] = published
        return self.data.clone()


@pytest.mark.parametrize("shape", [(1, 96), (3, 100), (CHANNELS + 2, 40)])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (8, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_rank(device: str, ranks: int, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The sum in rank order and in float32, rounded once; the own part in its place, and nothing else written."""
    peers = Peers(ranks, rank, device)
    for call, with_norm, with_residual in ((1, False, False), (2, True, False), (3, True, True)):
        parts = (torch.randn(ranks, *shape, device=device) * 3).to(dtype)
        residual, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
        before, x = peers.publish(parts), parts[rank].clone()
        want = torch.zeros(shape, device=device)
        for part in (*parts, *([residual] if with_residual else [])):
            want += part.float()
        if with_norm:
            normed, total = peers.buffers.add_rms_norm(x, residual if with_residual else None, weight, 1e-5, 1.0)
            exact = rms_norm(want.to(dtype).double(), weight.double(), 1e-5, 1.0)
            torch.testing.assert_close(normed.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        else:
            peers.buffers.all_reduce(x)
            total = x
        assert total.data_ptr() == x.data_ptr() and torch.equal(total, want.to(dtype))
        used = min(shape[0], CHANNELS)
        assert (peers.flags[:, :used, rank] == call).all() and not peers.flags[:, used:, rank].any()
        for channel in range(used):
            own = parts[rank, channel::CHANNELS].flatten()
            before[rank, channel, call % 2].view(dtype)[: len(own)] = own
        assert torch.equal(peers.data, before)


def test_what_a_buffer_holds() -> None:
    peers = PeerBuffers((torch.zeros(1), torch.zeros(1)), 0, 1 << 16, 200_000)
    for rows, hidden, held in (
        (24, 4096, True),
        (25, 4096, False),
        (2, 50_001, False),
        (1, 1 << 15, True),
        (1, (1 << 15) + 1, False),
    ):
        assert peers.hold(torch.empty((rows, hidden), dtype=torch.bfloat16, device="meta")) == held
    peers.all_reduce(torch.empty(0, 64))  # nothing to wait for


def test_twin_of_several_ranks() -> None:
    """Ranks without such buffers sum first; the norm is the same as of one rank."""
    from tests.support.thread_ranks import Board, ThreadRank

    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    alone = ThreadRank(Board(1), 0)
    for ours, theirs in zip(
        alone.add_rms_norm(x, residual, weight, 1e-5, 0.0), add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert torch.equal(ours, theirs)


def wrong_reads(ranks: int, calls: int, places: int) -> set[tuple[int, int]]:
    """Every order in which ranks can do what the kernel does in one channel, a read of each peer's part at a time.

    A rank's state is its call and how far that is: -2 at first, -1 when its part is written, and from 0 on, when it has
    told the others, how many parts it has read. It reads once all ranks have told this call.

    Returns:
        (call, what was read in place of that call's part), if such a thing can happen.
    """
    start = ((1, -2),) * ranks
    seen, todo, wrong = {start}, [start], set()
    while todo:
        state = todo.pop()
        written, told = ([call - (done < least) for call, done in state] for least in (-1, 0))
        for rank, (call, done) in enumerate(state):
            if call > calls or (done >= 0 and min(told) < call):
                continue
            if done >= 0:
                # What lies in this place of the peer: of the calls that it has written there, the last.
                last = max((n for n in range(1, written[done] + 1) if n % places == call % places), default=0)
                if last != call:
                    wrong.add((call, last))
            following = (call, done + 1) if done + 1 < ranks else (call + 1, -2)
            after = (*state[:rank], following, *state[rank + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert any(all(call > calls for call, _ in state) for state in seen), "all come to their end"
    return wrong


@pytest.mark.parametrize(("ranks", "calls"), [(2, 7), (3, 4), (4, 3)])
def test_two_places_and_one_barrier_are_enough(ranks: int, calls: int) -> None:
    assert not wrong_reads(ranks, calls, 2)
    assert wrong_reads(ranks, calls, 1)


@pytest.mark.slow
def test_two_processes() -> None:
    """Two ranks by interpreter, which wait for each other in shared memory."""
    memory = os.memfd_create("test-buffers")
    os.ftruncate(memory, 2 * PeerBuffers.num_bytes(AREA))
    program = Path(__file__).with_name("all_reduce_rank.py")
    command = [sys.executable, program, str(AREA), str(CHANNELS), str(memory)]
    interprets = environment(TRITON_INTERPRET="1")
    ranks = [subprocess.Popen([*command, str(rank)], env=interprets, pass_fds=[memory]) for rank in range(2)]
    os.close(memory)
    assert [rank.wait(100) for rank in ranks] == [0, 0]
