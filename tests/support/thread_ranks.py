"""Ranks of one model as threads of this process: tensor parallelism without processes or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from tests.support.group_memory import make_group
from torch import Tensor

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.models.files import open_model
from wavecore.engine_core.startup.loader import load_runner
from wavecore.engine_core.tensor_parallel.group_runner import GroupRunner
from wavecore.engine_core.tensor_parallel.worker import Worker
from wavecore.parallel.collectives import ALONE, Collectives
from wavecore.parallel.ranks import Ranks
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.step_ring import StepRing

T = TypeVar("T")
SECONDS = 60.0
NO_RECORD = 1 << 15  # which ends a worker


class Board:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.places: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.calls = 0


class ThreadRank(Collectives):
    """One of the threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank, self.size, self.calls = board, rank, len(board.places), 0
        self.fails_at = -1  # the call in which memory runs out

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchange(("sum", x.shape, x.dtype), x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._board.barrier.wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.stack(self._exchange(("gather", x.shape, x.dtype), x))
        self._board.barrier.wait()
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def least(self, value: int) -> int:
        values = self._exchange("least", value)
        self._board.barrier.wait()
        return min(values)

    def _exchange(self, what: object, x: Any) -> list[Any]:
        if self.calls == self.fails_at:
            self.fails_at = -1
            raise torch.OutOfMemoryError("CUDA out of memory, as this test wants")
        self._board.places[self.rank] = what, x
        if self._board.barrier.wait() == 0:
            self._board.calls += 1
        kinds, parts = zip(*self._board.places, strict=True)
        assert len(set(kinds)) == 1, f"the ranks do different things: {kinds}"
        self.calls += what != "least"
        return list(parts)


def load_rank(model: Any, ranks: Ranks, **settings: Any) -> ModelRunner:
    """The runner of one rank."""
    values: dict[str, Any] = {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 4}
    values |= {"num_gpu_blocks_override": 2000, "model": str(model)}
    config = EngineConfig(**{**values, **settings})
    source = open_model(str(Path(model)), lambda _phase, _fraction: None)
    return load_runner(config, source, lambda _phase, _fraction: None, lambda _device: ranks)


class ThreadRanks(GroupRunner):
    """Rank 0 in the caller's thread, a worker in each other one.

    Args:
        peers: of each rank, those in other engines.

    Attributes:
        ranks: the runner of each.
    """

    def __init__(self, model: Any, size: int, peers: Sequence[Collectives] = (), **settings: Any) -> None:
        self.board = Board(size)
        self.collectives = [ThreadRank(self.board, rank) for rank in range(size)]
        self._threads = ThreadPoolExecutor(size)
        ranks = [Ranks(*found) for found in zip(self.collectives, peers or [ALONE] * size, strict=True)]
        self.ranks: list[ModelRunner] = self.on_all(lambda rank: load_rank(model, ranks[rank], **settings))
        self._until = ExitStack()
        shared = make_group(size, self._until)
        super().__init__(self.ranks[0], StepRing(shared[0]), bool(settings.get("check_ranks")))
        self._workers = [self._threads.submit(self._work, rank, shared[rank]) for rank in range(1, size)]

    def on_all(self, call: Callable[[int], T]) -> list[T]:
        """Call it in a thread for each rank, with the rank."""
        return [future.result() for future in [self._threads.submit(call, i) for i in range(len(self.board.places))]]

    def close(self) -> None:
        """End the workers; raises what one of them raised."""
        self._steps.write(NO_RECORD, [])
        with self._until:
            for worker in self._workers:
                worker.result(SECONDS)

    def _work(self, rank: int, memory: GroupMemory) -> None:
        try:
            Worker(self.ranks[rank], StepRing(memory), self.checks).run()
        except ValueError as error:
            if str(NO_RECORD) not in str(error):
                self.board.barrier.abort()
                raise
        except BaseException:
            self.board.barrier.abort()
            raise
