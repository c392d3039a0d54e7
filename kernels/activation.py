"""Gated activations: act(gate) * up over [T, 2 I] = gate | up."""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.chain import follow
from wavecore.kernels.device import early

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.layers.silu_mul`; gate_up is contiguous."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """See `reference.layers.gelu_tanh_mul`; gate_up is contiguous."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    if tokens:
        grid = tokens, triton.cdiv(inner, BLOCK)
        _gated[grid](gate_up, out, inner, GELU=gelu, BLOCK=BLOCK, **early(gate_up.device))
    return out


@triton.jit
def _gated(gate_up_ptr, out_ptr, inner, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """A program (token, part of BLOCK places) writes out[token, d], d being the places, `inner` of them in all."""
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < inner
    gate = tl.load(gate_up_ptr + token * 2 * inner + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * inner + inner + d, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(y) = 2 sigmoid(2 y) - 1, so 0.5 x (1 + tanh(y)) = x sigmoid(2 y); 2 y = 2 sqrt(2 / pi) (x + 0.044715 x^3)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * inner + d, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)
