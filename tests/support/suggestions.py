"""Reads the settings that a refused start says would fit."""

from __future__ import annotations

from typing import Any

FRACTIONS = ("gpu_memory_utilization", "kv_cache_memory_gib", "swap_space_gib")
WHOLE = ("max_model_len", "num_gpu_blocks_override")


def suggestions(message: str) -> list[dict[str, Any]]:
    """Each as the settings to change together; none where the message names none that can be computed."""
    _, _, said = message.partition(" would fit with ")
    first = said.partition("\n")[0]  # a table may follow
    found = [dict(map(_setting, choice.split(" and "))) for choice in first.split(", or ")]
    return [settings for settings in found if "" not in settings]


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition(" ")
    if name in FRACTIONS:
        return name, float(value)
    if name in WHOLE:
        return name, int(value)
    return (name, value) if name == "dtype" else ("", text)
