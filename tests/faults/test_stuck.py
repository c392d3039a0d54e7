"""An engine that lives but does not move, and engines that only look like it."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import psutil
import pytest
from tests.faults.conftest import right_answer

import wavecore
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes.supervisor import Limits

QUICK = Limits(ready=60, drain=5, step=60, idle=0.4, grace=5)


def test_hanging_step(deploy: Any) -> None:
    """A step hangs: the engine has work and nothing moves for four to five seconds.

    The stacks of all its threads go into the log, it is ended and restarted; its streams get `EngineDead` that says so.
    """
    with deploy({"faults": {"hang_at_step": 5}, "step_seconds": 0.01}, limits=QUICK) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 100)
        assert stream.first.wait(30)
        deployed.heal()
        assert isinstance(stream.error, EngineDead)
        assert "every thread sleeps" in str(stream.error)
        stream.check_prefix()
        cause = deployed.cause_of(before.epoch)
        assert cause.code == "stuck"
        assert any("scripted_runner.py" in line for line in cause.log_tail), "the stack of the main thread"
        assert any("io_thread.py" in line for line in cause.log_tail), "and of the others"
        deployed.recovered(before.epoch)
        deployed.check_serving()


def test_stopped_engine(deploy: Any) -> None:
    """The engine process is stopped (SIGSTOP, a debugger) and does not come back.

    Within five seconds it counts as stuck: it is ended and restarted, and its streams say why.
    """
    with deploy({"step_seconds": 0.02}, limits=QUICK) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 2000)
        assert stream.first.wait(30)
        os.kill(before.pid, signal.SIGSTOP)
        assert "SIGSTOP" in str(stream.error)
        deployed.recovered(before.epoch)
        deployed.check_serving()


def test_briefly_stopped_engine(deploy: Any) -> None:
    """The engine process is stopped for a moment and goes on.

    Nothing is lost, nothing is repeated, nothing is restarted.
    """
    with deploy({"step_seconds": 0.01}, limits=Limits(idle=30)) as deployed:
        stream = deployed.stream(1, 100)
        assert stream.first.wait(30)
        os.kill(deployed.engine.pid, signal.SIGSTOP)
        seen, deadline = len(stream.tokens), time.monotonic() + 0.5
        while time.monotonic() < deadline:  # what was on its way arrives, then nothing
            seen = len(stream.tokens)
        assert seen == len(stream.tokens) < 100
        os.kill(deployed.engine.pid, signal.SIGCONT)
        stream.check_finished()
        assert deployed.engine.restarts == 0


def test_long_prefill_is_not_stuck(deploy: Any) -> None:
    """One prompt takes many times longer than the stuck limit to compute in a single step.

    The engine is left alone, because it computes, and its heartbeat goes on, so clients know that it lives.
    """
    idle, length = QUICK.idle, 2_000_000
    script = {"max_model_len": length + 100, "num_blocks": 4000, "block_size": 1024}
    config = {"max_num_seqs": 1, "max_num_batched_tokens": length + 1, "enable_prefix_caching": False}
    with deploy(script, limits=QUICK, **config) as deployed:
        prompt = tuple(range(1, 1000)) * (length // 999)
        started = time.monotonic()
        stream = deployed.stream(1, 2, prompt=prompt)
        while not stream.first.wait(0.05):
            assert deployed.llm._service.client.engines == [0]
        assert stream.end == "length"
        assert len(stream.tokens) == 2
        assert time.monotonic() - started > 2 * idle, "too fast to show anything"
        assert deployed.engine.restarts == 0


@pytest.mark.slow
def test_long_prompt_on_a_slow_device(deploy: Any) -> None:
    """A prompt takes several times the stuck limit to compute on a CPU, with default settings.

    It is computed in steps of about a second, so the engine is never taken for stuck.
    """
    script = {"token_seconds": 0.001, "num_blocks": 1000, "max_model_len": 8192}
    with deploy(script, limits=Limits(ready=60, idle=2.5, step=3)) as deployed:
        prompt = tuple(range(1, 500)) * 10
        started = time.monotonic()
        stream = deployed.stream(1, 3, prompt=prompt)
        stream.check_finished()
        assert time.monotonic() - started > 4.5, "too fast to show anything"
        assert deployed.engine.restarts == 0


def test_step_that_must_be_long(deploy: Any) -> None:
    """Without chunked prefill one step of a prompt computes for longer than `step_timeout`.

    The limit of a step knows its size: ten times what so many tokens should take.
    """
    length = 1_600_000
    script = {"max_model_len": length + 100, "num_blocks": 4000, "block_size": 1024, "token_seconds": 1e-6}
    config = {"max_num_seqs": 1, "max_num_batched_tokens": length + 1, "enable_prefix_caching": False}
    limits = Limits(ready=60, idle=5, step=0.5)
    with deploy(script, limits=limits, enable_chunked_prefill=False, **config) as deployed:
        stream = deployed.stream(1, 2, prompt=tuple(range(1, 1000)) * (length // 999))
        assert stream.end == "length"
        assert deployed.engine.restarts == 0


def test_limits_without_an_end() -> None:
    """Limits are set to infinity: `step_timeout`, `ready_timeout`, `max_holding_seconds`, the `timeout` of `connect`.

    They never strike, and nothing else happens.
    """
    limits = {"step_timeout": math.inf, "ready_timeout": math.inf, "max_holding_seconds": math.inf}
    llm = LLM(model="scripted:", skip_tokenizer_init=True, **limits)
    try:
        other = wavecore.connect(llm.runtime_dir, timeout=math.inf)
        for each in (llm, other):
            [output] = each.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, ignore_eos=True))
            assert output.outputs[0].finish_reason == "length"
        other.shutdown()
    finally:
        llm.shutdown()


def test_slow_load_is_not_stuck(deploy: Any) -> None:
    """Loading takes longer than the stuck limit.

    Only `ready_timeout` limits a start; progress is shown meanwhile.
    """
    with deploy({"load_seconds": 2 * QUICK.idle}, limits=QUICK) as deployed:
        assert deployed.engine.restarts == 0
        deployed.check_serving()


def test_idle_engine_is_not_stuck_and_uses_no_cpu(deploy: Any) -> None:
    """Nobody asks anything for a long time.

    The engine blocks on its input; it uses no CPU worth naming and is never taken for stuck.
    """
    with deploy(limits=QUICK) as deployed:
        deployed.check_serving()
        process = psutil.Process(deployed.engine.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        while time.monotonic() < start + 3 * QUICK.idle:
            assert deployed.engine.state == "ready"
            time.sleep(0.1)
        assert sum(process.cpu_times()[:2]) - before <= 0.02 * (time.monotonic() - start) + 0.02
        assert deployed.engine.restarts == 0


@pytest.mark.slow
def test_client_at_a_breakpoint(deploy: Any) -> None:
    """A developer stops at a breakpoint between two outputs of a stream, for longer than any limit.

    The client's IO thread goes on telling the engine that it lives; afterwards the stream has every token.
    """
    with deploy({"step_seconds": 0.01}) as deployed:
        stream = deployed.llm.stream({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=300, temperature=0))
        tokens = list(next(stream).outputs[0].token_ids)
        time.sleep(12)
        tokens += [token for output in stream for token in output.outputs[0].token_ids]
        assert tokens == right_answer((1, 2, 3), 300)
