"""One of two engines that share the experts of a model, for test_waves.py. The first has requests and the other none;
each says in JSON what it ran.

    python wave_rank.py RANK MODEL DEVICE MEMORY_FD STORE_FD BELL_FD BELL_FD
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.checkpoints import prompts
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.loop.dp_proc import DPEngineCore
from wavecore.engine_core.startup.factory import make_runner
from wavecore.parallel.wave import Wish
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.processes.votes import VoteBoard

SECONDS = 150
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ASKED = prompts(5, longest=12, seed=2)
TURNS = 4
SETTINGS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "dtype": "float32"}
SETTINGS |= {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 256, "block_size": 16}


def main(rank: int, model: str, device: str, *fds: int) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a kernel that waits for ever ends with its process
    memory, store, *bells = fds
    group = GroupMemory(rank, memory, store, bells, ProgressPage(ProgressPage.create_fd()))
    settings = {**SETTINGS, "device": device}
    runner: Any = make_runner(EngineConfig(model=model, **settings), lambda _phase, _fraction: None, group)
    engine = ModelEngine(model, runner=runner, board=VoteBoard(group), **settings)
    core, run, passes = engine.core, runner.graphs.run, list[bool]()
    assert isinstance(core, DPEngineCore)

    def logged(function: Callable[..., object], *args: Any) -> None:
        if function == runner.forward:
            passes.append(runner.graphs._graphs.get((function, args)) is not None)
        run(function, *args)

    def work(is_over: Callable[[], bool]) -> None:
        while not is_over():
            if core.has_work:
                engine.step()
            else:
                group.sleep_until(lambda: core.has_work, seconds=0.01)

    runner.graphs.run = logged
    for _ in range(TURNS if rank == 0 else 0):
        for prompt in ASKED:
            engine.add(prompt, GREEDY)
        work(lambda: not (core.has_work or core.wave.running or runner.wants_capture(1)))
    if rank == 0:
        core.wave.ask(Wish.LEAVE)
    work(lambda: core.wave.left)
    said = {
        "rank": rank,
        "replayed": passes,
        "dummies": core.requests.totals.dummy_steps,
        "written": int(runner.kv_cache.count_nonzero()),
        "weights": sum(tensor.nbytes for tensor in runner.model.parameters.values()),
        "tokens": [output.tokens for output in engine.outputs.values()],
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
