"""Log-probability frames of the wire to vLLM's dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wavecore.frontend.outputs import Logprob, PositionLogprobs
from wavecore.transport.wire.messages import TensorFrame
from wavecore.transport.wire.tensors import to_numpy


def read_logprobs(
    frames: Sequence[TensorFrame], positions: Sequence[int], decode: Callable[[int], str] | None
) -> list[PositionLogprobs]:
    """One dictionary a token.

    Args:
        positions: of frames, in threes (more than one three where outputs were merged): token ids int32
            [tokens, 1 + k] with the chosen token first, log-probabilities float32 of the same shape, ranks of the
            chosen tokens int32 [tokens].
        decode: text of one token, None without a tokenizer.
    """
    found: list[PositionLogprobs] = []
    for at in range(0, len(positions), 3):
        ids, values, ranks = (to_numpy(frames[i]) for i in positions[at : at + 3])
        rows = zip(ids.tolist(), values.astype(np.float64).tolist(), ranks.tolist(), strict=True)
        found += [_position(row_ids, row_values, rank, decode) for row_ids, row_values, rank in rows]
    return found


def _position(
    ids: list[int], values: list[float], chosen_rank: int, decode: Callable[[int], str] | None
) -> PositionLogprobs:
    entries: PositionLogprobs = {}
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        # Place 0 is the chosen token; it comes again among the top k where it is one of them.
        rank = chosen_rank if place == 0 else place
        if token not in entries:
            entries[token] = Logprob(value, rank, decode(token) if decode else None)
    return entries
