"""Which sums of a group go to which path; each counts once, as one that runs out of memory must pay the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.reference.layers import add_rms_norm
from wavecore.parallel.collectives import ProcessGroup


class Peers:
    """Stands for `PeerBuffers` of two rows whose peers publish nine times the same."""

    def hold(self, x: Tensor) -> bool:
        return len(x) <= 2

    def all_reduce(self, x: Tensor) -> None:
        x.mul_(10)

    def add_rms_norm(self, x: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x.mul_(10), *norm)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    """With torch.distributed the peer has the same."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.mul_(2))
    found: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    return ProcessGroup(found, torch.device("cpu"), lambda _rank: None)


@pytest.mark.parametrize(
    ("rows", "peers", "factor"),
    [(2, True, 10), (3, True, 2), (2, False, 2)],
)
def test_which_path(group: ProcessGroup, rows: int, peers: bool, factor: int) -> None:
    if peers:
        group.peers = Peers()  # type: ignore[assignment]
    x, residual, weight = torch.randn(rows, 8), torch.randn(rows, 8), torch.randn(8)
    assert torch.equal(group.all_reduce(x.clone()), x * factor)
    normed, total = group.add_rms_norm(x.clone(), residual, weight, 1e-5, 0.0)
    want = add_rms_norm(x * factor, residual, weight, 1e-5)
    assert torch.equal(normed, want[0]) and torch.equal(total, want[1])
    assert group.calls == 2


def test_a_norm_of_the_users_is_called(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group.peers = Peers()  # type: ignore[assignment]
    x, weight = torch.ones(1, 8), torch.ones(8)
    monkeypatch.setattr(group.peers, "add_rms_norm", None)
    ops.add_rms_norm.replace(lambda x, *_: (x + 1, x))
    try:
        normed, total = group.add_rms_norm(x, None, weight, 1e-5, 0.0)
    finally:
        ops.add_rms_norm.replace(None)
    assert (total == 10).all() and (normed == 11).all() and group.calls == 1


def test_what_failed_does_not_count(group: ProcessGroup) -> None:
    class Short(Peers):
        def all_reduce(self, *_: object) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory, as this test wants")

        add_rms_norm = all_reduce

    group.peers = Short()  # type: ignore[assignment]
    for call in (lambda: group.all_reduce(torch.ones(1, 8)), lambda: group.add_rms_norm(*torch.ones(3, 1, 8), 1e-5, 0)):
        with pytest.raises(torch.OutOfMemoryError):
            call()
    assert group.calls == 0
