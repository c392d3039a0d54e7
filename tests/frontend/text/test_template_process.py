"""The processes of chat templates: limits, life and death."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from tests.support.chat_templates import HANGS
from tests.support.chat_templates import template_processes as processes
from tests.support.waiting import until

from wavecore.frontend.text import template_process
from wavecore.frontend.text.template_process import (
    MAX_BUSY,
    MAX_IDLE,
    MAX_MEMORY,
    Answer,
    TemplateProcess,
    TemplateProcesses,
)
from wavecore.transport.errors import ResourceError

PROCESSES = TemplateProcesses()


@pytest.fixture(autouse=True)
def none_before_and_after() -> Iterator[None]:
    gc.collect()
    before = psutil.Process().children()
    yield
    PROCESSES.close()
    assert psutil.Process().children() == before


def ask(processes: TemplateProcesses, source: str) -> Answer:
    return processes.ask(json.dumps([source, []]), '[{}, {"messages": []}, false]')


def render(source: str) -> Answer:
    kind, answer = ask(PROCESSES, source)
    return kind, "".join(answer)


def test_a_process_is_kept_for_its_template() -> None:
    assert render("a") == render("a") == ("text", "a")
    [first] = processes()
    assert render("b") == ("text", "b")
    assert len(processes()) == 2 and first in processes()


def test_what_a_process_may_use() -> None:
    render("a")
    [process] = processes()
    assert process.rlimit(psutil.RLIMIT_AS) == (MAX_MEMORY, MAX_MEMORY)
    for nothing in (psutil.RLIMIT_NOFILE, psutil.RLIMIT_NPROC, psutil.RLIMIT_FSIZE, psutil.RLIMIT_CORE):
        assert process.rlimit(nothing) == (0, 0)
    soft, _ = process.rlimit(psutil.RLIMIT_CPU)
    assert 0 < soft < 10
    assert os.getsid(process.pid) == process.pid  # so a terminal's Ctrl-C does not reach it
    assert process.num_threads() == 1


def test_secrets_of_the_environment_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    render("a")
    [process] = processes()
    assert "MY_TOKEN" not in process.environ()


def test_a_process_that_died_is_replaced() -> None:
    render("a")
    [process] = processes()
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "its end")
    assert render("a") == ("text", "a")
    [other] = processes()
    assert other.pid != process.pid


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    kind, reason = render(HANGS)
    assert (kind, reason) == ("gone", "it took more than 1 s")
    assert not processes()


def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 1)
    render("a")
    [process] = processes()
    process.send_signal(signal.SIGSTOP)
    assert render("a") == ("gone", "it took more than 1 s")
    assert render("a") == ("text", "a")


def test_a_long_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_BYTES", 100_000)
    assert render("{{ 'a' * 90000 }}")[0] == "text"
    assert render("{{ 'a' * 100000 }}") == ("gone", "it made more than 100000 bytes of text")


@pytest.mark.parametrize("said", ["nothing", "[1", '["text"]', "7", "[" * 100_000])
def test_whatever_a_process_says_is_an_answer(said: str) -> None:
    process = TemplateProcess('["a", []]')
    process._started = True
    ours, theirs = template_process.socket.socketpair()
    process._socket.close()
    process._socket = ours
    theirs.sendall(said.encode() + b"\n")
    with theirs:
        assert process.ask("[]")[0] == "gone"
    process.end()


def test_few_stay_idle() -> None:
    for number in range(MAX_IDLE + 2):
        render(str(number))
    assert len(processes()) == MAX_IDLE
    [oldest, *_] = processes()
    render("2")  # was used least recently of those that are left
    assert oldest in processes()


def test_many_threads_at_once() -> None:
    seen: list[int] = []
    answers: list[tuple[str, str]] = []

    def chat(number: int) -> None:
        for source in ("same", f"{number % 3}"):
            answers.append(render(source))
            seen.append(len(processes()))

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted([("text", "same")] * 24 + [("text", str(n % 3)) for n in range(24)])
    assert max(seen) <= MAX_BUSY + MAX_IDLE + 1


def test_no_process_can_be_started() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    try:
        with pytest.raises(ResourceError, match="could not be started"):
            render("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held)
    assert render("a") == ("text", "a")


def test_a_python_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match="did not start"):
        render("a")


PROGRAM = """
import os, signal, sys
from wavecore.frontend.text.template_process import PROGRAM, TemplateProcesses
import psutil
own = TemplateProcesses()
def render(source):
    return own.ask(f'["{source}", []]', '[{}, {"messages": []}, false]')
def processes():
    return [p.pid for p in psutil.Process().children() if PROGRAM in p.cmdline()]
assert render("a") == ("text", ["a"])
[pid] = processes()
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + code], capture_output=True, text=True, check=False, timeout=60
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "end",
    ["sys.exit(0)", pytest.param("os._exit(0)", marks=pytest.mark.slow), "os.kill(os.getpid(), signal.SIGKILL)"],
)
def test_a_process_ends_with_its_program(end: str) -> None:
    pid = int(run(f"print(pid, flush=True); {end}"))
    until(lambda: not psutil.pid_exists(pid), "the end of the process")


def test_a_fork_has_processes_of_its_own() -> None:
    """It shares none with its parent, and does not keep the parent's alive."""
    code = """
read, write = os.pipe()
if not (fork := os.fork()):
    assert not processes()
    assert render("a") == ("text", ["a"])
    assert pid not in processes() and len(processes()) == 1
    sys.exit(0)
assert os.waitpid(fork, 0)[1] == 0
assert render("a") == ("text", ["a"]) and processes() == [pid]
if not os.fork():
    os.close(1), os.close(2)
    signal.pause()
print(pid, [p.pid for p in psutil.Process().children() if p.pid != pid][0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pid, fork = map(int, run(code).split())
    try:
        until(lambda: not psutil.pid_exists(pid), "the end of the process, although a fork lives")
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_signal_handler_may_close() -> None:
    """Who waits for an answer meanwhile hears that there is none; nothing is left, and the next chat is well."""
    code = """
from wavecore.transport.errors import ResourceError
signal.signal(signal.SIGALRM, lambda *_: own.close())
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.003)
for i in range(6):
    try:
        kind, answer = render(i % 2)
    except ResourceError as error:
        kind, answer = "gone", "did not start"
    assert (kind, answer) == ("text", [str(i % 2)]) or kind == "gone" and answer, (kind, answer)
signal.setitimer(signal.ITIMER_REAL, 0)
own.close()
assert not processes()
print(*render("a")[1])
"""
    assert run(code) == "a\n"


def test_closing_ends_one_that_is_busy() -> None:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask(PROCESSES, HANGS)))
    render("a")
    thread.start()
    until(lambda: PROCESSES._busy and next(iter(PROCESSES._busy))._started, "its start")
    PROCESSES.close()
    thread.join()
    assert [kind for kind, _ in answers] == ["gone"] and not processes()


def test_processes_end_with_their_owner() -> None:
    own = TemplateProcesses()
    assert ask(own, "a") == ("text", ["a"])
    [process] = processes()
    del own
    gc.collect()
    assert not process.is_running()
