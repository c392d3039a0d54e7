"""Engines in lockstep: they are one failure domain, and end together in order, too."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest
from tests.support.waiting import until

from wavecore.transport.errors import EngineDead, Overloaded
from wavecore.transport.processes.supervisor import Limits

QUICK = Limits(ready=60, drain=5, step=60, idle=0.4, grace=5)
LOCKSTEP = {"data_parallel_size": 2, "dp_lockstep": True}
EACH_RANK = pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
SLOW = pytest.mark.slow


def engines(deployed: Any) -> Any:
    return deployed.supervisor.deployment().engines


def streaming(deployed: Any, max_tokens: int = 2000) -> list[Any]:
    """Four requests that have tokens, of which some run on each rank."""
    until(lambda: len(deployed.llm._service.client.engines) == 2)
    streams = [deployed.stream(i, max_tokens) for i in range(4)]
    for stream in streams:
        assert stream.first.wait(30)
    assert all(stat["running"] for stat in deployed.llm.step_stats())
    return streams


def check_new_life(deployed: Any, before: Any) -> None:
    """All ranks of the old life are gone, and all of a new one serve."""
    deployed.recovered(before[0].epoch)
    after = engines(deployed)
    assert [(engine.state, engine.restarts) for engine in after] == [("ready", 1)] * 2
    assert [engine.input for engine in after] == [engine.input for engine in before]
    assert not any(psutil.pid_exists(engine.pid) for engine in before)
    until(lambda: len(deployed.llm._service.client.engines) == 2)
    for number in range(4):
        deployed.stream(500 + number, 10).check_finished()


@EACH_RANK
def test_killed_lockstep_rank(deploy: Any, rank: int) -> None:
    """One of several engines in lockstep is killed in the middle of a wave.

    The streams of all of them end at once with `EngineDead`, which names the rank, the signal and the phase.
    All are started again; requests that have no token yet wait for that, and finish.
    """
    with deploy({"step_seconds": 0.01}, max_num_seqs=2, **LOCKSTEP) as deployed:
        before = engines(deployed)
        until(lambda: len(deployed.llm._service.client.engines) == 2)
        streams = [deployed.stream(i, 150) for i in range(8)]
        until(lambda: sum(bool(stream.tokens) for stream in streams) == 4)
        os.kill(before[rank].pid, signal.SIGKILL)
        failed = [stream for stream in streams if stream.end != "length"]
        assert 0 < len(failed) <= 4, "the others had no token"
        for stream in failed:
            assert isinstance(stream.error, EngineDead)
            assert f"engine {rank} rank {rank} (pid {before[rank].pid}) was ended by signal 9" in str(stream.error)
            assert "(while: serve)" in str(stream.error)
            stream.check_prefix()
        for stream in streams:
            if stream not in failed:
                stream.check_finished()
        check_new_life(deployed, before)


@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=SLOW) for rank in range(3)), 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SLOW)])
def test_rank_of_lockstep_engines_over_several_devices(deploy: Any, rank: int, number: signal.Signals) -> None:
    """A rank of one of several engines in lockstep is killed, or stopped; each engine runs over several devices.

    All ranks of all engines end, and are started again. The error names that rank, not those that wait for it.
    """
    with deploy({"step_seconds": 0.01}, limits=QUICK, tensor_parallel_size=2, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams, ranks = streaming(deployed), [each for engine in before for each in engine.ranks]
        os.kill(ranks[rank].pid, number)
        stopped = "was stuck and has been ended: it has been stopped"
        said = "was ended by signal 9" if number == signal.SIGKILL else stopped
        for stream in streams:
            assert f"engine {rank // 2} rank {rank} (pid {ranks[rank].pid}) {said}" in str(stream.error)
        check_new_life(deployed, before)
        assert not any(psutil.pid_exists(each.pid) for each in ranks)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_lockstep_rank(deploy: Any, rank: int) -> None:
    """One of several engines in lockstep is stopped (SIGSTOP, a debugger), and the others wait for its vote.

    Within five seconds it counts as stuck, and no other does; all are ended and started again.
    """
    with deploy({"step_seconds": 0.02}, limits=QUICK, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams = streaming(deployed)
        os.kill(before[rank].pid, signal.SIGSTOP)
        for stream in streams:
            assert f"engine {rank} rank {rank} " in str(stream.error)
            assert "SIGSTOP" in str(stream.error)
        assert {engine.cause.code for engine in engines(deployed) if engine.cause} <= {"stuck"}
        check_new_life(deployed, before)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_lockstep_rank_that_raises(deploy: Any, rank: int) -> None:
    """One of several engines in lockstep meets an exception that no single request is to blame for.

    All streams get it, with the rank and the phase, and all engines are started again.
    """
    script = {"faults": {"rank": rank, "raise_at_step": 50}, "step_seconds": 0.01}
    with deploy(script, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams = streaming(deployed)
        for stream in streams:
            assert f"rank {rank}: RuntimeError: the scripted model was told to raise" in str(stream.error)
            assert "(while: serve)" in str(stream.error)
        deployed.heal()
        check_new_life(deployed, before)


@EACH_RANK
def test_lockstep_rank_that_hangs(deploy: Any, rank: int) -> None:
    """A step of one of several engines in lockstep never ends.

    The others, which wait for its vote, are not to blame: it is named as stuck, and all are started again.
    """
    script = {"faults": {"rank": rank, "hang_at_step": 50}, "step_seconds": 0.01}
    with deploy(script, limits=QUICK, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams = streaming(deployed)
        deployed.heal()
        for stream in streams:
            assert f"engine {rank} rank {rank} " in str(stream.error)
            assert "every thread sleeps" in str(stream.error)
        check_new_life(deployed, before)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(30.0, marks=SLOW)])
def test_slow_start_of_a_lockstep_rank(deploy: Any, seconds: float) -> None:
    """One of several engines in lockstep takes longer to start than the others.

    They wait for it, and nobody is taken for stuck.
    """
    script = {"faults": {"rank": 1, "load_seconds": seconds}}
    with deploy(script, limits=QUICK, **LOCKSTEP) as deployed:
        for number in range(4):
            deployed.stream(number, 10).check_finished()
        assert [engine.restarts for engine in engines(deployed)] == [0, 0]


@SLOW
def test_full_queue_of_a_lockstep_rank(deploy: Any) -> None:
    """One of several engines in lockstep has a full queue, and requests that reach the greatest length.

    It refuses what comes more, and its own end there; the other goes on beside it.
    """
    script = {"max_model_len": 160, "step_seconds": 0.005}
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_queued_reqs": 3, **LOCKSTEP}
    with deploy(script, **settings) as deployed:
        until(lambda: len(deployed.llm.step_stats()) == 2)
        long = [deployed.stream(number, 1000, data_parallel_rank=1) for number in range(2)]
        until(lambda: deployed.llm.step_stats()[1]["running"] == 2)
        more = [deployed.stream(number, 10, data_parallel_rank=1) for number in range(2, 14)]
        deployed.stream(20, 40, data_parallel_rank=0).check_finished()
        refused = [stream for stream in more if isinstance(stream.end, Overloaded)]
        assert len(refused) == 9
        for stream in more:
            if stream not in refused:
                stream.check_finished()
        for stream in long:
            assert stream.end == "length" and len(stream.tokens) == 160 - len(stream.prompt)


@EACH_RANK
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW)])
def test_sigterm_to_a_lockstep_rank(deploy: Any, rank: int, size: int) -> None:
    """One of several engines in lockstep gets SIGTERM.

    All drain: new requests are refused, running ones finish, and then all end in order, at once.
    """
    with deploy({"step_seconds": 0.01}, tensor_parallel_size=size, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams = streaming(deployed, max_tokens=100)
        os.kill(before[rank].pid, signal.SIGTERM)

        def is_refused() -> bool:
            refused = deployed.stream(900, 1)
            return isinstance(refused.end, Overloaded)

        until(is_refused)
        assert isinstance(deployed.stream(901, 1).end, Overloaded), "by the other one, too"
        for stream in streams:
            stream.check_finished()
        cause = deployed.cause_of(before[0].epoch)
        assert (cause.signal, cause.status) == (0, 0)
        check_new_life(deployed, before)


def test_drain_of_a_paused_group(deploy: Any) -> None:
    """A paused group of engines in lockstep gets SIGTERM.

    Its requests wait for the end of the pause as long as `shutdown_timeout` allows, then they end with an error, and
    the engines with them.
    """
    with deploy({"step_seconds": 0.01}, shutdown_timeout=0.5, **LOCKSTEP) as deployed:
        before = engines(deployed)
        streams = streaming(deployed)
        deployed.llm.pause()
        os.kill(before[1].pid, signal.SIGTERM)
        for stream in streams:
            assert isinstance(stream.error, EngineDead)
            assert "stopped before this request ended" in str(stream.error)
        assert (deployed.cause_of(before[0].epoch).status) == 0
