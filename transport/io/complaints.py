"""Counts what a peer did wrong and logs it at a bounded rate, so that a flood of bad frames cannot flood the log."""

import logging
import time
from collections import Counter

LOG_SECONDS = 10.0


class Complaints:
    """Used by one thread; `counts` may be read by any."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._quiet_until: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, detail: object, level: int = logging.WARNING) -> None:
        """Count one; `kind` is one of a few fixed words."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(kind, 0.0):
            self._quiet_until[kind] = now + LOG_SECONDS
            self._logger.log(level, "%s (%d so far): %s", kind, self.counts[kind], detail)
