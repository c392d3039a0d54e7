"""Ends that a program meets from outside: a killed engine, Ctrl-C, a dropped object, an engine over TCP."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.scripted_model import write_model
from tests.support.several_hosts import save_access
from tests.support.waiting import until

from wavecore import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDead,
    NotSupportedError,
    Overloaded,
    SamplingParams,
    ValidationError,
    connect,
)
from wavecore.transport.processes.deployment import read

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4)
DETECTION_SECONDS = 1.0


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return write_model(tmp_path, step_seconds=0.02)


def kill_engine(runtime_dir: Path) -> float:
    os.kill(read(runtime_dir).engines[0].pid, signal.SIGKILL)
    return time.monotonic()


async def test_killed_engine_ends_every_stream(files: dict[str, str]) -> None:
    async with await AsyncLLM.start(**files, max_num_seqs=64) as llm:
        begun = asyncio.Semaphore(0)

        async def read_all(i: int) -> float:
            with pytest.raises(EngineDead, match="signal 9"):
                async for _ in llm.generate([5, i + 1], LONG):
                    begun.release()
            return time.monotonic()

        tasks = [asyncio.create_task(read_all(i)) for i in range(50)]
        for _ in range(200):  # every stream has a token by then
            await begun.acquire()
        killed = kill_engine(llm.runtime_dir)
        ended = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert max(ended) - killed < DETECTION_SECONDS
        assert llm.num_unfinished == 0


def test_ctrl_c_leaves_nothing_and_the_next_call_works(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        timer = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, i + 1] for i in range(8)], LONG, use_tqdm=False)
        timer.join()
        assert llm._service.client.num_live == 0
        assert llm.generate([5, 6], SHORT, use_tqdm=False)[0].finished


async def test_overload_is_told_to_streams_and_waited_out_by_batches(files: dict[str, str]) -> None:
    with LLM(**files, max_num_seqs=1, max_num_queued_reqs=4) as llm:
        busy = AsyncLLM.connect(llm.runtime_dir)

        async def one(i: int) -> str:
            try:
                outputs = [o async for o in busy.generate([5, i + 1], SHORT)]
                return str(outputs[-1].outputs[0].finish_reason)
            except Overloaded:
                return "overloaded"

        tasks = [asyncio.create_task(one(i)) for i in range(30)]
        batch = await asyncio.to_thread(llm.generate, [[6, i + 1] for i in range(12)], SHORT, use_tqdm=False)
        ends = await asyncio.gather(*tasks)
        assert {"length", "overloaded"} == set(ends)
        assert [o.outputs[0].finish_reason for o in batch] == ["length"] * 12
        busy.shutdown()


def test_batch_gives_up_on_an_engine_that_takes_nothing(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecore.frontend.client.offline.REFUSED_SECONDS", 0.3)
    with LLM(**files, max_num_seqs=1, max_num_queued_reqs=1) as llm:
        with pytest.raises(ValidationError, match="queue of 1"):
            llm.generate([5], SamplingParams(n=2), use_tqdm=False)
        running = llm.stream([9, 9], LONG)
        next(running)
        waiting = threading.Thread(target=lambda: list(llm.stream([9, 8], SHORT)))
        waiting.start()
        until(lambda: len(llm.debug_requests()) == 2, "two requests in the engine")
        with pytest.raises(Overloaded):
            llm.generate([5, 6], SHORT, use_tqdm=False)
        running.close()
        waiting.join()
        assert llm.generate([5, 6], SHORT, use_tqdm=False)[0].finished


def test_client_in_a_fork_says_so(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                llm.generate([5], SHORT, use_tqdm=False)
            except EngineDead as error:
                os.write(write_end, str(error).encode())
            os._exit(0)
        os.close(write_end)
        os.waitpid(pid, 0)
        assert "belongs to process" in os.read(read_end, 1000).decode()
        os.close(read_end)
        assert llm.generate([5], SHORT, use_tqdm=False)[0].finished


def test_stream_that_nobody_reads_is_not_sent(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        stream = llm.stream([9, 9], LONG)
        assert llm._service.client.num_live == 0
        assert next(stream).outputs[0].token_ids
        del stream
        gc.collect()
        assert llm._service.client.num_live == 0


@pytest.mark.parametrize("turns", [0, 1, 100])
async def test_cancelled_start_leaves_nothing(tmp_path: Path, turns: int) -> None:
    files = write_model(tmp_path, load_seconds=60)
    before = set(psutil.Process().children())
    task = asyncio.create_task(AsyncLLM.start(**files))
    for _ in range(turns):
        await asyncio.sleep(0.01 if turns > 1 else 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    assert set(psutil.Process().children()) <= before


def test_dropped_object_ends_its_engine(files: dict[str, str]) -> None:
    llm = LLM(**files)
    pid, runtime_dir = read(llm.runtime_dir).engines[0].pid, llm.runtime_dir
    del llm
    gc.collect()
    until(lambda: not runtime_dir.exists(), "the end of its engine")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_stream_keeps_its_engine(files: dict[str, str]) -> None:
    tokens = [t for o in LLM(**files).stream([5, 6], SHORT) for t in o.outputs[0].token_ids]
    assert len(tokens) == 4


def test_object_that_dies_in_the_io_thread(files: dict[str, str]) -> None:
    """The collector runs where it likes, also in the thread that delivers, and between any two of its lines."""
    with LLM(**files) as llm:
        other = LLM.connect(llm.runtime_dir)
        client = other._service.client
        dropped = [other]
        del other
        client._pump.call_soon(lambda: (dropped.clear(), gc.collect()))
        until(lambda: client._closed, "the end of its client")
        assert llm.generate([5, 6], SHORT, use_tqdm=False)[0].finished


def test_attached_client_outlives_nothing(files: dict[str, str]) -> None:
    with LLM(**files) as llm:
        other = connect(llm.runtime_dir)
        begun, error = threading.Event(), []

        def stream() -> None:
            try:
                for _ in other.stream([7, 8], LONG):
                    begun.set()
            except EngineDead as dead:
                error.append(dead)

        thread = threading.Thread(target=stream)
        thread.start()
        assert begun.wait(30)
    thread.join(30)
    assert error
    with pytest.raises(EngineDead):
        other.generate([7], use_tqdm=False)
    other.shutdown()


def test_tcp_with_keys(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**files, address="tcp://127.0.0.1") as llm:
        entry = read(llm.runtime_dir).engines[0]
        assert entry.input.startswith("tcp://127.0.0.1:")
        first = llm.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        with connect(llm.runtime_dir) as other:
            assert other.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids == first


def test_an_access_file(files: dict[str, str], tmp_path: Path) -> None:
    """A client that sees nothing of the runtime directory; it outlives its engine, too."""
    with LLM(**files, address="tcp://127.0.0.1") as llm:
        file = save_access(llm.runtime_dir, tmp_path / "access.json")
        first = llm.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        with connect(file, tokenizer=files["tokenizer"]) as other:
            assert other.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids == first
            with pytest.raises(NotSupportedError, match=f"attached to {file}"):
                _ = other.runtime_dir
            stream = other.stream([5, 6], LONG)
            next(stream)
            kill_engine(llm.runtime_dir)
            with pytest.raises(EngineDead, match="restarted"):
                list(stream)
            assert other.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids == first

        async def ask() -> list[int]:
            async with AsyncLLM.connect(str(file)) as asking:
                return [t async for o in asking.generate([5, 6], SHORT) for t in o.outputs[0].token_ids]

        assert asyncio.run(ask()) == first


@pytest.mark.parametrize("named", ["tcp://127.0.0.1:5", ["/tmp", "tcp://127.0.0.1:5"], []])
def test_an_address_in_place_of_an_access_file(named: Any) -> None:
    with pytest.raises(ConfigError, match="give a directory, or an access file of `wavecore access`"):
        connect(named)


def test_deadlines_of_a_batch(files: dict[str, str]) -> None:
    with LLM(**files, max_num_seqs=1) as llm:
        for name in ("queue_timeout", "first_token_timeout"):
            busy = llm.stream([9, 9], LONG)
            next(busy)
            [late] = llm.generate([5, 1], SHORT, use_tqdm=False, **{name: 0.1})
            busy.close()
            assert late.outputs[0].finish_reason == "timeout"
        outputs: list[Any] = llm.generate([[5, 1], [5, 2]], LONG, use_tqdm=False, timeout=0.5)
        assert [o.outputs[0].finish_reason for o in outputs] == ["timeout", "timeout"]
        assert outputs[0].outputs[0].token_ids
        assert "timeout is 0.5" in outputs[0].outputs[0].stop_reason
        assert len(outputs[1].outputs[0].token_ids) <= 1  # it waited for the other nearly all the time
