"""An engine of several processes, a group of ranks as tensor parallelism has them; and several engines side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.conftest import SERVE
from tests.support.waiting import until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, ModelError, StartError
from wavecore.transport.processes.supervisor import Limits, Supervisor

QUICK = Limits(ready=60, drain=5, step=60, idle=0.4, grace=5)
FIRST_WORKER_LAST = pytest.mark.parametrize(
    ("ranks", "rank"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (4, 3)))]
)


def pids(deployed: Any) -> list[int]:
    return [rank.pid for rank in deployed.engine.ranks]


def check_new_life(deployed: Any, before: Any) -> None:
    """All ranks of the old life are gone, and all of a new one serve."""
    after = deployed.recovered(before.epoch)
    assert {rank.state for rank in after.ranks} == {"ready"}
    assert len(after.ranks) == len(before.ranks)
    assert not any(psutil.pid_exists(rank.pid) for rank in before.ranks)
    assert after.restarts == 1
    deployed.check_serving()


@FIRST_WORKER_LAST
def test_killed_rank(deploy: Any, ranks: int, rank: int) -> None:
    """One rank of an engine is killed: rank 0, or a worker.

    Its peers are ended at once, every stream within a second with `EngineDead`, which names the rank, the signal and
    the phase. The whole group is started again, at the same address.
    """
    with deploy({"step_seconds": 0.02}, tensor_parallel_size=ranks) as deployed:
        before = deployed.engine
        assert [each.rank for each in before.ranks] == list(range(ranks))
        streams = [deployed.stream(i, 2000) for i in range(5)]
        for stream in streams:
            assert stream.first.wait(30)
        os.kill(before.ranks[rank].pid, signal.SIGKILL)
        for stream in streams:
            assert isinstance(stream.error, EngineDead)
            assert f"engine 0 rank {rank} (pid {before.ranks[rank].pid}) was ended by signal 9" in str(stream.error)
            assert "(while: serve)" in str(stream.error)
            stream.check_prefix()
        cause = deployed.cause_of(before.epoch)
        assert (cause.rank, cause.signal, cause.phase) == (rank, 9, "serve")
        check_new_life(deployed, before)


def test_two_ranks_killed_at_once(deploy: Any) -> None:
    """All ranks of an engine are killed at the same moment, by the kernel's OOM killer, say.

    One of them is named; the group is started again once, as a whole.
    """
    with deploy({"step_seconds": 0.02}, tensor_parallel_size=2) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 2000)
        assert stream.first.wait(30)
        for pid in pids(deployed):
            os.kill(pid, signal.SIGKILL)
        assert "signal 9" in str(stream.error)
        check_new_life(deployed, before)


@pytest.mark.parametrize(("ranks", "rank"), [pytest.param(2, 0, marks=pytest.mark.slow), (4, 2)])
def test_stopped_rank(deploy: Any, ranks: int, rank: int) -> None:
    """One rank is stopped (SIGSTOP, a debugger) and does not come back; its peers wait for it.

    Within five seconds it counts as stuck, and no other rank does: the group is ended and restarted, and its streams
    say which rank it was.
    """
    with deploy({"step_seconds": 0.02}, limits=QUICK, tensor_parallel_size=ranks) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 2000)
        assert stream.first.wait(30)
        os.kill(before.ranks[rank].pid, signal.SIGSTOP)
        assert f"engine 0 rank {rank} " in str(stream.error)
        assert "SIGSTOP" in str(stream.error)
        assert deployed.cause_of(before.epoch).code == "stuck"
        check_new_life(deployed, before)


@FIRST_WORKER_LAST
def test_rank_that_raises(deploy: Any, ranks: int, rank: int) -> None:
    """One rank meets an exception that no single request is to blame for.

    Every stream and `deployment.json` get the exception with the rank and the phase; the file has its traceback, too.
    The group is started again.
    """
    script = {"faults": {"rank": rank, "raise_at_step": 5}, "step_seconds": 0.01}
    with deploy(script, tensor_parallel_size=ranks) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 100)
        assert isinstance(stream.error, EngineDead)
        assert f"rank {rank}: RuntimeError: the scripted model was told to raise" in str(stream.error)
        assert "(while: serve)" in str(stream.error)
        cause = deployed.cause_of(before.epoch)
        assert (cause.rank, cause.code, cause.phase) == (rank, "internal", "serve")
        assert "RuntimeError" in cause.traceback
        until(lambda: deployed.cause_of(before.epoch).status == 5)
        deployed.heal()
        check_new_life(deployed, before)


@pytest.mark.parametrize(("ranks", "rank"), [pytest.param(2, 0, marks=pytest.mark.slow), (4, 2)])
def test_rank_that_hangs(deploy: Any, ranks: int, rank: int) -> None:
    """A step hangs on one rank, and all ranks before it wait, each for the next.

    The one that hangs is found at the end of that chain within five seconds: the stacks of all ranks go into the log,
    the group is ended and restarted, and its streams get `EngineDead` that names the rank.
    """
    script = {"faults": {"rank": rank, "hang_at_step": 5}, "step_seconds": 0.01}
    with deploy(script, limits=QUICK, tensor_parallel_size=ranks) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 100)
        assert stream.first.wait(30)
        deployed.heal()
        assert f"engine 0 rank {rank} " in str(stream.error)
        assert "every thread sleeps" in str(stream.error)
        cause = deployed.cause_of(before.epoch)
        assert (cause.rank, cause.code) == (rank, "stuck")
        assert any("in _fail_at" in line for line in cause.log_tail), "the stack of the rank that hangs"
        check_new_life(deployed, before)


def test_ranks_that_wait_for_each_other(deploy: Any) -> None:
    """Ranks wait for each other in a circle: a deadlock. (The k-th collective of one is not the k-th of another, say.)

    None of them is at fault alone, so the error names them all. The group is ended within five seconds and restarted.
    """
    script = {"faults": {"rank": 3, "wait_at_step": {"step": 5, "rank": 1}}, "step_seconds": 0.01}
    with deploy(script, limits=QUICK, tensor_parallel_size=4) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 100)
        deployed.heal()
        assert "ranks 1, 2, 3 wait for each other, a deadlock" in str(stream.error)
        assert deployed.cause_of(before.epoch).code == "stuck"
        check_new_life(deployed, before)


@pytest.mark.parametrize("seconds", [3 * QUICK.idle, pytest.param(30.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rank_that_is_slow_to_start(deploy: Any, rank: int, seconds: float) -> None:
    """One rank takes many times longer to load than its peers and than the stuck limit.

    The engine is ready when all ranks are, and none is taken for stuck.
    """
    script = {"faults": {"rank": rank, "load_seconds": seconds}}
    with deploy(script, limits=QUICK, tensor_parallel_size=2) as deployed:
        assert {each.state for each in deployed.engine.ranks} == {"ready"}
        assert deployed.engine.restarts == 0
        deployed.check_serving()


@pytest.mark.slow
def test_rank_that_is_never_ready(deploy: Any) -> None:
    """One rank hangs while it loads, and `ready_timeout` passes.

    The start fails with `StartError` that names the rank and its phase, and no process of the group is left.
    """
    script = {"faults": {"rank": 1, "load_seconds": 600}}
    with (
        pytest.raises(StartError, match=r"engine 0 rank 1 .* was not ready after 10 s \(phase: load\)"),
        deploy(script, limits=Limits(ready=10), tensor_parallel_size=2),
    ):
        pass


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ({"load_error": "shard 1 is cut off"}, ModelError, r"^rank 1: shard 1 is cut off \(while: load\)$"),
        ({"exit_at_phase": {"phase": "load", "signal": 9}}, StartError, r"rank 1 .*signal 9.*\(while: load\)"),
    ],
)
def test_rank_that_fails_to_start(deploy: Any, fault: dict[str, Any], error: type[Exception], words: str) -> None:
    """One rank cannot start: its part of the model is damaged, the OOM killer took it.

    The start raises at once what that rank said, or the signal, with rank and phase. Its peers are ended, also those
    that still load.
    """
    script = {"load_seconds": 0.2, "faults": {"rank": 1, **fault}}
    with pytest.raises(error, match=words), deploy(script, tensor_parallel_size=2):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_stopped_while_it_starts(deploy: Any, rank: int) -> None:
    """One rank is stopped (SIGSTOP, a debugger) while it loads.

    The start fails within five seconds, with `StartError` that names the rank and its phase; the others are ended.
    """
    script = {"load_seconds": 0.2, "faults": {"rank": rank, "exit_at_phase": {"phase": "load", "signal": 19}}}
    with (
        pytest.raises(StartError, match=rf"engine 0 rank {rank} .*it has been stopped \(SIGSTOP.*\(while: load\)"),
        deploy(script, limits=QUICK, tensor_parallel_size=2),
    ):
        pass


def test_group_drains(deploy: Any) -> None:
    """An engine of several ranks gets SIGTERM while requests run, and so does each of its workers.

    Running requests finish, because the workers go on as long as rank 0 needs them.
    """
    with deploy({"step_seconds": 0.01}, tensor_parallel_size=2) as deployed:
        stream = deployed.stream(1, 100)
        assert stream.first.wait(30)
        os.kill(deployed.engine.ranks[1].pid, signal.SIGTERM)
        deployed.supervisor.stop(drain=30)
        stream.check_finished()
        assert (deployed.engine.state, deployed.engine.cause) == ("stopped", None)
        assert not any(map(psutil.pid_exists, pids(deployed)))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_of_two_engines_dies(deploy: Any, ranks: int) -> None:
    """One of two engines side by side (`data_parallel_size=2`) is killed.

    The requests of the other one finish unharmed, token for token; it is not restarted. Only streams of the dead engine
    end with `EngineDead`, and its requests without a token go to the other one.
    """
    config = {"data_parallel_size": 2, "tensor_parallel_size": ranks, "max_num_seqs": 14}
    with deploy({"step_seconds": 0.01}, **config) as deployed:
        dead, other = deployed.supervisor.deployment().engines
        until(lambda: len(deployed.llm._service.client.engines) == 2)
        begun = [deployed.stream(i, 150) for i in range(16)]
        until(lambda: all(stream.first.is_set() for stream in begun))
        streams = [*begun, *(deployed.stream(100 + i, 10) for i in range(16))]
        os.kill(dead.ranks[-1].pid, signal.SIGKILL)
        failed = [stream for stream in streams if isinstance(stream.end, EngineDead)]
        assert any(stream in failed for stream in begun)
        assert not all(stream in failed for stream in begun)
        for stream in streams:
            if stream in failed:
                assert stream.tokens
                stream.check_prefix()
            else:
                stream.check_finished()
        assert deployed.supervisor.deployment().engines[1] == other
        deployed.recovered(dead.epoch)
        until(lambda: len(deployed.llm._service.client.engines) == 2)


@pytest.mark.parametrize("pairs", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_pairs_of_deployments_at_the_same_instant(pairs: int) -> None:
    """Two deployments of an engine of two ranks are started at the same instant, again and again.

    They never collide: each has its own folder, addresses, memory and bells.
    """
    config = EngineConfig(model="scripted:", skip_tokenizer_init=True, tensor_parallel_size=2)
    for _ in range(pairs):
        pair, at_once = [make_supervisor(config), make_supervisor(config)], threading.Barrier(2)

        def start(one: Supervisor, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            one.start()

        threads = [threading.Thread(target=start, args=[one]) for one in pair]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            entries = [entry for one in pair for entry in one.deployment().engines]
            assert [entry.state for entry in entries] == ["ready"] * 2
            assert len({entry.input for entry in entries} | {entry.output for entry in entries}) == 4
            assert len({rank.pid for entry in entries for rank in entry.ranks}) == 4
            for one in pair:
                assert one.runtime_dir is not None
                with LLM.connect(one.runtime_dir) as llm:
                    prompts, params = [[5], [6], [7]], SamplingParams(max_tokens=3, ignore_eos=True)
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
        finally:
            for one in pair:
                one.stop()


def test_full_shared_memory(tmp_path: Path) -> None:
    """/dev/shm is tiny, as in a container with its defaults, and full.

    Engines of several ranks start and serve: what the ranks share has no name and needs no room there.
    """
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    script = tmp_path / "script.json"
    script.write_text('{"eos_token_id": []}')
    fill = 'mount -t tmpfs -o size=4k full /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "$@"'
    code = SERVE.format(script=script, drain=5).replace(
        '"shutdown_timeout"', '"tensor_parallel_size": 2, "shutdown_timeout"'
    )
    command = ["unshare", "-m", "sh", "-c", fill, "sh", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            path = next(line.split()[1] for line in program.stdout if line.startswith("ready"))
            with LLM.connect(path) as llm:
                [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
                assert output.outputs[0].finish_reason == "length"
        finally:
            program.terminate()
        assert program.wait(30) == 0
