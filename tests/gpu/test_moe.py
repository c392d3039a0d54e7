"""The mixture of experts on a GPU at the sizes of real models, in every dtype, against a twin in float64."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.layer_case import close

from wavecore.kernels import ops
from wavecore.kernels.reference.moe import route


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2048])
@pytest.mark.parametrize(
    "experts, top_k, hidden, inner", [(128, 8, 2048, 768), (8, 2, 1024, 3584), (60, 4, 2048, 1408)]
)
def test_sizes_of_real_models(
    experts: int, top_k: int, hidden: int, inner: int, tokens: int, dtype: torch.dtype
) -> None:
    """Every fifth token is padding. Values that the kernels round on the way are rounded in the twin. In which order
    pairs are sorted changes no bit."""
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    scores = torch.randn(tokens, experts, device="cuda").to(dtype)
    gate_up = (torch.randn(experts, 2, inner, hidden, device="cuda") / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device="cuda") / inner**0.5).to(dtype)
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
    slots[::5] = -1
    got, again = (
        ops.moe(x, scores, gate_up.view(-1, hidden), down.view(-1, inner), slots, top_k, True) for _ in range(2)
    )
    assert torch.equal(got, again)
    weights, chosen = route(scores, top_k, True)
    want = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        token, place = ((chosen == expert) & (slots >= 0)[:, None]).nonzero(as_tuple=True)
        gate, up = ((x[token].double() @ side.double().T).to(dtype) for side in gate_up[expert])
        middle = torch.nn.functional.silu(gate.float()).to(dtype).double() * up
        part = middle.to(dtype).double() @ down[expert].double().T
        want.index_add_(0, token, part.to(dtype).double() * weights[token, place, None])
    assert not got[slots < 0].any()
    close(got, want, dtype)
