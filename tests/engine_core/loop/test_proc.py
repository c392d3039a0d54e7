"""The main loop between its queue and its output, without threads or sockets in use."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import CLIENT, SchedulerDriver, make_add

from wavecore.engine_core.loop import proc as proc_module
from wavecore.engine_core.loop.proc import EngineCoreProc, StopIn
from wavecore.transport.errors import WavecoreError
from wavecore.transport.io.output_pump import ClientGone
from wavecore.transport.wire.messages import StepTokens, Utility

OTHER, GONE = b"o" * 16, b"g" * 16


class Recorder:
    """The child's progress page and the output thread in one: what happened, in order."""

    def __init__(self) -> None:
        self.progress = self
        self.seen: list[Any] = []
        self.is_busy = True
        self.unread: list[int] = []  # bytes, as they are asked for

    def beat(self) -> None:
        self.seen.append("beat")

    def busy(self, busy: bool) -> None:
        self.is_busy = busy

    def put(self, outputs: dict[bytes, StepTokens]) -> None:
        self.seen.append(("tokens", int(sum(output.counts.sum() for output in outputs.values()))))

    def held_bytes(self, client_id: bytes) -> int:
        return self.unread.pop() if self.unread and client_id == CLIENT else 0

    def put_result(
        self, client_id: bytes, call: int, value: Any = None, frames: Any = (), error: WavecoreError | None = None
    ) -> None:
        assert self.is_busy
        self.seen.append((client_id, call, error))

    @property
    def calls(self) -> list[tuple[bytes, int]]:
        return [entry[:2] for entry in self.seen if isinstance(entry, tuple) and isinstance(entry[0], bytes)]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineCoreProc, Recorder, SchedulerDriver]]:
    """A loop in which each turn has time for two calls."""
    driver = SchedulerDriver(Script(vocab_size=97, eos_token_id=[], max_model_len=512), max_logprobs=-1)
    recorder = Recorder()
    proc: Any = EngineCoreProc(
        driver.core,
        recorder,  # type: ignore[arg-type]
        resolved={},
        input_address=f"ipc://{tmp_path}/i",
        output_address=f"ipc://{tmp_path}/o",
        curve=None,
    )
    output, proc._output = proc._output, recorder
    now = [0.0]

    def call(_method: str, _args: Any) -> Any:
        now[0] += proc_module._CALL_SECONDS / 2
        return True, []

    monkeypatch.setattr(driver.core.utilities, "call", call)
    monkeypatch.setattr(proc_module.time, "monotonic", lambda: now[0])
    yield proc, recorder, driver
    monkeypatch.undo()
    proc._input.close()
    output.close()


def ask(proc: EngineCoreProc, client_id: bytes, calls: range) -> None:
    for call in calls:
        proc.input_queue.put(Utility(b"", client_id, 0, call, "stats"))


def test_many_calls_stop_no_stream_and_every_call_is_progress(loop: Any) -> None:
    proc, recorder, driver = loop
    driver.add(0, [1] * 5, max_tokens=30)
    ask(proc, CLIENT, range(400))
    proc.input_queue.put(StopIn(drain=True))
    proc.run_busy_loop()
    first, last = recorder.seen.index(("tokens", 1)), len(recorder.seen)
    between = recorder.seen[first:last]
    assert sum(entry == ("tokens", 1) for entry in between) == 30
    assert len(recorder.calls) < 80  # two a turn
    assert between.count("beat") >= len(between) // 2 - 1  # one for each call and each step


def test_clients_take_turns_with_their_calls(loop: Any) -> None:
    proc, recorder, driver = loop
    driver.add(0, [1] * 5, max_tokens=30)
    ask(proc, CLIENT, range(10))
    ask(proc, OTHER, range(3))
    ask(proc, GONE, range(10))
    proc.input_queue.put(ClientGone(GONE))
    proc.input_queue.put(StopIn(drain=True))
    proc.run_busy_loop()
    turns = [client for client, _ in recorder.calls]
    assert turns == [CLIENT, OTHER, CLIENT, OTHER, CLIENT, OTHER, *[CLIENT] * 7]
    assert [call for client, call in recorder.calls if client == CLIENT] == list(range(10))


def test_calls_are_made_without_requests_too(loop: Any) -> None:
    proc, recorder, driver = loop
    made = driver.core.utilities.call

    def stop_after_the_last(method: str, args: Any) -> Any:
        if len(recorder.calls) == 9:
            proc.input_queue.put(StopIn(drain=True))
        return made(method, args)

    driver.core.utilities.call = stop_after_the_last
    ask(proc, CLIENT, range(10))
    proc.run_busy_loop()
    assert recorder.calls == [(CLIENT, call) for call in range(10)]


def test_a_call_that_fails_again_and_again_logs_one_traceback(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    proc, recorder, driver = loop

    def fail(_method: str, _args: Any) -> Any:
        if len(recorder.calls) == 19:
            proc.input_queue.put(StopIn(drain=True))
        raise AssertionError("block 7 has two owners")

    driver.core.utilities.call = fail
    ask(proc, CLIENT, range(20))
    proc.run_busy_loop()
    assert len(recorder.calls) == 20
    assert all("block 7" in str(entry[2]) for entry in recorder.seen if entry != "beat")
    [record] = [record for record in caplog.records if "Traceback" in record.getMessage()]
    assert record.levelname == "ERROR"


def test_updates_of_several_clients_take_turns_and_one_that_left_keeps_nobody_out(loop: Any) -> None:
    proc, recorder, _ = loop
    for client, item in (
        (GONE, "begin"),
        (OTHER, "begin"),
        (GONE, ""),
        (OTHER, "begin"),
        (OTHER, "end"),
        (CLIENT, "begin"),
    ):
        proc._handle(Utility(b"", client, 0, 0, f"{item}_update") if item else ClientGone(client))
        proc._make_calls()
    told = [(client, error is None) for client, _, error in (entry for entry in recorder.seen if entry != "beat")]
    assert told == [(GONE, True), (OTHER, False), (OTHER, True), (OTHER, True), (CLIENT, True)]


@pytest.mark.parametrize("other", [False, True])
def test_a_client_with_much_to_read_gets_no_more_reports_and_to_wait_for_it_is_no_hang(loop: Any, other: bool) -> None:
    """Its requests would end for what waits for it; those of others, and its own without reports, go on."""
    proc, recorder, driver = loop
    for handle, logprobs in enumerate((-1, 64)):
        driver.add(handle, [1] * 5, max_tokens=6, logprobs=logprobs)
    if other:
        driver.add(2, [2] * 5, client=OTHER, max_tokens=6, logprobs=-1)
    recorder.unread = [proc_module._BEHIND_BYTES + 1] * 30
    proc.input_queue.put(StopIn(drain=True))
    proc.run_busy_loop()
    last = max(i for i, entry in enumerate(recorder.seen[:-7]) if entry == "beat")
    tokens = [entry[1] for entry in recorder.seen if isinstance(entry, tuple)]
    assert tokens == [1 + other] * 6 + [1] * 6, "who waits gets its tokens behind all others"
    assert recorder.seen.count("beat") >= 30 and last > 20


def test_requests_that_come_together_begin_together(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, recorder, driver = loop
    first, *others = [driver.core.admit(make_add(handle, [1] * 5, max_tokens=1)) for handle in range(4)]

    def sleep(_: float) -> None:
        """The input thread hands one more over; the last one ends what came together."""
        proc.input_queue.put(others.pop())
        proc._input.busy = bool(others)

    monkeypatch.setattr(proc_module.time, "sleep", sleep)
    proc._input.busy = True
    proc.input_queue.put(first)
    while not any(isinstance(entry, tuple) for entry in recorder.seen):
        turn(proc)
    assert recorder.seen[-1] == ("tokens", 4)


def test_a_request_waits_a_moment_for_others_and_no_longer(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, recorder, driver = loop
    looks: list[float] = []
    monkeypatch.setattr(proc_module.time, "sleep", looks.append)
    monkeypatch.setattr(proc_module.time, "monotonic", lambda: sum(looks))
    proc._input.busy = True  # for ever
    proc.input_queue.put(driver.core.admit(make_add(0, [1] * 5, max_tokens=1)))
    while ("tokens", 1) not in recorder.seen:
        turn(proc)
    assert sum(looks) == pytest.approx(proc_module._BURST_SECONDS, abs=proc_module._LOOK_SECONDS)


def turn(proc: EngineCoreProc) -> None:
    """One turn of the loop."""
    proc._process_input_queue(moved=True)
    if outputs := proc.core.step()[0]:
        proc._output.put(outputs)


def test_an_idle_turn_waits_for_a_quiet_moment(loop: Any) -> None:
    """It may take 50 ms, which a request that comes meanwhile would wait for."""
    proc, _, driver = loop
    driver.runner.uses = 1
    request = driver.core.admit(make_add(0, [1] * 5, max_tokens=3))
    captures: list[int] = []

    class Arrivals(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            """A request, nothing for a moment, and the end."""
            captures.append(driver.runner.captures)
            if len(captures) == 2:
                assert driver.core.requests.totals.output_tokens == 3
                raise queue.Empty
            return request if len(captures) == 1 else StopIn(drain=True)

    proc.input_queue = Arrivals()
    proc.run_busy_loop()
    assert captures == [0, 0, 1]
