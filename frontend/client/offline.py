"""Offline generation: a whole batch of requests, sent no faster than the engine's queue takes them."""

import time
from collections import deque
from collections.abc import Sequence

from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.progress_bars import BatchBar, UseTqdm
from wavecore.transport import forks
from wavecore.transport.errors import Overloaded, WavecoreError

PAUSE_SECONDS = 0.1  # before an overloaded engine is asked again
REFUSED_SECONDS = 60.0  # an engine that takes nothing of ours for so long will not: its refusals are final then
POLL_SECONDS = 0.05


def run_batch(
    service: Service, requests: list[EngineRequest], use_tqdm: UseTqdm, raise_on_error: bool = False
) -> list[RequestOutput]:
    """Send all, never more at a time than the engine's queue takes, and wait for all.

    Returns:
        The final output of each, in order; a request that failed carries its error.

    Raises:
        WavecoreError: the first error, if all failed; with `raise_on_error` if any did, and the others are aborted.
    """
    batch = _Batch(service, requests)
    bar = BatchBar(len(requests), use_tqdm)
    try:
        while len(batch.done) < len(requests):
            batch.send()
            if output := batch.receive():
                if raise_on_error and output.error:
                    raise output.error
                bar.done(output)
    finally:
        for mailbox in batch.running:
            service.client.abort(mailbox)
        bar.close()
    outputs = [batch.done[i] for i in range(len(requests))]
    raise_if_all([choice.error for output in outputs for choice in output.outputs])
    return outputs


def raise_if_all(errors: Sequence[WavecoreError | None]) -> None:
    """Raise the first error of a batch in which all failed; None stands for what did not."""
    if errors and errors[0] and all(errors):
        raise errors[0]


class _Batch:
    def __init__(self, service: Service, requests: list[EngineRequest]) -> None:
        self.running: dict[Mailbox, int] = {}
        self.done: dict[int, RequestOutput] = {}
        self._service = service
        self._requests = requests
        self._waiting = deque(range(len(requests)))
        # Half the engine's queue is left to others.
        self._max_running = max(1, int(service.resolved["max_num_queued_reqs"]) // 2)
        self._pause_until = 0.0
        self._progress = time.monotonic()
        self._notifier = ThreadNotifier()
        forks.tell(self)

    def forked(self) -> None:
        """In the child all that was sent has ended, and word of it may have stayed behind in the parent."""
        self._notifier.notify([*self.running])

    def send(self) -> None:
        while self._waiting and len(self.running) < self._max_running and time.monotonic() >= self._pause_until:
            index = self._waiting.popleft()
            mailbox = self._service.mailbox(self._requests[index], self._notifier, OutputKind.FINAL)
            self.running[mailbox] = index
            self._service.client.submit(mailbox)

    def receive(self) -> RequestOutput | None:
        """The next request that ended; None where there is none yet, or it is to be sent again."""
        mailbox = self._notifier.wait(POLL_SECONDS if self._waiting else None)
        if mailbox is None or (output := mailbox.take()) is None:
            return None
        index = self.running.pop(mailbox)
        if isinstance(output.error, Overloaded):
            if self.running or time.monotonic() - self._progress < REFUSED_SECONDS:
                self._retry_later(index)
                return None
        else:
            self._progress = time.monotonic()
        self.done[index] = output
        return output

    def _retry_later(self, index: int) -> None:
        """Others fill the engine's queue: ask again later, with fewer at a time."""
        self._waiting.appendleft(index)
        self._max_running = max(1, len(self.running))
        self._pause_until = time.monotonic() + PAUSE_SECONDS
