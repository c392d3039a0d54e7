"""What the scripted model of soak.py says when nothing goes wrong; see scripted_runner.py."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

VOCAB_SIZE = 1000


def right_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Its `count` tokens behind a prompt."""
    checksum = seen = 0
    tokens: list[int] = []
    for i in range(len(prompt) + count):
        if i >= len(prompt):
            tokens.append(seen % VOCAB_SIZE)
        token = prompt[i] if i < len(prompt) else tokens[-1]
        checksum = zlib.crc32(struct.pack("<I", token), checksum)
        seen = zlib.crc32(struct.pack("<I", checksum), seen)
    return tokens
