"""CUDA graphs of parts of steps: captured between steps while the engine serves, and replayed instead of run.

A part is a function of the runner and its arguments, of which there are few: a bucket, or how rows are sampled. All
that it reads and writes lies at one address for the engine's life, so nothing but these arguments tells one step from
another. A part without a graph is run, and counted; `capture` makes the graph of the one that is used most. Graphs
share one pool of memory: they run one after the other, and nothing in it outlives a replay.
"""

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch

from wavecore.engine_core.execution.out_of_memory import first_line

logger = logging.getLogger(__name__)
Part = tuple[Callable[..., object], tuple[Any, ...]]
PIECE = 2 << 20  # bytes that the driver takes at once
FRAGMENTS = 1.5
"""What the pool grows to, by what it took for some graphs: captured in any order they share it less well."""


class StepGraphs:
    """The graphs of one device.

    Args:
        device: without CUDA every part is run.

    Attributes:
        most: graphs that there may be at once; 0 captures none.
        room: bytes of the reserve that graphs have not taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.room = device, 0, 0
        self._pool: Any = None
        self._graphs: dict[Part, torch.cuda.CUDAGraph | None] = {}  # None: the capture failed
        self._uses: Counter[Part] = Counter()  # of parts without a graph
        self._broken: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._stream = _capture_stream(device)
            zeros = partial(torch.zeros, device=device)
            self._first = self._captured((zeros, (1,)))  # stays: a pool ends with its last graph
            self._pool = self._first.pool()

    def run(self, function: Callable[..., object], *args: Any) -> None:
        """Replay the graph of function(*args), or call it."""
        part = function, args
        graph = self._graphs.get(part)
        if graph is not None:
            graph.replay()
            return
        self.want(part)
        function(*args)

    def want(self, *parts: Part) -> None:
        """Count a use of each of these that has no graph."""
        self._uses.update(part for part in parts if self.most and part not in self._graphs)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs inside makes no graph wanted."""
        uses, self._uses = self._uses, Counter()
        try:
            yield
        finally:
            self._uses = uses

    def wanted(self, uses: int) -> bool:
        """Some part without a graph ran so often, and there is room for its graph."""
        return bool(self._uses) and len(self._graphs) < self.most and max(self._uses.values()) >= uses

    def capture(self, least: Callable[[int], int] = int, shared: Callable[..., object] | None = None) -> None:
        """Make the graph of the part that ran most often. Where that fails, the part is run as before. No other is
        tried where a capture broke, as it does when something waits for the device meanwhile, and where the reserve of
        memory is used up.

        Args:
            least: of all ranks' numbers. What ranks do together is replayed by all of them or by none.
            shared: the function whose parts all ranks run equally often, though not all have the same others: its parts
                go first, so that all ranks choose the same one.
        """
        part = max(self._uses, key=lambda part: (part[0] == shared, self._uses[part]), default=None)
        if self.most and part is not None:
            del self._uses[part]
            before = self._taken()
            self._graphs[part] = self._tried(part)
            self.room -= _growth(before, self._taken())
        if not least(part is None or self._graphs.get(part) is not None) and part is not None:
            self._graphs[part] = None
        if not least(self._broken is None and self.room > 0) and self.most:
            self.most = 0
            if self.room <= 0:
                logger.warning("%d CUDA graphs took the memory reserved for them: no more are made", len(self._graphs))

    def _tried(self, part: Part) -> torch.cuda.CUDAGraph | None:
        try:
            return self._captured(part)
        except Exception as error:
            name, args = part[0].__name__, part[1]
            reason = first_line(error.__context__ or error)  # at the end of a broken capture it says only that
            logger.warning("no CUDA graph of %s%s, which runs without one: %s", name, args, reason)
            return None

    def clear(self) -> None:
        """Forget all graphs, since something that they read or write has moved."""
        self._graphs.clear()

    def reserve(self, *kinds: Sequence[Part]) -> int:
        """Make room for the graphs of all these parts, and begin to count which are wanted.

        How much all graphs take is estimated. That they take no more `capture` sees to: it ends when that is taken, and
        what the last one takes beyond is reserved as well.

        Args:
            kinds: parts of one function each, the largest first. Some are run, captured, and thrown away.

        Returns:
            Bytes that graphs take at most. Some of them the pool has taken already, to stay.

        Raises:
            torch.OutOfMemoryError, RuntimeError: there is no room for them.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        for parts in kinds:
            for function, args in parts[::16]:
                function(*args)  # which loads its kernels
        torch.cuda.synchronize(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        largest = 0
        for parts in kinds:
            for part in parts[::16]:
                before = self._taken()
                self._captured(part)
                largest = max(largest, _growth(before, self._taken()))
        pool = torch.cuda.memory_reserved(self.device) - reserved
        self.most = sum(map(len, kinds))
        self.room = int((FRAGMENTS - 1) * pool) + sum(len(parts) * self._driver_bytes(parts[0]) for parts in kinds)
        return pool + self.room + largest

    def _driver_bytes(self, part: Part) -> int:
        """What the driver takes for a graph. It takes pieces that hold several, so it is measured from the graph that
        began one to the last; too large by less than a piece."""
        graphs: list[torch.cuda.CUDAGraph] = []
        grown: list[int] = []  # by each graph since the driver first took a piece
        pieces = 0
        while pieces < 3 and len(graphs) < 80:
            before = self._taken()[1]
            graphs.append(self._captured(part))
            growth = self._taken()[1] - before
            if grown or growth > 0:
                grown.append(min(max(growth, 0), 2 * PIECE))
                pieces += growth > 0
        return sum(grown) // max(len(grown), 1)

    def _taken(self) -> tuple[int, int]:
        """Bytes of the device that torch's allocator has, and that are not free besides."""
        reserved = torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return reserved, total - free - reserved

    def _captured(self, part: Part) -> torch.cuda.CUDAGraph:
        """Not by `torch.cuda.graph`, which waits for the device and gives back all cached memory."""
        function, args = part
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                function(*args)
            except BaseException:
                with warnings.catch_warnings(action="ignore"):  # that the graph is empty
                    self._end(graph)
                raise
            self._end(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Where a capture broke, torch goes on to hold back memory for it, and looks at the graph when it allocates.
            self._broken = graph
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            raise


def _growth(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Bytes that a capture took, of `StepGraphs._taken`. What other processes took meanwhile counts as two pieces."""
    pool, driver = after[0] - before[0], after[1] - before[1]
    return max(pool, 0) + min(max(driver, 0), 2 * PIECE)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process. cuBLAS takes its workspace of a stream with the first product, here and not in
    the pool of some graphs, with which it would go."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        x = torch.zeros((16, 16), device=device)
        torch.mm(x, x)
    return stream
