"""Weights on their way to a GPU: any shape, cut and dtype, and no piece is filled again before its copy is done."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

from wavecore.engine_core.models import weights
from wavecore.engine_core.models.weights import Staging


class Copied:
    """An event whose copy is done once it is waited for."""

    records: ClassVar[Counter[int]] = Counter()

    def record(self) -> None:
        Copied.records[id(self)] += 1

    def synchronize(self) -> None:
        Copied.records[id(self)] = 0


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """As on a GPU, but that its memory is the host's, in pieces of 48 bytes."""
    monkeypatch.setattr(weights, "PIECE", 48)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    empty = torch.empty

    def pageable(*sizes: int, pin_memory: bool, **kind: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*sizes, **kind)

    Copied.records.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", pageable)
        return Staging()


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("shape", [(100,), (1, 12), (5, 4), (40, 3), (0, 7), (64, 1)])
def test_what_arrives_is_what_was_read(
    staging: Staging, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...]
) -> None:
    for kind in kinds:
        source = torch.randn(shape[0], *(2 * width for width in shape[1:])).to(kinds[0])
        cut = source[:, 1::2] if source.dim() > 1 else source  # columns of which others lie between
        target = torch.zeros(shape, dtype=kind)
        staging.copy(target, cut)
        assert torch.equal(target, cut.to(kind))


def test_a_piece_is_filled_again_when_its_copy_is_done(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: of each at most one copy is in flight, and all pieces are used."""
    copy, most = torch.Tensor.copy_, [0]

    def watching(self: torch.Tensor, source: torch.Tensor, **how: Any) -> torch.Tensor:
        most[0] = max([*most, *Copied.records.values()])
        return copy(self, source, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", watching)
    staging.copy(torch.zeros(300), torch.ones(300))
    assert most == [1] and len(Copied.records) == weights.PIECES
    assert sum(Copied.records.values()) == weights.PIECES, "the last copies are still on their way"
