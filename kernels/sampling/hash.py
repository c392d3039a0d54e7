"""The random numbers of sampling, in Triton: the same integers as in the twin, hence the same draws."""

import triton
import triton.language as tl

from wavecore.kernels.sampling.rows import GOLDEN, MIX_1, MIX_2

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _fmix32(x, key=0):
    """MurmurHash3's 32-bit finaliser on uint32, with a key between its two products."""
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 13) ^ key) * _MIX_2
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
def _random_bits(token, key_1, key_2):
    return _fmix32((token.to(tl.uint32) * _GOLDEN) ^ key_1, key_2)


@triton.jit
def gumbel(token, key_1, key_2):
    """Standard Gumbel noise of tokens, float32; see `reference.sampling.gumbel_of_bits`."""
    bits = _random_bits(token, key_1, key_2).to(tl.int32, bitcast=True)
    upper = bits < 0
    offset = ((key_2 & 0xFFFFFF).to(tl.float32) + 0.5) * 1.3877787807814457e-17  # 2**-56
    tail = (bits ^ (bits >> 31)).to(tl.float32) * 2.3283064365386963e-10 + offset  # 2**-32
    rate = -tl.log(tl.where(upper, tail, 1.0 - tail))
    # log1p(-tail): below 2**-9 the series, where 1 - tail would lose bits
    series = tail * (1.0 + tail * (0.5 + tail * (1.0 / 3.0)))
    return -tl.log(tl.where(upper | (tail >= 0.001953125), rate, series))


@triton.jit
def gumbel_bound(token, key_1, key_2):
    """At least the noise of tokens, by the bits of a float instead of logarithms.

    With v the uniform number, -log(1 - v) is at least v, so the noise is at most -log(v). And the bits of a float, as
    an integer, tell its logarithm, a little too small (Mitchell 1962): where v is small the bound is up to 0.06 above
    the noise.
    """
    bits = _random_bits(token, key_1, key_2).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.fma(bits.to(tl.float32), -8.262958294867817e-08, 110.21040)  # log(2) * 2**-23, (127 + 32) log(2)
