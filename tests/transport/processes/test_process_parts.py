"""The small parts of supervision, without processes: back-off, why a process ended, lines, the log writer."""

from __future__ import annotations

import gc
import io
import math
import os
import re
import threading
from pathlib import Path

import pytest

from wavecore.transport.processes.group import Backoff
from wavecore.transport.processes.logs import LineWriter
from wavecore.transport.processes.process import ChildSpec, LineReader, explain_end, oom_kills, python_path
from wavecore.transport.processes.stall import TICK_SECONDS, ProgressPage, StallWatch


def test_back_off_doubles_to_a_minute_and_never_gives_up_a_child_that_was_ready() -> None:
    backoff = Backoff()
    delays = [backoff.ended(1.5 * i, was_ready=True) for i in range(2000)]
    assert delays == [1, 2, 4, 8, 16, 32] + [60] * 1994


def test_back_off_is_forgotten_after_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.ended(180.0 * i, was_ready=True) for i in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.ended(10_000, was_ready=True) == 1


def test_five_failed_starts_in_a_row_are_the_last() -> None:
    backoff = Backoff()
    assert backoff.ended(0, was_ready=True) == 1
    assert [backoff.ended(60.0 * i, was_ready=False) for i in range(1, 5)] == [2, 4, 8, 16]
    assert backoff.ended(300, was_ready=True) == 32  # a start that works forgives those that failed
    assert [backoff.ended(300 + 900.0 * i, was_ready=False) for i in range(1, 6)] == [1, 1, 1, 1, None]


@pytest.mark.parametrize(
    ("returncode", "output", "before", "reason"),
    [
        (-9, [], 0, r"signal 9 \(SIGKILL\): the kernel ran out of memory and killed it; buy more"),
        (-9, [], 7, r"signal 9 \(SIGKILL\): somebody killed it"),
        (-11, [], 7, r"signal 11 \(SIGSEGV\): native code crashed"),
        (-4, [], 7, "instruction that this CPU lacks"),
        (-7, [], 7, "/dev/shm"),
        (-40, [], 7, r"signal 40 \(a real-time signal\)"),
        (
            127,
            ["x: error while loading shared libraries: libz.so.1: cannot open shared object file"],
            7,
            "libz.so.1 is",
        ),
        (1, ["ModuleNotFoundError: No module named 'zmq'"], 7, "package zmq is not installed"),
        (3, ["first", "last words", ""], 7, "status 3; its last line was: last words"),
        (0, [], 7, "exited with status 0 without a word"),
    ],
)
def test_a_death_is_explained(
    monkeypatch: pytest.MonkeyPatch, returncode: int, output: list[str], before: int, reason: str
) -> None:
    monkeypatch.setattr("wavecore.transport.processes.process.oom_kills", lambda: 7)
    spec = ChildSpec("engine 0", "module", "", memory_advice="buy more")
    text = explain_end(spec, 123, returncode, output, before)
    assert text.startswith("engine 0 (pid 123) ")
    assert re.search(reason, text), text


def test_the_kernels_oom_count_is_a_number() -> None:
    assert oom_kills() >= 0


def test_lines_of_a_pipe() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    lines = LineReader(read)
    assert lines.read() == []
    os.write(write, b"one\ntw")
    assert lines.read() == ["one"]
    os.write(write, b"o\r 50%\r100%\r\nthree\xff")
    assert lines.read() == ["two", " 50%", "100%"]
    os.close(write)
    assert lines.read() == ["three�"]
    assert lines.ended
    assert list(lines.tail) == ["one", "two", " 50%", "100%", "three�"]
    os.close(read)


def test_a_finaliser_may_log_in_the_middle_of_a_log_line() -> None:
    stream = io.StringIO()
    writer = LineWriter(lambda: stream, limit=100_000)

    class Talkative:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            writer.put("collected")

    def log() -> None:
        for i in range(500):
            Talkative()
            writer.put(f"line {i}")

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=log, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        gc.set_threshold(*before)
    writer.close()
    assert stream.getvalue().count("line ") == 500
    assert stream.getvalue().count("collected") > 300


def test_a_line_without_an_end_is_cut() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    lines = LineReader(read)
    got: list[str] = []
    for _ in range(40):
        os.write(write, b"x" * 60_000)
        got += lines.read()
    os.close(read)
    os.close(write)
    assert sum(map(len, got)) > 1 << 20


def test_a_blocked_log_drops_lines_and_says_how_many() -> None:
    class Blocked(io.StringIO):
        def write(self, text: str) -> int:
            entered.set()
            gate.wait(30)
            return super().write(text)

    gate, entered, stream = threading.Event(), threading.Event(), Blocked()
    writer = LineWriter(lambda: stream, limit=10)
    writer.put("first")
    entered.wait(30)
    for i in range(25):
        writer.put(f"line {i}")
    gate.set()
    writer.close(30)
    text = stream.getvalue()
    assert "(15 log lines dropped" in text
    assert "line 9\n" in text
    assert "line 10\n" not in text


def test_a_broken_log_is_no_error() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    stream = Broken()
    writer = LineWriter(lambda: stream)
    writer.put("x")
    writer.close(30)


def test_progress_page_and_stall_watch() -> None:
    """This very process is watched; its main thread runs while it asks."""
    fd = ProgressPage.create_fd()
    writer, reader = ProgressPage(fd), ProgressPage(fd)
    os.close(fd)
    writer.helper(5)
    assert reader.words.helper == 5
    watch = StallWatch(os.getpid(), reader, idle_seconds=TICK_SECONDS, step_seconds=3 * TICK_SECONDS)
    assert [watch.tick(bool(reader.words.busy)) for _ in range(5)] == [None] * 5  # idle is never stuck
    writer.busy(True)
    for _ in range(5):
        writer.beat()
        assert watch.tick(bool(reader.words.busy)) is None
    assert [watch.tick(bool(reader.words.busy)) for _ in range(2)] == [None] * 2
    reason = watch.tick(bool(reader.words.busy))
    assert reason is not None
    assert "computed for 1.5 s" in reason
    writer.expect(4.25 * TICK_SECONDS / 10)  # ten times as long is more than the limit
    writer.beat()
    watch.tick(bool(reader.words.busy))
    assert [watch.tick(bool(reader.words.busy)) for _ in range(4)] == [None] * 4
    assert "computed for 2.5 s" in str(watch.tick(bool(reader.words.busy)))
    writer.expect(math.inf)
    writer.beat()
    assert reader.words.expected_ms > 1e9
    endless = StallWatch(os.getpid(), reader, idle_seconds=math.inf, step_seconds=math.inf)
    assert [endless.tick(True) for _ in range(9)] == [None] * 9
    writer.close()
    reader.close()


def test_a_path_from_here_means_the_same_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what a child starts elsewhere. Without any there is no empty entry, which would be that folder."""
    monkeypatch.chdir(tmp_path)
    *own, relative, absolute = python_path(os.pathsep.join(("src", "/site"))).split(os.pathsep)
    assert [relative, absolute] == [str(tmp_path / "src"), "/site"]
    assert python_path("") == os.pathsep.join(own)
    assert all(Path(path).is_absolute() for path in own)
