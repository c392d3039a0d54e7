"""Steps that were launched: what `wait` makes of their output."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wavecore.engine_core.execution.block_copies import BlockCopies
from wavecore.engine_core.execution.pinned_copies import Fetched
from wavecore.engine_core.execution.step_extras import Extras
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.plan import StepResult


@dataclass(frozen=True, slots=True)
class Deferred:
    """A step that is computed when its result is asked for."""

    run: Callable[[], StepResult]

    def wait(self) -> StepResult:
        return self.run()


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose output is on its way to the host; None for a step without rows."""

    shape: StepShape
    fetched: Fetched | None
    extras: Extras
    copies: BlockCopies

    def wait(self) -> StepResult:
        """The step's result. Everything in it is a copy: the output's memory is used again."""
        if self.fetched is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.uint8), transferred=self.copies.poll())
        vector, rows = self.fetched.wait(), self.shape.plan.num_rows
        tokens, faults = np.full(rows, -1, np.int32), np.zeros(rows, np.uint8)
        if self.shape.num_samples:  # else nothing was drawn, and the vector holds the tokens of an earlier step
            tokens[:], faults[:] = self.fetched.drawn(rows)
        extras = self.extras.read(vector)
        for row, embedding in extras["pooled"].items():
            faults[row] |= not np.isfinite(embedding).all()
        return StepResult(tokens, faults, **extras, transferred=self.copies.poll())
