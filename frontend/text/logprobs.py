"""Log-probability frames of the wire to vLLM's dictionaries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.frontend.outputs import Logprob, PositionLogprobs
from wavecore.transport.wire.messages import TensorFrame
from wavecore.transport.wire.tensors import to_numpy

Decode = Callable[[int], str] | None
"""The text of one token; None without a tokenizer."""
Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], np.int32]
"""One position as it travels: token ids [1 + k] with the chosen token first, their log-probabilities, and the rank of
the chosen token."""


def read_rows(frames: Sequence[TensorFrame], positions: Sequence[int]) -> list[Row]:
    """One a token.

    Args:
        positions: of frames, in threes (more than one three where outputs were merged): token ids int32
            [tokens, 1 + k], log-probabilities float32 of the same shape, ranks int32 [tokens].
    """
    threes = [[to_numpy(frames[i]) for i in positions[at : at + 3]] for at in range(0, len(positions), 3)]
    return [row for columns in threes for row in zip(*columns, strict=True)]


@dataclass(frozen=True, eq=False)
class LazyLogprobs(Sequence[PositionLogprobs]):
    """One entry a token, made when it is read: those of a long prompt, or of a whole vocabulary, are a million objects,
    which hold up a program if they are made at once. It equals the list of them, which a pickle or a copy of it is.

    Attributes:
        columns: ids, log-probabilities and ranks, one entry a token, as in a `Row`.
        first: 1 for a prompt, whose first token has none: its entry is None, and it is not in the columns.
    """

    columns: Sequence[Sequence[Any] | npt.NDArray[Any]]
    decode: Decode
    first: int = 0

    def __len__(self) -> int:
        return self.first + len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        place = range(len(self))[at] - self.first
        return None if place < 0 else position_of(self.decode, *[column[place] for column in self.columns])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | LazyLogprobs) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return list, ([*self],)


def position_of(
    decode: Decode, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], rank: np.int32
) -> PositionLogprobs:
    """The entries of a row."""
    entries: PositionLogprobs = {}
    for place, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True)):
        # Place 0 is the chosen token; it comes again among the top k where it is one of them.
        if token not in entries:
            entries[token] = Logprob(value, place or int(rank), decode(token) if decode else None)
    return entries
