"""Counts what a peer did wrong and logs it at a bounded rate, so that a flood of bad frames cannot flood the log."""

from __future__ import annotations

import logging
import time
from collections import Counter

LOG_SECONDS = 10.0
NORMAL_SECONDS = 5.0  # a peer sends a whole window again before it hears that the engine is another life
MAX_CLIENTS = 1000


class Complaints:
    """Used by one thread; `counts` may be read by any."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._quiet_until: dict[str, float] = {}
        self._since: dict[tuple[str, bytes], float] = {}  # of `add_if_lasting`; the oldest is forgotten first
        self.counts: Counter[str] = Counter()

    def add_if_lasting(self, kind: str, client_id: bytes) -> None:
        """Count one that is normal for a short while, after a restart say, and log it only when it goes on."""
        now = time.monotonic()
        if (kind, client_id) not in self._since:
            if len(self._since) >= MAX_CLIENTS:
                del self._since[next(iter(self._since))]
            self._since[kind, client_id] = now
            self._logger.debug("%s: client %s", kind, client_id.hex()[:8])
        seconds = now - self._since[kind, client_id]
        if seconds < NORMAL_SECONDS:
            self.counts[kind] += 1
        else:
            self.add(kind, f"client {client_id.hex()[:8]}, for {seconds:.0f} s by now")

    def add(self, kind: str, detail: object) -> None:
        """Count one; `kind` is one of a few fixed words."""
        self.counts[kind] += 1
        now = time.monotonic()
        if now >= self._quiet_until.get(kind, 0.0):
            self._quiet_until[kind] = now + LOG_SECONDS
            self._logger.warning("%s (%d so far): %s", kind, self.counts[kind], detail)
