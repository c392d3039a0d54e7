"""How many tokens a step may hold: as many as configured, fewer after one ran out of memory, and slowly back again."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PATIENCE = 64  # steps that must fit before twice as many tokens are tried


class StepBudget:
    """The token budget of a step.

    Attributes:
        tokens: what holds now, from 1 to `max_num_batched_tokens`.
        failures: steps that ran out of memory lately; 0 again once steps of full size were allowed for long.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = self.tokens = max_num_batched_tokens
        self.failures = 0
        self._patience = PATIENCE
        self._fitted = 0  # steps since the last change

    def shrink(self, failed: int) -> None:
        """A step of `failed` tokens ran out of memory: plan steps of half the size. If that happens again soon, larger
        ones are tried later."""
        if self.failures:  # without an end: a prompt that takes many steps must be through before the next try
            self._patience *= 2
        self.failures += 1
        self.tokens = max(min(self.tokens, failed) // 2, 1)
        self._fitted = 0
        logger.warning("steps are cut to %d tokens for now: one of %d ran out of memory", self.tokens, failed)

    def step_fitted(self) -> None:
        """A step came back. Who held the memory may have let it go, so after many of them larger ones are tried."""
        if not self.failures:
            return
        self._fitted += 1
        if self._fitted < self._patience:
            return
        self._fitted = 0
        if self.tokens < self.max_num_batched_tokens:
            self.tokens = min(2 * self.tokens, self.max_num_batched_tokens)
            logger.info("steps may have %d tokens again", self.tokens)
        else:
            self.failures, self._patience = 0, PATIENCE
