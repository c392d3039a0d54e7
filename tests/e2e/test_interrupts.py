"""The collector, signal handlers and interrupts come at any moment: nothing hangs, and the next call works."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.opcodes import AtOpcode
from tests.support.scripted_model import write_model
from tests.support.waiting import until

from wavecore import LLM, AsyncLLM, SamplingParams, WavecoreError

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(**write_model(tmp_path_factory.mktemp("model"), step_seconds=0.001)) as llm:
        yield llm


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """It runs at nearly every allocation, in whatever thread that is."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


def leave_in_a_cycle(stream: Iterator[Any]) -> None:
    """Read something, fail, and keep the error: now only the collector can close the stream."""
    try:
        for _ in stream:
            raise ValueError("the reader's own")
    except ValueError as error:
        kept = error
        assert kept.__traceback__ is not None


def all_end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def generate(llm: LLM) -> None:
    llm.generate([[5, 6], [5, 7]], SHORT, use_tqdm=False)


def stream(llm: LLM) -> None:
    for _ in llm.stream([5, 6], SHORT):
        pass


def ask(llm: LLM) -> None:
    llm.step_stats()


def end_of(pid: int) -> int:
    """Its exit status; -9 if it had to be killed."""
    watch = threading.Timer(20, os.kill, [pid, signal.SIGKILL])
    watch.start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    watch.cancel()
    return status


def opcodes_of(call: Callable[[], object]) -> int:
    with AtOpcode(0, lambda: None) as traced:
        call()
    return traced.count


def test_streams_are_closed_by_the_collector_in_any_thread(llm: LLM, eager_collector: None) -> None:
    def read(name: int) -> None:
        for i in range(60):
            leave_in_a_cycle(llm.stream([5, name, i + 1], LONG))

    all_end([threading.Thread(target=read, args=[name + 1], daemon=True) for name in range(4)])
    gc.collect()
    assert llm._service.client.num_live == 0
    until(lambda: llm.debug_requests() == [], "the end of all requests in the engine")


def test_the_collector_closes_a_stream_in_the_io_thread(llm: LLM) -> None:
    """Whatever that thread is doing: here it delivers to the very stream."""
    client = llm._service.client
    for i in range(20):
        leave_in_a_cycle(llm.stream([5, 6, i + 1], LONG))
        client._pump.call_soon(gc.collect)
    generate(llm)
    assert client.num_live == 0


def test_asynchronous_streams_are_closed_by_the_collector(llm: LLM, eager_collector: None) -> None:
    async def left(attached: AsyncLLM, name: int) -> None:
        output = attached.generate([5, name, 9], LONG)
        await anext(output)
        loop_of_references = [output]
        loop_of_references.append(loop_of_references)  # type: ignore[arg-type]

    async def read(attached: AsyncLLM, name: int) -> None:
        for _ in range(10):
            await asyncio.gather(*(left(attached, name) for _ in range(4)))
        while attached.num_unfinished:
            gc.collect()
            await asyncio.sleep(0)
        assert not attached._by_id

    def run(name: int) -> None:
        attached = AsyncLLM.connect(llm.runtime_dir)
        try:
            asyncio.run(read(attached, name))
        finally:
            attached.shutdown()

    all_end([threading.Thread(target=run, args=[name + 1], daemon=True) for name in range(3)])
    until(lambda: llm.debug_requests() == [], "the end of all requests in the engine")


def test_a_loop_that_was_closed_reads_no_more(llm: LLM) -> None:
    """Nobody closes the streams that are left in it, the collector neither: their requests are aborted."""
    attached = AsyncLLM.connect(llm.runtime_dir)
    loop = asyncio.new_event_loop()
    left = attached.generate([5, 6], LONG)
    loop.run_until_complete(anext(left))
    loop.close()
    [mailbox] = attached._by_id.values()
    until(lambda: mailbox.ended, "the end of its request")
    output = mailbox.take()
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    assert attached.num_unfinished == 0
    del left
    attached.shutdown()


@pytest.mark.parametrize("call", [generate, stream, ask])
def test_an_interrupt_at_any_instruction_leaves_all_in_order(llm: LLM, call: Callable[[LLM], None]) -> None:
    def interrupt() -> None:
        raise Interrupt

    total = opcodes_of(lambda: call(llm))
    interrupted = 0
    for number in range(1, total, max(1, total // 150)):
        try:
            with AtOpcode(number, interrupt):
                call(llm)
        except Interrupt:
            interrupted += 1
        generate(llm)
    assert interrupted > 50
    gc.collect()
    until(lambda: llm._service.client.num_live == 0 and llm.debug_requests() == [], "the end of all requests")


@pytest.mark.parametrize("call", [generate, stream, ask])
def test_shutdown_at_any_instruction_ends_the_call(llm: LLM, call: Callable[[LLM], None]) -> None:
    """As from a signal handler; the interrupted call may be anywhere, also inside another shutdown."""
    total = opcodes_of(lambda: call(llm))
    for number in range(1, total, max(1, total // 40)):
        attached = LLM.connect(llm.runtime_dir)

        def use(attached: LLM = attached, number: int = number) -> None:
            try:
                with AtOpcode(number, attached.shutdown):
                    call(attached)
            except WavecoreError as error:
                assert "was closed" in str(error), error
            with AtOpcode(number, attached.shutdown):
                attached.shutdown()

        all_end([threading.Thread(target=use, daemon=True)])
        assert not attached._service.client._pump._thread.is_alive()
    generate(llm)


def test_shutdown_in_a_signal_handler_beside_a_loop(llm: LLM) -> None:
    """The loop's thread is in the handler and waits; nothing that it waits for needs the loop."""
    attached = AsyncLLM.connect(llm.runtime_dir)

    async def read(name: int) -> None:
        while True:
            async for _ in attached.generate([5, 6, name], LONG):
                pass

    async def read_all() -> list[BaseException]:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return await asyncio.gather(*(read(i + 1) for i in range(8)), return_exceptions=True)

    before = signal.signal(signal.SIGALRM, lambda *_: attached.shutdown())
    try:
        ends = asyncio.run(asyncio.wait_for(read_all(), 30))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert all(isinstance(end, WavecoreError) and "was closed" in str(end) for end in ends), ends


def test_shutdown_in_a_finaliser_of_the_user(llm: LLM) -> None:
    """The collector may run it in our own threads: the one that owns the sockets, and the one that owns the engine."""

    class Server:
        def __init__(self) -> None:
            self.llm = LLM.connect(llm.runtime_dir)
            self.itself = self

        def __del__(self) -> None:
            self.llm.shutdown()

    for _ in range(3):
        client = Server().llm._service.client
        client._pump.call_soon(gc.collect)
        client._pump.join(20)
        assert not client._pump._thread.is_alive()


@pytest.mark.parametrize("call", [generate, stream, ask])
def test_a_fork_at_any_instruction_ends_in_the_child(llm: LLM, call: Callable[[LLM], None]) -> None:
    """As from a signal handler: the child goes on in the middle of the call, and the parent notices nothing."""
    total = opcodes_of(lambda: call(llm))
    for number in range(1, total, max(1, total // 40)):
        children: list[int] = []
        try:
            with AtOpcode(number, lambda children=children: children.append(os.fork())):
                call(llm)
        except WavecoreError as error:
            if children[0] == 0:
                os._exit(int("belongs to process" not in str(error)))
            raise
        finally:
            if children == [0]:  # it had its answer before the fork
                os._exit(0)
        if children:
            assert end_of(children[0]) == 0
    generate(llm)
