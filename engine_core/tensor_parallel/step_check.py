"""What a step did on a rank, for ranks to compare (`check_ranks`): one that differs would soon wait for ever."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgpack
import numpy as np

from wavecore.engine_core.plan import I32, StepPlan
from wavecore.engine_core.tensor_parallel.plan_codec import encode


class StepCheck(NamedTuple):
    """Of one step.

    Attributes:
        plan: its digest.
        tokens: int32, drawn.
    """

    step: int
    plan: bytes
    tokens: bytes = b""

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepCheck:
        return cls(*msgpack.unpackb(data))

    def with_tokens(self, tokens: I32) -> StepCheck:
        return self._replace(tokens=tokens.tobytes())

    def difference(self, first: StepCheck) -> str:
        """Where this rank differs from rank 0 first; "" for nowhere."""
        if self.plan != first.plan:
            return f"step {self.step}: its plan is not that of rank 0"
        mine, its = (np.frombuffer(check.tokens, np.int32) for check in (self, first))
        for row in np.flatnonzero(mine != its).tolist():
            return f"step {self.step}, row {row}: it drew token {mine[row]}, rank 0 token {its[row]}"
        return ""


def digest(plan: StepPlan) -> bytes:
    """Of all that a plan holds."""
    return hashlib.blake2b(b"".join(encode(plan)), digest_size=8).digest()
