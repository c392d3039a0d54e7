"""How consumers learn that mailboxes hold something: a thread waits at a queue, a task for a future of its
loop, and a server has a function called."""

import asyncio
import contextlib
import queue
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from wavecore.frontend.client.mailbox import Mailbox

STREAMS_A_TURN = 32  # told of in one turn of a loop: hundreds of streams must not hold up whatever else runs in it


class ThreadNotifier:
    """For one waiting thread."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[Mailbox] = queue.SimpleQueue()

    def notify(self, mailboxes: Sequence[Mailbox]) -> bool:
        for mailbox in mailboxes:
            self._ready.put(mailbox)
        return True

    def wait(self, timeout: float | None = None) -> Mailbox | None:
        """The next mailbox that holds something; None after `timeout` seconds."""
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            return None


class LoopNotifier:
    """For the streams of one event loop: one call into the loop a step, however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # waiters keep their loop alive, this must not
        self._watchers: dict[Mailbox, Callable[[Mailbox], object]] = {}

    def watch(self, mailbox: Mailbox, on_news: Callable[[Mailbox], object]) -> None:
        """Have `on_news` called in the loop whenever the mailbox holds something new; it must not raise."""
        self._watchers[mailbox] = on_news

    def news(self, mailbox: Mailbox) -> asyncio.Future[None]:
        """Done once the mailbox holds something new. To be asked for before `take`, each time."""
        future = asyncio.get_running_loop().create_future()
        self.watch(mailbox, partial(_settle, future))
        return future

    def forget(self, mailbox: Mailbox) -> None:
        self._watchers.pop(mailbox, None)

    def notify(self, mailboxes: Sequence[Mailbox]) -> bool:
        loop = self._loop()
        if loop is None or loop.is_closed():  # which closes no generator that is left
            return False
        if mailboxes:
            with contextlib.suppress(RuntimeError):  # closed this moment: seen the next time
                loop.call_soon_threadsafe(self._tell, loop, mailboxes)
        return True

    def _tell(self, loop: asyncio.AbstractEventLoop, mailboxes: Sequence[Mailbox]) -> None:
        if len(mailboxes) > STREAMS_A_TURN:
            loop.call_soon(self._tell, loop, mailboxes[STREAMS_A_TURN:])
        for mailbox in mailboxes[:STREAMS_A_TURN]:
            if (on_news := self._watchers.get(mailbox)) is not None:
                on_news(mailbox)


class LoopNotifiers(weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier]):
    """Of each loop that streams are read in, its notifier."""

    def here(self) -> LoopNotifier:
        """Of the loop that runs."""
        loop = asyncio.get_running_loop()
        if loop not in self:
            self[loop] = LoopNotifier(loop)
        return self[loop]


def _settle(future: asyncio.Future[None], _mailbox: Mailbox) -> None:
    if not future.done():
        future.set_result(None)
