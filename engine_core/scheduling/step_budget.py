"""How many tokens a step may hold by memory: as configured, fewer after one ran out of it, and after a while as before.

Failures without a larger step in between are one burst: perhaps somebody else held the memory for a moment. Time tells
this from steps that are too large, so all waiting is in seconds: before the full size is tried again, and between two
tries of what can be made no smaller.
"""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0  # without a failure, before steps of full size are tried again
ALONE_SECONDS = 5.0  # for so long a step of one token must fail before its request is at fault
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.1


class StepBudget:
    """The token budget of a step.

    Attributes:
        tokens: what holds now, from 1 to `max_num_batched_tokens`.
        failures: bursts of steps that ran out of memory lately; 0 again once steps of full size fitted for long.
        hopeless: the last step that failed had one token, and such steps have failed for long, whenever tried.
    """

    def __init__(self, max_num_batched_tokens: int, clock: Callable[[], float]) -> None:
        self.max_num_batched_tokens = self.tokens = max_num_batched_tokens
        self.failures = 0
        self.hopeless = False
        self._clock = clock
        self._patience = PATIENCE_SECONDS
        self._changed_at = 0.0
        self._alone = 0  # steps of one token that failed in a row
        self._alone_since = self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        """Steps can be made no smaller: the next one waits for a moment."""
        return bool(self._alone) and self._clock() < self._paused_until

    def shrink(self, failed: int) -> None:
        """A step of `failed` tokens ran out of memory: plan steps of half the size. If larger ones fail again, the next
        try of them comes later."""
        now = self._clock()
        if self.tokens == self.max_num_batched_tokens:
            if self.failures:  # without an end: a prompt that takes many steps must be through before the next try
                self._patience *= 2
            self.failures += 1
        before, self.tokens = self.tokens, max(min(self.tokens, failed) // 2, 1)
        self._changed_at = now
        self.hopeless = False
        if failed == 1:
            self._alone_since = self._alone_since if self._alone else now
            self._paused_until = now + min(FIRST_PAUSE * 2**self._alone, LONGEST_PAUSE)
            self.hopeless = now - self._alone_since >= ALONE_SECONDS
            self._alone = 0 if self.hopeless else self._alone + 1
        if self.tokens < before:
            logger.warning("steps are cut to %d tokens for now: one of %d ran out of memory", self.tokens, failed)

    def step_fitted(self) -> None:
        """A step came back. Who held the memory may have let it go, so after a while full steps are tried."""
        if not self.failures:
            return
        self._alone = 0
        now = self._clock()
        if now - self._changed_at < self._patience:
            return
        self._changed_at = now
        if self.tokens < self.max_num_batched_tokens:
            self.tokens = self.max_num_batched_tokens
            logger.info("steps may have %d tokens again", self.tokens)
        else:
            self.failures, self._patience = 0, PATIENCE_SECONDS
