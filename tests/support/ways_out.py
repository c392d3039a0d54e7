"""Reads the settings that a refusal says would fit."""

from __future__ import annotations

from typing import Any

FRACTIONS = ("gpu_memory_utilization", "kv_cache_memory_gib", "swap_space_gib")


def ways_out(words: str) -> list[dict[str, Any]]:
    """Settings of each way out; none where the refusal knows of none."""
    _, _, said = words.partition(" would fit with ")
    ways = said.splitlines()[0].split(", or ") if said else []
    return [dict(map(_setting, way.split(" and "))) for way in ways]


def _setting(words: str) -> tuple[str, Any]:
    name, value = words.split(" ")
    if name == "dtype":
        return name, value
    return name, float(value) if name in FRACTIONS else int(value)
