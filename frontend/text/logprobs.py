"""Log-probability frames of the wire to vLLM's dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from wavecore.frontend.outputs import Logprob, PositionLogprobs
from wavecore.transport.wire.messages import TensorFrame
from wavecore.transport.wire.tensors import to_numpy

Decode = Callable[[int], str] | None
"""The text of one token; None without a tokenizer."""


def read_logprobs(frames: Sequence[TensorFrame], positions: Sequence[int], decode: Decode) -> list[PositionLogprobs]:
    """One dictionary a token.

    Args:
        positions: of frames, in threes (more than one three where outputs were merged): token ids int32
            [tokens, 1 + k] with the chosen token first, log-probabilities float32 of the same shape, ranks of the
            chosen tokens int32 [tokens].
    """
    threes = [[to_numpy(frames[i]).tolist() for i in positions[at : at + 3]] for at in range(0, len(positions), 3)]
    return [_position(decode, *row) for columns in threes for row in zip(*columns, strict=True)]


@dataclass(frozen=True, eq=False)
class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """One entry a prompt token, the first None. Each is made when it is read: those of a long prompt are a million
    objects, which hold up a whole program if they are made at once. It equals the list of them, which a pickle or a
    copy of it is.

    Attributes:
        columns: of all tokens but the first, as in `read_logprobs`.
    """

    columns: Sequence[npt.NDArray[Any]]
    decode: Decode

    def __len__(self) -> int:
        return 1 + len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        place = range(len(self))[at]
        return _position(self.decode, *[column[place - 1].tolist() for column in self.columns]) if place else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | PromptLogprobs) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return list, ([*self],)


def _position(decode: Decode, ids: list[int], values: list[float], chosen_rank: int) -> PositionLogprobs:
    entries: PositionLogprobs = {}
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        # Place 0 is the chosen token; it comes again among the top k where it is one of them.
        rank = chosen_rank if place == 0 else place
        if token not in entries:
            entries[token] = Logprob(value, rank, decode(token) if decode else None)
    return entries
