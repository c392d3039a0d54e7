"""A TCP proxy that can break its connections: a reset loses whatever is in flight, with both ends alive. Or be slow,
lose bytes or bring them twice, refuse everybody, or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator


class Proxy:
    """Forwards a port to another. `reset` may be called by any thread.

    Args:
        host: whose port is to be reached.
        own: address to listen at.

    Attributes:
        rate: bytes a second in each direction.
        delay: seconds that bytes are on their way.
        change: what becomes of the bytes of one read.
        is_cut: connections that come are refused.
        up_bytes, down_bytes: forwarded to the port and from it.
    """

    def __init__(self, target_port: int, host: str = "127.0.0.1", own: str = "127.0.0.1") -> None:
        self._target, self._own = (host, target_port), own
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.rate = math.inf
        self.delay = 0.0
        self.change: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self.is_cut = False
        self.up_bytes = self.down_bytes = 0
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="proxy")
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self._own, 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self.is_cut:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._copy(reader, far_writer, True), self._copy(far_reader, writer, False))
        self._writers -= {writer, far_writer}
        self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        try:
            while data := await reader.read(65536):
                if self.rate < math.inf:
                    await asyncio.sleep(len(data) / self.rate)
                for part in self.change(data):
                    if self.delay:
                        self._loop.call_later(self.delay, writer.write, part)
                    else:
                        writer.write(part)
                await writer.drain()
                if up:
                    self.up_bytes += len(data)
                else:
                    self.down_bytes += len(data)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    def cut(self) -> None:
        """Break every connection, and refuse those that come, until `mend`."""
        self.is_cut = True
        self.reset()

    def mend(self) -> None:
        self.is_cut = False

    def reset(self) -> None:
        """Break every connection on both sides, without a FIN."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._reset)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def breaking(proxy: Proxy) -> Iterator[Callable[[], bool]]:
    """Its connections break five times, 0.15 s apart. What is inside hears whether more of that is to come."""
    over = threading.Event()

    def disturb() -> None:
        for _ in range(5):
            if over.wait(0.15):
                return
            proxy.reset()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        yield disturbing.is_alive
    finally:
        over.set()
        disturbing.join()
