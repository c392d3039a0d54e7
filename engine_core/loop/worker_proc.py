"""A rank above 0 as a process. It has no sockets and no scheduler: it follows the steps of rank 0."""

import logging
import signal
from collections.abc import Callable
from typing import Never

from wavecore.transport.processes.child import SupervisedChild

logger = logging.getLogger(__name__)


def run_worker(follow: Callable[[], Never], device: str, child: SupervisedChild) -> Never:
    """Follow until the supervisor ends this process, or an error does.

    Args:
        follow: does rank 0's steps.
        device: that it does them on, as torch names it.
        child: this process's tie to its supervisor.

    Raises:
        Exception: whatever broke this rank, after the supervisor was told.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service, say: rank 0 drains first
        signal.signal(number, lambda got, _frame: child.pass_on(got))
    child.report_ready({"resolved": {"device": device}})
    try:
        follow()
    except Exception as error:
        cause = child.report_failure(error)
        logger.exception("the engine ends: %s", cause.message)
        raise
