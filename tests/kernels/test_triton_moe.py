"""The mixture of experts against its twin, by interpreter or on a GPU; what goes to no expert, and ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wavecore.kernels.check import compare
from wavecore.kernels.moe import products_hopper
from wavecore.kernels.ops import moe

pytestmark = pytest.mark.usefixtures("guarded")


def arguments(
    tokens: int, experts: int, hidden: int, inner: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    gate_up, down = random(experts * 2 * inner, hidden) / hidden**0.5, random(experts * hidden, inner) / inner**0.5
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    return random(tokens, hidden), random(tokens, experts), gate_up, down, slots


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 1, 1, 16, 16), (3, 60, 4, 40, 72), (70, 2, 2, 48, 24), (130, 3, 1, 64, 65), (40, 16, 8, 130, 33)],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_moe(device: str, tokens: int, experts: int, top_k: int, hidden: int, inner: int, normalize: bool) -> None:
    """Tiles of few rows and of many; widths that no tile divides; experts without a token."""
    args = arguments(tokens, experts, hidden, inner, device)
    args[4][torch.rand(tokens, device=device) < 0.2] = -1
    assert compare(moe.kernel, moe.twin, (*args, top_k, normalize)) is None


@pytest.mark.parametrize(("experts", "ranks"), [(6, 2), (4, 4)])
def test_parts_of_the_experts(device: str, experts: int, ranks: int) -> None:
    """Of each part as the twin, whatever memory held before; together they are the whole."""
    x, scores, gate_up, down, slots = arguments(14, experts, 40, 24, device)
    slots[::5] = -1
    total = torch.zeros_like(x)
    parts = zip(gate_up.chunk(ranks), down.chunk(ranks), range(0, experts, experts // ranks), strict=True)
    for own_gate_up, own_down, first in parts:
        args = (x, scores, own_gate_up, own_down, slots, 2, True, first)
        assert compare(moe.kernel, moe.twin, args) is None
        total += moe.kernel(*args)
    torch.testing.assert_close(total, moe.twin(x, scores, gate_up, down, slots, 2, True), rtol=1e-5, atol=1e-5)


def test_all_tokens_to_one_expert_and_none(device: str) -> None:
    x, scores, gate_up, down, slots = arguments(90, 6, 32, 32, device)
    scores[:, 4] += 100
    assert compare(moe.kernel, moe.twin, (x, scores, gate_up, down, slots, 1, True)) is None
    out = moe.kernel(x, scores, gate_up, down, torch.full_like(slots, -1), 2, True)
    assert not out.any()


def test_nan_stays_in_its_token(device: str) -> None:
    """A router's NaN may pick any experts, but harms no other token and writes nowhere else."""
    x, scores, gate_up, down, slots = arguments(5, 6, 32, 32, device)
    expected = moe.kernel(x, scores, gate_up, down, slots, 2, True)
    x[2], scores[2] = torch.nan, torch.nan
    out = moe.kernel(x, scores, gate_up, down, slots, 2, True)
    assert out[2].isnan().all()
    keep = torch.tensor([0, 1, 3, 4], device=device)
    torch.testing.assert_close(out[keep], expected[keep], rtol=0, atol=0)


def test_the_same_bits_each_time(device: str) -> None:
    """Pairs are sorted by atomics, in any order; no result depends on it."""
    args = arguments(64, 4, 32, 48, device)
    first, second = (moe.kernel(*args, 2, True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "capability", "held"),
    [
        (torch.bfloat16, 2048, 768, 90, True),
        (torch.float16, 192, 64, 90, True),
        (torch.float32, 2048, 768, 90, False),
        (torch.bfloat16, 2048, 96, 90, False),
        (torch.bfloat16, 48, 64, 90, False),
        (torch.bfloat16, 2048, 768, 80, False),
        (torch.bfloat16, 2048, 768, 100, False),
    ],
)
def test_what_the_products_for_hopper_hold(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, hidden: int, inner: int, capability: int, held: bool
) -> None:
    """Where an expert has many pairs; never where it has few."""
    monkeypatch.setattr(products_hopper, "capability", lambda _device: capability)
    x = torch.zeros(1, hidden, dtype=dtype)
    assert products_hopper.holds(x, inner, products_hopper.LEAST_PAIRS) is held
    assert not products_hopper.holds(x, inner, products_hopper.LEAST_PAIRS - 1)
