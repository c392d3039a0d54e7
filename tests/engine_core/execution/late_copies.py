"""A device whose copies happen late: what CUDA does to pinned memory that is written again too early, on a CPU.

`Tensor.copy_` with non_blocking=True only queues; the queue runs as far as an event when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecore.engine_core.execution import pinned_copies, uploads


class LateDevice:
    """One stream of copies, and of the kernel that takes packed rows apart.

    Attributes:
        waits: how often the host waited for a copy that was not done yet.
        joined: the end of the queue's part that the stream of the steps waits for, each time that it does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[tuple[Callable[..., object], tuple[Any, ...]]] = []  # with arguments
        self.done = self.waits = 0
        self.joined: list[int] = []
        copy = Tensor.copy_

        def late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(target, source)
            self.queue.append((copy, (target, source)))
            return target

        index_copy = Tensor.index_copy_
        monkeypatch.setattr(Tensor, "index_copy_", lambda *args: self.queue.append((index_copy, args)))
        monkeypatch.setattr(Tensor, "copy_", late)
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())

    def run(self, end: int) -> None:
        """Copies up to the end-th happen."""
        for do, args in self.queue[self.done : end]:
            do(*args)
        self.done = max(self.done, end)

    def step_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`CopyIn` and `CopyOut` that are made from here on are this device's."""
        monkeypatch.setattr(pinned_copies, "_ring", lambda v: [v.clone() for _ in range(pinned_copies.DEPTH)])
        monkeypatch.setattr(pinned_copies, "_events", lambda _: [LateEvent(self) for _ in range(pinned_copies.DEPTH)])

    def uploads(self, piece: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> uploads.Uploads:
        monkeypatch.setattr(uploads, "PIECE", piece)
        monkeypatch.setattr(uploads, "PIECES", pieces)
        made: Any = uploads.Uploads(torch.device("cpu"))
        made.stream = object()
        made._pieces = [torch.zeros(piece, dtype=torch.uint8) for _ in range(pieces)]
        made._copied = [LateEvent(self) for _ in range(pieces)]
        return made  # type: ignore[no-any-return]


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.at = 0

    def record(self, _stream: object = None) -> None:
        self.at = len(self.device.queue)

    def synchronize(self) -> None:
        self.device.waits += self.device.done < self.at
        self.device.run(self.at)

    def wait(self) -> None:
        """The stream of the steps waits, not the host."""
        self.device.joined.append(self.at)
