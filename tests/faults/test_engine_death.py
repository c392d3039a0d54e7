"""An engine ends in every way that a process can end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from tests.faults.conftest import right_answer
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.frontend.outputs import RequestOutput
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes import group


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGABRT, signal.SIGSEGV))],
)
def test_engine_killed_mid_stream(deploy: Any, number: signal.Signals) -> None:
    """The engine process is killed, or crashes in native code, while it streams.

    Every open stream ends within a second with `EngineDead`, which names the signal and its likely cause. The engine is
    started again after 1, 2, 4 ... 60 s and takes requests at the same address.
    """
    with deploy({"step_seconds": 0.02}) as deployed:
        before = deployed.engine
        streams = [deployed.stream(i, 2000) for i in range(20)]
        for stream in streams:
            assert stream.first.wait(30)
        os.kill(before.pid, number)
        for stream in streams:
            error = stream.error
            assert isinstance(error, EngineDead)
            assert f"signal {number.value} ({number.name})" in str(error)
            stream.check_prefix()
        after = deployed.recovered(before.epoch)
        assert (after.input, after.output, after.restarts) == (before.input, before.output, 1)
        deployed.check_serving()


def test_waiting_requests_survive_a_killed_engine(deploy: Any) -> None:
    """The engine dies under requests that have no token yet.

    They are sent once more, to another engine or to the same one after its restart, and finish as if nothing happened.
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=4) as deployed:
        before = deployed.engine
        running = [deployed.stream(i, 1000) for i in range(4)]
        for stream in running:
            assert stream.first.wait(30)
        waiting = [deployed.stream(100 + i, 10) for i in range(12)]
        until(lambda: deployed.call("stats")["waiting"] == 12)
        os.kill(before.pid, signal.SIGKILL)
        for stream in running:
            assert isinstance(stream.error, EngineDead)
        for stream in waiting:
            stream.check_finished()


def test_requests_during_a_restart(deploy: Any) -> None:
    """A request is submitted after the engine died and before it is up again.

    It waits, at most as long as its own deadlines say, and is answered by the restarted engine. Where none will come
    back it fails with the cause. Meanwhile `check_health` raises.
    """
    with deploy({"step_seconds": 0.02, "load_seconds": 0.3}) as deployed:
        os.kill(deployed.engine.pid, signal.SIGKILL)
        until(lambda: not deployed.llm._service.client.engines)
        with pytest.raises(EngineDead):
            deployed.llm._service.client.check_health()
        for stream in [deployed.stream(i, 10) for i in range(4)]:
            stream.check_finished()
        assert deployed.engine.restarts == 1


def test_resumed_request_goes_on(deploy: Any) -> None:
    """The engine dies under a greedy or seeded request that asked for `resume=True`.

    It goes on after the restart from the tokens it has, and ends with the very tokens it would have had.
    """
    with deploy({"step_seconds": 0.01}) as deployed:
        before = deployed.engine
        streams = [deployed.stream(i, 80, resume=True) for i in range(4)]
        for stream in streams:
            assert stream.first.wait(30)
        os.kill(before.pid, signal.SIGKILL)
        deployed.recovered(before.epoch)
        for stream in streams:
            stream.check_finished()


def test_engine_killed_twice(deploy: Any) -> None:
    """The engine dies again under a request that was sent once more already.

    It fails with the cause: nothing is tried for ever.
    """
    with deploy({"faults": {"exit_at_step": {"step": 0, "signal": 9}}}) as deployed:
        stream = deployed.stream(1, 10)
        assert isinstance(stream.error, EngineDead)
        assert "signal 9" in str(stream.error)
        assert stream.tokens == []
        deployed.heal()


def test_engine_that_cannot_be_started_again(deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine died, and fails in five starts in a row (the model's files are gone, the GPU is lost).

    It stays down: every request and call fails with the cause, and `wavecore engine` ends with status 5. A new start
    gets it going again: of `wavecore engine`, or of a new `LLM`.
    """
    monkeypatch.setattr(group, "MAX_FAILED_STARTS", 2)
    with deploy({"step_seconds": 0.02}) as deployed:
        waiting = deployed.stream(1, 3000)
        assert waiting.first.wait(30)
        deployed.damage()
        os.kill(deployed.engine.pid, signal.SIGKILL)
        assert "signal 9" in str(waiting.error)
        assert isinstance(deployed.stream(2, 10).error, EngineDead)
        with pytest.raises(EngineDead, match=r"every engine stays down.*script\.json") as caught:
            deployed.supervisor.wait()
        assert caught.value.exit_code == 5
        assert (deployed.engine.state, deployed.engine.restarts) == ("failed", 2)
        with pytest.raises(EngineDead, match=r"script\.json"):
            LLM.connect(deployed.runtime_dir)


def test_request_that_kills_its_engine(deploy: Any) -> None:
    """One request crashes the engine in each step that it takes part in.

    At the second death it ends with `EngineDead`, which names it as the probable cause; the engine is restarted and
    serves. Requests that met one of the deaths only, and had no token yet, finish.
    """
    with deploy({"faults": {"exit_at_step": {"token": 666, "signal": 11}}}) as deployed:
        poison = deployed.stream(1, 10, prompt=(666, 1, 2))
        until(lambda: not deployed.llm._service.client.engines)
        other = deployed.stream(2, 10)
        assert isinstance(poison.error, EngineDead)
        assert "died for the second time, may well be the cause, and is not sent again" in str(poison.error)
        assert "signal 11" in str(poison.error)
        other.check_finished()
        assert deployed.engine.restarts == 2
        deployed.check_serving()
        assert deployed.engine.restarts == 2


def test_resumed_request_meets_a_second_death(deploy: Any) -> None:
    """The engine dies again under a request with `resume=True` that went on once.

    It fails with the cause, after what it had: a request that may be the cause is not tried for ever.
    """
    with deploy({"step_seconds": 0.01}) as deployed:
        stream = deployed.stream(1, 2000, resume=True)
        assert stream.first.wait(30)
        for _ in range(2):
            before, had = deployed.engine, len(stream.tokens)
            os.kill(before.pid, signal.SIGKILL)
            deployed.recovered(before.epoch)
            until(lambda had=had: len(stream.tokens) > had or stream.ends)
        assert isinstance(stream.error, EngineDead)
        assert "second time" in str(stream.error)
        stream.check_prefix()


def test_pending_calls_fail_with_the_engine(deploy: Any) -> None:
    """The engine dies under calls that wait for an answer (statistics, cache resets).

    Each call raises `EngineDead` at once; none waits for ever.
    """
    with deploy({"faults": {"hang_at_step": 3}}) as deployed:
        deployed.stream(1, 10)
        client = deployed.llm._service.client
        futures = [client.call("stats") for _ in range(3)]
        os.kill(deployed.engine.pid, signal.SIGKILL)
        for future in futures:
            with pytest.raises(EngineDead, match="signal 9"):
                future.result(30)
        deployed.heal()


def test_unexpected_exception_in_a_step(deploy: Any) -> None:
    """The engine meets an exception that no single request is to blame for.

    It says its last words: every stream and `deployment.json` get the exception, the phase and the traceback. Then it
    ends and is restarted.
    """
    with deploy({"faults": {"raise_at_step": 5}, "step_seconds": 0.01}) as deployed:
        before = deployed.engine
        stream = deployed.stream(1, 100)
        assert isinstance(stream.error, EngineDead)
        assert "told to raise" in str(stream.error)
        stream.check_prefix()
        cause = deployed.cause_of(before.epoch)
        assert (cause.code, cause.phase, cause.status) == ("internal", "serve", 5)
        assert "RuntimeError" in cause.traceback
        deployed.heal()
        deployed.recovered(before.epoch)
        deployed.check_serving()


def test_silent_exit(deploy: Any) -> None:
    """Something inside the engine ends the process without a word (a library calls exit).

    The error names the exit status and the last line of output.
    """
    with deploy({"faults": {"exit_at_step": {"step": 5, "code": 3}}, "step_seconds": 0.01}) as deployed:
        stream = deployed.stream(1, 100)
        assert isinstance(stream.error, EngineDead)
        assert "exited with status 3" in str(stream.error)
        deployed.heal()


def test_second_client_sees_the_same(deploy: Any) -> None:
    """Several programs are attached to an engine that dies.

    Each of them gets the cause, and each goes on with the restarted engine.
    """
    with deploy({"step_seconds": 0.02}) as deployed, LLM.connect(deployed.runtime_dir) as other:
        before = deployed.engine
        streams = [deployed.stream(1, 1000), deployed.stream(2, 1000, llm=other)]
        for stream in streams:
            assert stream.first.wait(30)
        os.kill(before.pid, signal.SIGKILL)
        for stream in streams:
            assert "signal 9" in str(stream.error)
        deployed.recovered(before.epoch)
        deployed.stream(3, 10, llm=other).check_finished()
        deployed.check_serving()


def test_batch_keeps_what_it_can(deploy: Any) -> None:
    """`LLM.generate` is in the middle of a batch when the engine is killed.

    What was finished is returned, requests without a token go on with the restarted engine, and those that had begun
    carry `EngineDead` in `.error`, with the tokens that they had. With `raise_on_error=True` the error is raised.
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=4) as deployed:
        prompts = [(i + 1, 2, 3) for i in range(16)]
        counts = [5] * 4 + [1000] * 4 + [10] * 8

        def generate(**options: Any) -> list[RequestOutput]:
            params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in counts]
            before = deployed.engine
            killer = threading.Thread(target=kill_when_half_done, args=[before.pid])
            killer.start()
            try:
                return deployed.llm.generate([list(p) for p in prompts], params, use_tqdm=False, **options)
            finally:
                killer.join()
                deployed.recovered(before.epoch)

        def kill_when_half_done(pid: int) -> None:
            until(lambda: sum(row["output_tokens"] > 10 for row in deployed.call("debug_requests")) == 4)
            os.kill(pid, signal.SIGKILL)

        outputs = generate()
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4 + ["error"] * 4 + ["length"] * 8
        for prompt, count, output in zip(prompts, counts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            assert tokens == right_answer(prompt, count)[: len(tokens)]
            assert len(tokens) == count or (output.error is not None and tokens)
        for output in outputs[4:8]:
            assert isinstance(output.error, EngineDead)
            assert "signal 9" in str(output.error)
        with pytest.raises(EngineDead, match="signal 9"):
            generate(raise_on_error=True)
        assert deployed.llm._service.client.num_live == 0


def test_offline_generate_names_the_cause(deploy: Any) -> None:
    """The engine is killed under every request of `LLM.generate`, or under the only one.

    It raises `EngineDead` naming the signal; the same object works again after the restart.
    """
    with deploy({"step_seconds": 0.02}) as deployed:
        before = deployed.engine
        probe = deployed.stream(1, 2000)
        params = SamplingParams(max_tokens=2000, temperature=0)

        def kill_when_all_have_begun() -> None:
            until(lambda: sum(row["output_tokens"] > 0 for row in deployed.call("debug_requests")) == 9)
            os.kill(before.pid, signal.SIGKILL)

        assert probe.first.wait(30)
        killer = threading.Thread(target=kill_when_all_have_begun)
        killer.start()
        with pytest.raises(EngineDead, match="signal 9"):
            deployed.llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 8, params, use_tqdm=False)
        killer.join()
        assert deployed.llm._service.client.num_live == 0
        deployed.recovered(before.epoch)
        [output] = deployed.llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=3), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 3
