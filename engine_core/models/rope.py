"""Rotary tables: the cosine and sine of every position, for each way of scaling that config.json may name.

Computed in float32 in the order that transformers uses (modeling_rope_utils.py), so that float32 runs agree to the bit
pattern of the angles. RoPE: arXiv 2104.09864; NTK and YaRN: arXiv 2309.00071; LongRoPE: arXiv 2402.13753.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from wavecore.engine_core.models.spec import Rope
from wavecore.transport.errors import ModelError


def cos_sin_table(rope: Rope, length: int, device: torch.device) -> torch.Tensor:
    """float32 [length, rope.dim]: the cosines of a position in the first half of its row, the sines in the second.

    A "dynamic" row p has the base that belongs to length p + 1, which is what decoding token by token gives; so a key
    does not depend on how its prompt was cut into steps.

    Raises:
        ModelError: the settings lack a number that the kind needs.
    """
    settings = f"{rope.path}: rope settings of type {rope.kind}"
    try:
        inverse, factor = _inverse_frequencies(rope, length)
    except (KeyError, TypeError, ArithmeticError, ValueError, RuntimeError) as error:
        raise ModelError(f"{settings} are incomplete or wrong: {error!r}") from error
    if not inverse.isfinite().all() or inverse.shape[-1] != rope.dim // 2:
        raise ModelError(f"{settings} give no finite frequencies: {rope.settings}")
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).to(device)


def _inverse_frequencies(rope: Rope, length: int) -> tuple[torch.Tensor, float]:
    """Float32 [dim / 2] or [length, dim / 2], and the factor of cosines and sines."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    inverse = 1.0 / rope.theta**exponents
    given = rope.settings
    if rope.kind == "linear":
        return inverse / given["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, given), 1.0
    if rope.kind == "dynamic":
        return _dynamic(rope, length, exponents), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse), float(given.get("attention_factor") or _yarn_scale(given))
    if rope.kind == "longrope":
        longer = length > given["original_max_position_embeddings"]
        factors = torch.tensor(given["long_factor" if longer else "short_factor"], dtype=torch.float32)
        if factors.shape != exponents.shape:
            raise ValueError(f"{len(factors)} factors for {len(exponents)} frequencies")
        return 1.0 / (factors * rope.theta**exponents), _longrope_scale(given)
    if rope.kind == "factors":
        return inverse / torch.tensor(given["factors"], dtype=torch.float32), 1.0
    return inverse, 1.0


def _llama3(inverse: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    original = given["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _dynamic(rope: Rope, length: int, exponents: torch.Tensor) -> torch.Tensor:
    factor, original = rope.settings["factor"], rope.settings["max_position_embeddings"]
    lengths = torch.arange(1, length + 1).clamp(min=original)
    growth = (factor * lengths / original) - (factor - 1)
    base = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    inverse: torch.Tensor = 1.0 / base[:, None] ** exponents
    return inverse


def _yarn(rope: Rope, inverse: torch.Tensor) -> torch.Tensor:
    given, dim = rope.settings, rope.dim
    original = given["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    mixed: torch.Tensor = inverse / given["factor"] * ramp + inverse * (1 - ramp)
    return mixed


def _yarn_scale(given: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if given["factor"] <= 1 else 0.1 * weight * math.log(given["factor"]) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def _longrope_scale(given: Mapping[str, Any]) -> float:
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or given["max_position_embeddings"] / original
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
