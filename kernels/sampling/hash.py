"""The random numbers of sampling, in Triton: the same integers as in the twin, hence the same draws."""

from __future__ import annotations

import triton
import triton.language as tl

from wavecore.kernels.sampling.rows import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
NEAR = tl.constexpr(0.1)


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
def _uniform(token, key_1, key_2):
    """A uniform number of each token: how far it is from the end that it is nearer to, and whether that is 1."""
    unsigned = _fmix32((token.to(tl.uint32) * _GOLDEN) ^ key_1)
    bits = _fmix32(unsigned ^ key_2).to(tl.int32, bitcast=True)
    offset = ((key_2 & 0xFFFFFF).to(tl.float32) + 0.5) * 1.3877787807814457e-17  # 2**-56
    return (bits ^ (bits >> 31)).to(tl.float32) * 2.3283064365386963e-10 + offset, bits < 0  # 2**-32


@triton.jit
def gumbel(token, key_1, key_2):
    """Standard Gumbel noise of tokens, float32; see `reference.sampling.gumbel_of_bits`."""
    tail, upper = _uniform(token, key_1, key_2)
    rate = -tl.log(tl.where(upper, tail, 1.0 - tail))
    # log1p(-tail): below 2**-9 the series, where 1 - tail would lose bits
    series = tail * (1.0 + tail * (0.5 + tail * (1.0 / 3.0)))
    return -tl.log(tl.where(upper | (tail >= 0.001953125), rate, series))


@triton.jit
def rough_gumbel(token, key_1, key_2):
    """The same but for an error below NEAR, without a logarithm."""
    tail, upper = _uniform(token, key_1, key_2)
    series = tail * (1.0 + tail * (0.5 + tail * 0.5))
    return _rough_minus_log(tl.where(upper, _rough_minus_log(tail), series))


@triton.jit
def _rough_minus_log(x):
    """-log(x) +- 0.03: the bits of a float grow with its logarithm (Mitchell 1962)."""
    return 88.0 - x.to(tl.int32, bitcast=True).to(tl.float32) * 8.262958294867817e-08  # log(2) * 2**-23
