"""The link between ranks of one group on several hosts: the group's life, and what torch's rendezvous keeps.

    rank 0, the head     ROUTER, binds       <-- tcp with CURVE -->       DEALER of each other rank

Only who has the servers' key (`keys/server.key`, the same on all hosts) may connect; a client's key does not do.

*Lives.* A life of the group begins when all ranks have joined one process of the head. It ends for all of them when one
says why it fails, is silent for SILENT_SECONDS, or joins anew, since its last process must have ended then. Every
message carries the life, and whoever comes with another one is told that it is over, and ends. So each host's
supervisor starts its own ranks again, and they meet in the next life; nothing of an old one is ever counted.

*Threads.* A message from one thread to another costs more than the network between two hosts. So the main loop sends by
itself, and reads what comes while it sleeps or waits (`GroupMemory.attend`); the link's thread reads when it does not.
The socket and all that the link knows belong to who holds the lock.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from wavecore.transport.addresses import host_of
from wavecore.transport.curve import CurveClient, CurveServer
from wavecore.transport.errors import (
    ConfigError,
    EngineDead,
    ProtocolError,
    StartError,
    WavecoreError,
    as_wavecore_error,
    from_code,
)
from wavecore.transport.io.bound_thread import BoundThread
from wavecore.transport.io.io_thread import IoThreadFailed
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ELSEWHERE
from wavecore.transport.wire.codec import Frames, decode, encode
from wavecore.transport.wire.messages import Bye, Dead, Join, Message, Ping, Ready, Result, Utility

SILENT_SECONDS = 10.0
TELL_SECONDS = 30.0  # between two lines in the log about ranks that are waited for
MAX_LAST_WORDS = 4096
NO_LIFE = bytes(16)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is among those of all hosts.

    Attributes:
        address: of the head, "tcp://HOST:PORT".
        host: this one's, for people.
        rank, ranks: this one, and how many there are.
        engine_ranks: of each engine; the first of them votes.
        kind: what must be the same text on all hosts.
    """

    address: str
    host: str
    rank: int
    ranks: int
    engine_ranks: int = 1
    kind: str = ""

    @property
    def voters(self) -> range:
        return range(0, self.ranks, self.engine_ranks)


@dataclass(slots=True)
class _Member:
    """Another rank, as this one knows it; `identity` names its process."""

    identity: bytes
    host: str
    silent_ticks: int = 0
    has_left: bool = False


class PeersOnly(CurveServer):
    """Admits those alone who hold the secret key of the servers."""

    def allowed(self) -> set[bytes]:
        return {self.pair.public}


class HostLink(BoundThread):
    """One rank's end. What it carries besides is up to the class that extends this one: `_on_message`, `_repeat`. All
    methods but those of the thread may be called by any.

    Args:
        place: of this rank.
        keys_dir: with `server.key`.
        memory: its bell rings when something came.
        local: the ranks of this host.
        on_over: called when the group's life is over, by who reads so, with the lock; or when a bug ends the thread.

    Attributes:
        place: of this rank.
        life: 16 random bytes that name it; NO_LIFE until all ranks have met.

    Raises:
        ConfigError: the key cannot be used.
        ResourceError, StartError: the head cannot listen at its address.
    """

    tick_seconds = 0.5
    flush_seconds = 5.0

    def __init__(
        self,
        place: RankPlace,
        keys_dir: Path,
        memory: GroupMemory,
        local: range,
        on_over: Callable[[WavecoreError], object],
    ) -> None:
        pair = CurveServer.load(keys_dir).pair
        self._is_head, self._identity, self._lock = place.rank == 0, os.urandom(16), threading.Lock()
        kind, curve = (
            (zmq.ROUTER, PeersOnly(pair, keys_dir)) if self._is_head else (zmq.DEALER, CurveClient(pair.public, pair))
        )
        super().__init__("host link", kind, place.address, curve, self._on_bug, self._identity)
        self.place, self._memory, self._local, self._on_over = place, memory, local, on_over
        self.life = NO_LIFE
        self._members: dict[int, _Member] = {} if self._is_head else {0: _Member(b"", host_of(place.address))}
        self._values: dict[str, bytes] = {}  # of the rendezvous, at the head
        self._asked: dict[int, tuple[Utility, Future[Any]]] = {}
        self._error: WavecoreError | None = None
        self._awaited: Container[int] = ()  # those whose leave this rank awaits when it leaves
        self._waits = self._attended = False
        # libzmq lets nobody use a socket that another thread polls, so the thread polls its descriptor. That one tells
        # of changes alone: whoever has used the socket reads until nothing is left (`_turn_of`).
        self._poller.unregister(self._socket)
        self._fd = int(self._socket.FD)
        self._watch(True)
        memory.attend(self._fd, self._attend)
        self.start()
        self._call_soon(self._tick)

    def meet(self, seconds: float) -> None:
        """Wait until all ranks have joined.

        Raises:
            StartError: some did not within that time.
            ConfigError: the head is of another kind.
        """
        until, tell_at = time.monotonic() + seconds, time.monotonic() + self.tick_seconds * 4
        while self.life == NO_LIFE:
            self._check()
            now = time.monotonic()
            who = self._absent()
            if now >= until:
                raise StartError(f"{who} did not join within {seconds:g} s; are all hosts started, with the same keys?")
            if now >= tell_at:
                logger.warning("%s waits for %s", self._name(self.place.rank), who)
                tell_at = now + TELL_SECONDS
            self._sleep_until(lambda: self.life != NO_LIFE, self.place.ranks, self.tick_seconds)

    def wait_for(self, rank: int | None) -> None:
        """Tell the supervisor which rank this one waits for. One of another host is this link's to watch."""
        self._waits = rank is not None
        local = None if rank is None else rank - self._local.start
        self._memory.progress.wait_for(local if rank is None or rank in self._local else ELSEWHERE)

    def ask(self, method: str, args: Mapping[str, Any], seconds: float) -> Any:
        """Call one of the head's methods for a rendezvous (`_do`), whose effect is the same when it is made twice.

        Raises:
            EngineDead: the group's life is over.
            TimeoutError: no answer within that time.
        """
        found: Future[Any] = Future()
        with self._turn_of():
            self._ask(method, dict(args), found)
        self._call_soon(lambda: self._watch(True))  # this thread does not read while it waits here
        return found.result(seconds)

    def conclude(self, error: BaseException) -> BaseException:
        """What ends this rank: this error, of which the other ranks are told; or what the link knows, or will know in a
        moment where the error may only show that a rank of another host is gone."""
        until = time.monotonic() + SILENT_SECONDS + 2 * self.tick_seconds
        while self._error is None and self._waits and time.monotonic() < until:
            time.sleep(self.tick_seconds / 10)
        if self._error is None:
            text = f"{self._name(self.place.rank)}: {as_wavecore_error(error)}"
            with self._turn_of():
                self._end(EngineDead(text), tells=False)
            return error
        return self._error

    def pass_on(self, number: int) -> None:
        """A signal to stop came to a worker."""

    def introduce(self, ready: dict[str, Any]) -> dict[str, Any]:
        """Of what a rank would tell its supervisor when it is ready, what it tells."""
        return ready

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _sleep_until(self, is_so: Callable[[], bool], rank: int | None, seconds: float | None = None) -> None:
        if not is_so():
            self.wait_for(rank)
            self._memory.sleep(lambda: is_so() or self._error is not None, seconds)
            self.wait_for(None)

    @contextlib.contextmanager
    def _turn_of(self) -> Iterator[None]:
        """This thread's turn with the socket."""
        with self._lock:
            yield
            self._read()

    def _attend(self) -> None:
        """The main loop sleeps, and something came."""
        self._attended = True
        with self._turn_of():
            pass

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _turn(self, ready: Mapping[Any, int]) -> None:
        if self._fd in ready:
            with self._turn_of():
                pass

    def _watch(self, watches: bool) -> None:
        self._poller.register(self._fd, zmq.POLLIN if watches else 0)

    def _read(self) -> None:
        while not self._socket.closed and int(self._socket.EVENTS) & zmq.POLLIN:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            identity = frames.pop(0) if self._is_head else b""
            try:
                self._take(identity, decode(frames))
            except ProtocolError as error:
                self._complaints.add("bad frame on the link between hosts", error)

    def _take(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Join) and self._is_head:
            self._join(identity, message)
            return
        rank = next((rank for rank, member in self._members.items() if member.identity == identity), None)
        epoch = getattr(message, "epoch", NO_LIFE)
        if rank is None or epoch not in (self.life, NO_LIFE):
            if self._is_head:
                text = f"{self._name(0)} is in another life of the group; this one is over"
                self._send_to(identity, encode(Dead(epoch, EngineDead.code, text, "serve")))
            elif isinstance(message, Ready) and self.life == NO_LIFE:
                self._met(message.epoch)
            return
        member = self._members[rank]
        member.silent_ticks = 0
        match message:
            case Utility() if self._is_head:
                self._send(rank, Result(self.life, 0, message.call, "", "", self._do(message.method, message.args)))
            case Result() if message.call in self._asked:
                self._asked.pop(message.call)[1].set_result(message.value)
            case Dead():
                self._end(from_code(message.code, message.message))
            case Bye():
                member.has_left = True
                self._wake()
            case _:
                self._on_message(rank, message)

    def _on_message(self, rank: int, message: Message) -> None:
        """Of that rank, in this life."""

    def _join(self, identity: bytes, join: Join) -> None:
        own = self.place
        if join.kind != own.kind or join.rank not in range(1, own.ranks):
            text = f"rank {join.rank} on {join.host} and {self._name(0)} are no group: {join.kind} -- and {own.kind}"
            self._send_to(identity, encode(Dead(NO_LIFE, ConfigError.code, text, "start")))
            return
        known = self._members.get(join.rank)
        if known is None or known.identity != identity:
            self._members[join.rank] = _Member(identity, join.host)
            if self.life != NO_LIFE:
                text = "joins anew: its last process ended, or two processes have this rank"
                self._end(EngineDead(f"{self._name(join.rank)} {text}"))
            elif len(self._members) == own.ranks - 1:
                self._met(self._identity)
                for rank in self._members:
                    self._send(rank, Ready(self.life, {}))
        elif self.life != NO_LIFE and self._error is None:
            self._send(join.rank, Ready(self.life, {}))

    def _met(self, life: bytes) -> None:
        self.life = life
        self._wake()

    def _wake(self) -> None:
        """Something came that the main loop may wait for, and it is not the main loop that reads."""
        if threading.current_thread() is not threading.main_thread():
            self._memory.ring(self._memory.rank)

    def _tick(self) -> None:
        with self._turn_of():
            self._watch(not self._attended)
            self._attended = False
            if self._error is None:
                self._say()

    def _say(self) -> None:
        """What is said again and again: to be there, and what may have been lost."""
        own = self.place
        if self.life == NO_LIFE:
            if not self._is_head:
                self._send(0, Join(own.rank, own.host, own.kind))
            return
        self._repeat()
        for call, _ in self._asked.values():
            self._send(0, call)
        for rank, member in self._members.items():
            self._send(rank, self._ping())
            # Ticks, not seconds: who was stopped itself does not blame the others for it.
            member.silent_ticks += 1
            if member.silent_ticks * self.tick_seconds > SILENT_SECONDS and not self._is_ending:
                text = f"was silent for {SILENT_SECONDS:g} s: the network between it and {own.host} is broken, or it is"
                self._end(EngineDead(f"{self._name(rank)} {text} stopped or gone"))
                return

    def _repeat(self) -> None:
        """Say again what may have been lost."""

    def _ping(self) -> Ping:
        return Ping(self.life, 0)

    def _ask(self, method: str, args: dict[str, Any], found: Future[Any]) -> None:
        if self._error is not None:
            found.set_exception(self._error)
        elif self._is_head:
            found.set_result(self._do(method, args))
        else:
            call = Utility(self.life, self._identity, 0, next(self._numbers), method, args)
            self._asked[call.call] = call, found
            self._send(0, call)

    def _do(self, method: str, args: Mapping[str, Any]) -> Any:
        """What a rendezvous asks of the head."""
        key, value = str(args.get("key")), args.get("value")
        if method == "set" and isinstance(value, bytes):
            self._values[key] = value
        return self._values.get(key)

    def _end(self, error: WavecoreError, tells: bool = True) -> None:
        """The group's life is over: for the others as well."""
        if self._error is not None:
            return
        self._error = error
        text = str(error).encode(errors="replace").decode()[:MAX_LAST_WORDS]
        for rank in self._members:
            self._send(rank, Dead(self.life, error.code, text, "serve"))
        for _, found in self._asked.values():
            found.set_exception(error)
        self._asked.clear()
        self._wake()
        if tells:
            self._on_over(error)

    def _on_bug(self, failed: IoThreadFailed) -> None:
        self._error = self._error or WavecoreError(f"the {failed.thread} failed: {failed.error}")
        self._on_over(self._error)

    def _is_flushed(self) -> bool:
        """It answers the others until they leave, too, or for `flush_seconds`."""
        with self._turn_of():
            self._watch(True)
            if self._error is not None or self.life == NO_LIFE:
                return True
            for rank in self._members:
                self._send(rank, Bye(self.life))
            return all(member.has_left for rank, member in self._members.items() if rank in self._awaited)

    def _release(self) -> None:
        with self._lock:  # the main loop may be at the socket when a bug ends this thread
            super()._release()

    def _send(self, rank: int, message: Message) -> None:
        self._send_to(self._members[rank].identity, encode(message))

    def _send_to(self, identity: bytes, frames: Frames) -> bool:
        """Whether it left; where it did not, or is lost on its way, what matters is said again."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart([identity, *frames] if self._is_head else frames, zmq.NOBLOCK)
            return True
        return False

    def _name(self, rank: int) -> str:
        own = rank == self.place.rank
        host = self.place.host if own else self._members[rank].host
        return f"rank {rank} on {host}"

    def _absent(self) -> str:
        if not self._is_head:
            return f"{self._name(0)}, or one that it waits for,"
        return "rank " + ", ".join(str(rank) for rank in range(1, self.place.ranks) if rank not in self._members)
