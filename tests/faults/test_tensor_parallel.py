"""One rank of a real model fails, in each phase and way; a group of two processes over gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.rank_faults import SAYS, Fault, environment_of_ranks
from tests.support.waiting import until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, WavecoreError
from wavecore.transport.processes.supervisor import Limits, Supervisor

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 40}
SETTINGS |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 250, "swap_space_gib": 0.01}
RUN, WAIT = ([{"prompt_token_ids": prompt} for prompt in prompts(n, seed=n)] for n in (4, 2))  # as many as slots, more
LONG, SHORT = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (180, 8))
START = [Fault(rank, place, does) for place, does, rank in product(("load", "kv_cache"), SAYS, (0, 1))]
SERVE = [Fault(rank, place, does) for place, does, rank in product(("step", "swap"), SAYS, (0, 1))]
FAST = [Fault(1, "load", "kill"), Fault(0, "step", "raise")]
SLOW_START, SLOW_SERVE = ([fault for fault in faults if fault not in FAST] for faults in (START, SERVE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_config("Qwen3", num_attention_heads=4))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the next fault is to be written."""
    for name, value in environment_of_ranks(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "fault"


@contextmanager
def supervised(model: Path, **limits: float) -> Iterator[Supervisor]:
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, tensor_parallel_size=2, **SETTINGS)
    supervisor = make_supervisor(config, Limits(drain=5, idle=1.0, grace=5, **limits))
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


@pytest.mark.parametrize("fault", [FAST[0], *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_START)], ids=str)
def test_rank_that_fails_to_start(model: Path, file: Path, fault: Fault) -> None:
    """A rank raises, is killed or is stopped while it loads its share of the model or makes its KV cache.

    The start fails within a second, or five where it is stopped, and says which rank it was, why, and in which phase.
    A rank that hangs is named when `ready_timeout` has passed, and not those that wait for it.
    """
    fault.write(file)
    hangs = fault.does == "hang"
    says = r"was not ready after 15 s \(phase" if hangs else SAYS[fault.does] + r".*\(while"
    with (
        pytest.raises(WavecoreError, match=rf"rank {fault.rank}\b.*{says}: {fault.place}\)"),
        supervised(model, ready=15 if hangs else 60),
    ):
        pass


@pytest.mark.parametrize(
    "faults",
    [FAST[1:], pytest.param(SLOW_SERVE, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["one", "all others"],
)
def test_rank_that_fails_in_a_step(model: Path, file: Path, faults: list[Fault]) -> None:
    """A rank raises, is killed, stopped or hangs in the middle of a step, or where it copies blocks to the host.

    Streams that have begun hear which rank it was and why, within a second, or five where it is stuck. The group starts
    again, with new processes, and requests without a token go on there and get the right ones.
    """
    with supervised(model) as supervisor, LLM.connect(supervisor.runtime_dir) as llm, ThreadPoolExecutor(1) as beside:

        def short() -> list[list[int]]:
            return [list(output.outputs[0].token_ids) for output in llm.generate(WAIT, SHORT, use_tqdm=False)]

        expected = short()
        for fault in faults:
            before = supervisor.deployment().engines[0]
            begun = [llm.stream(prompt, LONG) for prompt in RUN]
            for stream in begun:
                next(stream)
            waiting = beside.submit(short)
            until(lambda: len(llm.debug_requests()) == len(RUN + WAIT), "all to be there")
            fault.write(file)
            until(lambda: not file.exists(), f"{fault} to happen")
            began = time.monotonic()
            for stream in begun:
                with pytest.raises(EngineDead, match=rf"rank {fault.rank}\b.*{SAYS[fault.does]}.*\(while: serve\)"):
                    for _ in stream:
                        pass
            print(f"{fault}: heard after {time.monotonic() - began:.2f} s")
            assert waiting.result() == expected
            after = until(lambda: (now := supervisor.deployment().engines[0]).state == "ready" and now, "ready")
            assert after.restarts == before.restarts + 1
            assert not any(psutil.pid_exists(rank.pid) for rank in before.ranks)
