"""Arrays of any size to the device, for what a step brings rarely: prompts, options, embeddings, block copies.

On CUDA they go through a ring of pinned pieces of fixed size, on a stream of their own that never waits for a step. So
the host never does either: a piece is filled again once its copy is done, and the bus is faster than the host fills.
That is safe because an array is written only where no step in flight reads: a slot is given away once the last step
with a row of it is back, and temporaries are the stream's own.

Many small arrays cost the host much as copies of their own, some 60 us each. So the rows of tables that many new
requests bring travel as one array, which a kernel on the same stream takes apart: what it reads is there when it runs,
and is not written again before it is done, by the order of the stream alone.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32

PIECE = 1 << 18  # bytes
PIECES = 16
LARGE = 8  # rows of which fewer fit into a piece gain little by travelling together


class Uploads:
    """The ring of one device. Pieces are shared by small arrays, and large arrays take several.

    Attributes:
        packed: int32 [values of a piece] on the device, for rows that travel together: their places, then their values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._turn = self._used = 0  # the piece being filled, and how far
        self._rows: dict[Tensor, list[tuple[int, I32]]] = {}  # by table; to be sent together
        self._size = 0  # int32 values that they are when packed
        self.packed = torch.empty(PIECE // 4, dtype=torch.int32, device=device)
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(PIECES)]
            self._copied = [torch.cuda.Event() for _ in self._pieces]  # type: ignore[no-untyped-call]

    def write(self, target: Tensor, values: npt.NDArray[Any]) -> None:
        """Queue the copy of the values to a contiguous tensor of as many bytes, which no step in flight reads."""
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        goal = target.view(-1).view(torch.uint8)
        assert len(source) == len(goal)
        if self.stream is None:
            if goal.is_cpu:  # else it has no memory
                goal.numpy()[:] = source
            return
        with torch.cuda.stream(self.stream):
            done = 0
            while done < len(source):
                if self._used == PIECE:
                    self._close_piece()
                if self._used == 0:
                    self._copied[self._turn].synchronize()
                size = min(PIECE - self._used, len(source) - done)
                part = self._pieces[self._turn][self._used : self._used + size]
                part.numpy()[:] = source[done : done + size]
                goal[done : done + size].copy_(part, non_blocking=True)
                self._used += size
                done += size

    def write_row(self, table: Tensor, row: int, values: npt.NDArray[Any]) -> None:
        """Write values of 32 bits to the beginning of a row of a table [rows, width] of such, as `write` does; small
        ones by the next `join`."""
        size = 3 * len(values)  # with their places, of 64 bits
        if size > PIECE // 4 // LARGE:
            self.write(table[row, : len(values)], values)
            return
        if self._size + size > PIECE // 4:
            self._send_rows()
        self._rows.setdefault(table, []).append((row, values.view(np.int32)))
        self._size += size

    def _send_rows(self) -> None:
        """A copy and a launch for each table."""
        for table, entries in self._rows.items():
            width = table.shape[1]
            places = np.concatenate([np.arange(row * width, row * width + len(values)) for row, values in entries])
            count, packed = len(places), (places.view(np.int32), *(values for _, values in entries))
            self.write(self.packed[: 3 * count], np.concatenate(packed))
            with torch.cuda.stream(self.stream):  # without one nothing changes
                index, source = self.packed[: 2 * count].view(torch.int64), self.packed[2 * count : 3 * count]
                table.view(torch.int32).view(-1).index_copy_(0, index, source)
        self._rows.clear()
        self._size = 0

    def join(self) -> None:
        """Let the current stream run on behind everything written so far; the host does not wait."""
        self._send_rows()
        if self._used:
            self._close_piece().wait()

    def new(self, values: npt.NDArray[Any]) -> Tensor:
        """The values in a tensor of their shape and dtype, for what the current stream does next."""
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        with torch.cuda.stream(self.stream):
            target = torch.empty(values.shape, dtype=dtype, device=self.device)
        self.write(target, values)
        if self.stream is not None:
            self.join()
            target.record_stream(torch.cuda.current_stream(self.device))
        return target

    def _close_piece(self) -> torch.cuda.Event:
        """The event behind the copies of the piece that was being filled; the next one is begun."""
        event = self._copied[self._turn]
        event.record(self.stream)
        self._turn, self._used = (self._turn + 1) % PIECES, 0
        return event
