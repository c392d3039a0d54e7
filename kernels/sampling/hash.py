"""The random numbers of sampling, in Triton: the same integers as in the twin, hence the same draws."""

from __future__ import annotations

import triton
import triton.language as tl

from wavecore.kernels.sampling.rows import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _fmix32(x):
    """MurmurHash3's 32-bit finaliser on uint32."""
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 13)) * _MIX_2
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, choice, position):
    """Two uint32 keys of a row."""
    seed_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    seed_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low = _fmix32(seed_low ^ _fmix32((choice + 1).to(tl.uint32) * _GOLDEN))
    high = _fmix32(seed_high ^ _fmix32((position + 1).to(tl.uint32) * _MIX_1))
    return _fmix32(low ^ (high * _GOLDEN)), _fmix32(high ^ (low * _MIX_2))


@triton.jit
def gumbel(token, key_1, key_2):
    """Standard Gumbel noise of tokens, float32: -log(-log(1 - v)), v uniform in (0, 1) and finest near 0."""
    bits = _fmix32((token.to(tl.uint32) * _GOLDEN) ^ key_1)
    bits = _fmix32(bits ^ key_2)
    v = ((bits >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2**-24
    v = tl.minimum(v, 0.999999940395355224609375)  # 1 - 2**-24
    # log1p(-v): below 2**-9 the series, where 1 - v would lose bits
    rate = tl.where(v < 0.001953125, v * (1.0 + v * (0.5 + v * (1.0 / 3.0))), -tl.log(1.0 - v))
    return -tl.log(rate)
