"""Engines that share the experts of a real model, as threads of this process; each of one rank or several."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.group_memory import make_group
from tests.support.model_engine import SETTINGS, ModelEngine
from tests.support.thread_ranks import SECONDS, Board, ThreadRank, ThreadRanks, load_rank

from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.loop.dp_proc import DPEngineCore
from wavecore.parallel.collectives import ALONE
from wavecore.parallel.ranks import Ranks
from wavecore.transport.processes.votes import VoteBoard


class ThreadEngines:
    """Args:
        engines, ranks: how many, and of each.

    Attributes:
        engines: in lockstep, where they are several.
        runners: of each engine's ranks.
    """

    def __init__(self, model: Path, engines: int, ranks: int, until: ExitStack, **settings: Any) -> None:
        values = {**SETTINGS, "data_parallel_size": engines, "tensor_parallel_size": ranks, **settings}
        values["enable_expert_parallel"] = True
        self._boards = [Board(engines) for _ in range(ranks)]
        self._threads = until.enter_context(ThreadPoolExecutor(engines))

        def load(engine: int) -> Any:
            peers = [ThreadRank(board, engine) if engines > 1 else ALONE for board in self._boards]
            if ranks == 1:
                return load_rank(model, Ranks(data=peers[0]), **values)
            return ThreadRanks(model, ranks, peers, **values)

        found = list(self._threads.map(load, range(engines)))
        until.callback(lambda: [each.close() for each in found if isinstance(each, ThreadRanks)])
        self.runners: list[list[ModelRunner]] = [[f] if isinstance(f, ModelRunner) else f.ranks for f in found]
        boards = [VoteBoard(group) if engines > 1 else None for group in make_group(engines, until)]
        self.engines = [ModelEngine(model, runner=r, board=b, **values) for r, b in zip(found, boards, strict=True)]

    def run(self) -> None:
        """Until all requests have ended, and all engines have voted so."""
        is_over = threading.Event()
        loops = [self._threads.submit(self._loop, engine, is_over) for engine in self.engines]
        deadline = time.monotonic() + SECONDS
        try:
            while any(self._is_busy(engine) for engine in self.engines) and not any(loop.done() for loop in loops):
                assert time.monotonic() < deadline, "the engines do not come to an end"
                time.sleep(0.001)
        finally:
            is_over.set()
        errors = [error for loop in loops if (error := loop.exception(SECONDS))]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))  # which tells of another's
        if errors:
            raise errors[0]

    def _is_busy(self, engine: ModelEngine) -> bool:
        core = engine.core
        return core.has_work or (isinstance(core, DPEngineCore) and core.wave.running)

    def _loop(self, engine: ModelEngine, is_over: threading.Event) -> None:
        try:
            while not is_over.wait(0.0 if engine.core.has_work else 0.001):
                if engine.core.has_work:
                    engine.step()
        except BaseException:
            for board in self._boards:
                board.barrier.abort()
            raise


@contextmanager
def thread_engines(model: Path, engines: int, ranks: int, **settings: Any) -> Iterator[ThreadEngines]:
    with ExitStack() as until:
        yield ThreadEngines(model, engines, ranks, until, **settings)
