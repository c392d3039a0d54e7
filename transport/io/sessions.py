"""The clients that an engine knows, and how far it has received what each of them sent.

Two threads share this. The output thread alone adds and removes clients: it hears their HELLO, their BYE and their
silence. The input thread looks up who sent a message and counts it as received. No lock is needed: a look-up in a dict
is atomic, every number has one thread that writes it, and a number that is a moment old does no harm. A client may be
removed while the input thread handles a message of it; what it then queues for the main loop is ended there as soon as
its first output finds no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavecore.transport.wire.delivery import Inbox


@dataclass(slots=True)
class ClientInput:
    """What one client sends.

    Attributes:
        max_calls: utility calls that may wait for their answer.
        inbox: the receiving end of its numbered stream; written by the input thread.
        calls: utility calls received, whatever became of them; written by the input thread.
        answered: how many of them were answered; written by the output thread.
    """

    max_calls: int
    inbox: Inbox = field(default_factory=Inbox)
    calls: int = 0
    answered: int = 0

    def count_call(self) -> bool:
        """Count a call. Returns whether it may wait for its answer with the others."""
        self.calls += 1
        return self.calls - self.answered <= self.max_calls


class Sessions:
    """The clients of one life of an engine, by client_id."""

    def __init__(self, epoch: bytes, max_calls: int) -> None:
        self._epoch = epoch
        self._max_calls = max_calls
        self._inputs: dict[bytes, ClientInput] = {}

    def __len__(self) -> int:
        return len(self._inputs)

    def __contains__(self, client_id: bytes) -> bool:
        return client_id in self._inputs

    def find(self, client_id: bytes, epoch: bytes) -> ClientInput | None:
        """What this client sent in this life of the engine; None: no session of it, or another life. Any thread."""
        return self._inputs.get(client_id) if epoch == self._epoch else None

    def add(self, client_id: bytes) -> ClientInput:
        """A new client. Output thread only, and so is `remove`."""
        self._inputs[client_id] = client = ClientInput(self._max_calls)
        return client

    def remove(self, client_id: bytes) -> None:
        del self._inputs[client_id]
