"""A rank above 0 as a process. It has no sockets and no scheduler: it follows the steps of rank 0."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Never

from wavecore.transport.processes.child import SupervisedChild

logger = logging.getLogger(__name__)


class WorkerProc:
    """`run` follows until the supervisor ends this process, or an error does.

    Args:
        follow: does rank 0's steps.
        device: that it does them on, as torch names it.
        child: this process's tie to its supervisor.
    """

    def __init__(self, follow: Callable[[], Never], device: str, child: SupervisedChild) -> None:
        self._follow, self._device, self._child = follow, device, child

    def run(self) -> Never:
        """Raises:
        Exception: whatever broke this rank, after the supervisor was told.
        """
        for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service, say: rank 0 drains first
            signal.signal(number, signal.SIG_IGN)
        self._child.report_ready({"resolved": {"device": self._device}})
        try:
            self._follow()
        except Exception as error:
            cause = self._child.report_failure(error)
            logger.exception("the engine ends: %s", cause.message)
            raise
