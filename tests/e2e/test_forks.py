"""A program forks while a client runs: the child's copy is closed and waits for nothing, the parent notices nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.scripted_model import write_model
from tests.support.waiting import until

from wavecore import LLM, AsyncLLM, EngineDead, ModelPipeline, RequestError, SamplingParams, WavecoreError, connect

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def files(tmp_path: Any) -> dict[str, str]:
    return write_model(tmp_path, step_seconds=0.005)


def in_a_fork(function: Callable[[], object]) -> str:
    """What a function returns in a fork of this process, or how it fails."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(function())
        except WavecoreError as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write_end, answer.encode())
        os._exit(0)  # without what pytest does at exit
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    ended: list[int] = []
    until(lambda: ended.append(os.waitpid(pid, os.WNOHANG)[0]) or ended[-1] == pid, "the child's end", seconds=20)
    return answer


def test_every_use_in_a_fork_says_whose_client_it_is(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        client = llm._service.client
        uses: list[Callable[[], object]] = [
            lambda: llm.generate([5], SHORT, use_tqdm=False),
            lambda: llm.embed([5], use_tqdm=False),
            lambda: next(llm.stream([5], SHORT)),
            lambda: llm.chat([{"role": "user", "content": "hi"}], SHORT, use_tqdm=False),
            llm.step_stats,
            llm.reset_prefix_cache,
            client.check_health,
        ]
        for use in uses:
            answer = in_a_fork(use)
            assert answer.startswith("EngineDead: this client belongs to process"), answer
            assert "wavecore.connect(" in answer
        assert in_a_fork(lambda: (llm.has_engine(), client.num_live, llm.shutdown())) == "(False, 0, None)"
        assert in_a_fork(lambda: llm.__exit__()) == "None"
        attached = in_a_fork(lambda: connect(llm.runtime_dir).generate([5, 6], SHORT, use_tqdm=False)[0].finished)
        assert attached == "True"
        assert llm.runtime_dir.exists()
        assert llm.generate([5], SHORT, use_tqdm=False)[0].finished


def test_forks_at_any_moment_end(files: dict[str, str]) -> None:
    """The threads of the parent are in the middle of something, whatever that is."""
    with LLM(**files) as llm:
        streams = [llm.stream([7, i + 1], LONG) for i in range(8)]
        for _ in range(40):
            for stream in streams:
                next(stream, None)
            assert in_a_fork(llm._service.close) == "None"  # what runs at exit
        assert llm.generate([5], SHORT, use_tqdm=False)[0].finished


def test_a_stream_of_the_parent_ends_in_the_child(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        stream = llm.stream([7, 8], LONG)
        first = next(stream).outputs[0].token_ids

        def read() -> int:
            return sum(len(output.outputs[0].token_ids) for output in stream)

        assert in_a_fork(read).startswith("RequestError: request 0: the request had not ended: this client belongs to")
        assert len(first) + read() == 200


def test_a_wait_that_a_fork_interrupts_ends_in_the_child(files: dict[str, str]) -> None:
    """The fork happens inside the wait: a signal handler forks, and the child goes on where the parent waits."""
    with LLM(**files) as llm:
        read_end, write_end = os.pipe()
        children: list[int] = []
        signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            llm.generate([[5, 6], [5, 7]], LONG, use_tqdm=False)
        except RequestError as error:
            os.write(write_end, str(error).encode())
        if children[0] == 0:
            os._exit(0)
        os.close(write_end)
        assert b"belongs to process" in os.read(read_end, 1000)
        os.close(read_end)
        os.waitpid(children[0], 0)


async def test_async_streams_end_in_the_child(files: dict[str, str]) -> None:
    async with await AsyncLLM.start(**files) as llm:
        stream = llm.generate([7, 8], LONG)
        await anext(stream)

        def read() -> None:
            asyncio.events._set_running_loop(None)  # that of the parent
            asyncio.new_event_loop().run_until_complete(anext(stream))

        assert "belongs to process" in in_a_fork(read)
        assert (await stream.__anext__()).outputs[0].token_ids
        await stream.aclose()


def test_children_of_multiprocessing(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        _shared[:] = [llm]
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:
            answers = pool.map(_use, [1, 2, 3, 4])
        assert all("belongs to process" in answer for answer in answers)
        child = fork.Process(target=sys.exit)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        _shared.clear()
        assert llm.generate([5], SHORT, use_tqdm=False)[0].finished


_shared: list[LLM] = []


def _use(_: int) -> str:
    try:
        _shared[0].generate([5], SHORT, use_tqdm=False)
    except EngineDead as error:
        return str(error)
    return "it answered"


def test_a_pipeline_of_the_parent_ends_in_the_child(files: dict[str, str]) -> None:
    with ModelPipeline().add_stage("draft", **files) as pipeline:
        stream = pipeline.stream("go", temperature=0.0, max_tokens=200, ignore_eos=True)
        next(stream)
        assert in_a_fork(lambda: list(stream)).startswith(
            "RequestError: stage draft: request 0: the request had not ended"
        )
        assert in_a_fork(lambda: pipeline.run("go")).startswith(
            "EngineDead: stage draft: this client belongs to process"
        )
        assert in_a_fork(pipeline.shutdown) == "None"
        assert pipeline.run("go", max_tokens=4)["draft"].token_ids
        assert sum(len(output.token_ids) for output in stream) > 100
