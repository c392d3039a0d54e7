"""The commands where something around them is odd: streams, signals, folders. One line, and a documented exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.support.scripted_model import EOS, ids_of, write_model
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "wavecore.frontend.cli.main"]
ANSWER = "Paris – of course."
GENERATION = 1  # <|im_start|>, the first token of a conversation
DISK_FULL = "cannot use the output: No space left on device"
CLOSED = "cannot use the output: Bad file descriptor"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    scripts = {GENERATION: [*ids_of(ANSWER), EOS]}
    files = write_model(tmp_path_factory.mktemp("model"), scripts)
    return ["--model", files["model"], "--tokenizer", files["tokenizer"]]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Answers without an end."""
    files = write_model(tmp_path_factory.mktemp("slow"), {GENERATION: ids_of("a " * 120)}, step_seconds=0.05)
    return ["--model", files["model"], "--tokenizer", files["tokenizer"]]


def shell(line: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it; `line` has "wavecore", redirections, and ARGS where `args` go."""
    script = line.replace("wavecore", f"{sys.executable} -m wavecore.frontend.cli.main", 1).replace(" ARGS", ' "$@"')
    command = ["bash", "-c", script, "bash", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("command", ["--version", "--help", "generate --help", "engine --print_config"])
@pytest.mark.parametrize(("where", "words"), [(">/dev/full", DISK_FULL), (">&-", CLOSED)])
def test_output_that_cannot_be_written(command: str, where: str, words: str) -> None:
    done = shell(f"wavecore {command} {where}")
    assert done.returncode == 3
    assert one_line(done) == f"wavecore {command.split()[0]}: {words}"


@pytest.mark.parametrize("command", ["generate hi", "chat", "engine", "bench offline --num-prompts 1"])
def test_an_answer_that_cannot_be_written(flags: list[str], command: str) -> None:
    done = shell(f"wavecore {command} ARGS >/dev/full", *flags, stdin="hi\n")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"wavecore {command.split()[0]}: {DISK_FULL}"


def test_all_streams_closed(flags: list[str]) -> None:
    assert shell("wavecore generate hi ARGS >&- 2>&- <&-", *flags).returncode == 3
    done = shell("wavecore generate hi ARGS 2>&- <&-", *flags)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")


def test_the_reader_of_the_output_leaves(flags: list[str]) -> None:
    done = shell("wavecore generate hi ARGS | true; exit ${PIPESTATUS[0]}", *flags)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_full_pipe_that_does_not_block() -> None:
    """The output waits until it is read, and nothing of it is lost."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    filling = os.write(write, bytes(1 << 20))
    process = subprocess.Popen([*COMMAND, "--help"], stdout=write)
    until(lambda: os.get_blocking(write), "a pipe that the command can wait for")
    os.close(write)
    with process, os.fdopen(read, "rb") as answer:
        assert answer.read()[filling:].startswith(b"usage: wavecore COMMAND")
    assert process.returncode == 0


@pytest.mark.parametrize("variables", ["PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"])
def test_an_output_that_knows_ascii_alone(flags: list[str], variables: str) -> None:
    done = shell(f"{variables} wavecore generate hi ARGS", *flags)
    assert (done.returncode, done.stdout) == (0, "Paris \\u2013 of course.\n"), done.stderr


def test_input_that_is_no_text_or_closed(flags: list[str]) -> None:
    done = shell(r"printf 'a\xff' | wavecore generate - ARGS", *flags)
    assert done.returncode == 2
    assert "wavecore generate: prompt: " in one_line(done)
    done = shell(r"printf 'a\xff\nhi\n' | wavecore chat ARGS", *flags)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), "the next line does better"
    done = shell("wavecore generate - <&-")
    assert (done.returncode, "prompt: is empty" in one_line(done)) == (2, True)
    assert shell("wavecore chat ARGS <&-", *flags).returncode == 0


@pytest.mark.parametrize(
    ("folder", "words"),
    [("/proc/nowhere", "No such file"), pytest.param("/etc/passwd", "File exists", marks=pytest.mark.slow)],
)
def test_a_cache_that_cannot_be_made(folder: str, words: str) -> None:
    done = shell(f"WAVECORE_CACHE={folder} wavecore generate hi")
    assert done.returncode == 3
    line = one_line(done)
    assert line.startswith("wavecore generate: the folder for fetched models cannot be made: ")
    assert words in line and "set WAVECORE_CACHE" in line


def test_a_relative_runtime_folder_does_not_count_and_a_home_is_not_needed(flags: list[str], tmp_path: Path) -> None:
    done = shell(f"cd {tmp_path}; unset HOME; XDG_RUNTIME_DIR=here wavecore generate hi ARGS", *flags)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_figures_that_cannot_be_written(flags: list[str]) -> None:
    done = shell("wavecore bench offline ARGS --num-prompts 1 --output-json /no/such/file", *flags)
    assert done.returncode == 3
    assert one_line(done) == "wavecore bench: cannot use /no/such/file: No such file or directory"


@contextmanager
def answering(slow: list[str], *before: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """`wavecore generate` in the midst of an answer, and its engine."""
    command = [*before, *COMMAND, "generate", "hi", *slow]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        [engine] = [p for p in psutil.Process(process.pid).children() if "wavecore engine" in " ".join(p.cmdline())]
        yield process, engine
        process.kill()
    until(lambda: not engine.is_running(), "the end of the engine")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_an_answer(slow: list[str], number: signal.Signals, code: int) -> None:
    with answering(slow) as (process, _):
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code
    interrupted, ended = "wavecore generate: interrupted", f"wavecore: ended by {number.name}"
    assert err.splitlines() == [interrupted if number == signal.SIGINT else ended]


def test_nohup(slow: list[str]) -> None:
    with answering(slow, "nohup") as (process, _):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_again_and_again_end_at_once(slow: list[str], number: signal.Signals) -> None:
    """The engine is stopped, so that an end in order would take its time."""
    with answering(slow) as (process, engine):
        engine.suspend()
        while process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        _, err = process.communicate(timeout=30)
    # Of its last milliseconds Python gives signals back to the system, which a shell shows in the same way.
    assert process.returncode in (128 + number, -number), err
    assert "Traceback" not in err and "ignored" not in err


def test_a_signal_while_the_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, "engine"], stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "wavecore: ended by SIGTERM\n")


def test_how_an_engine_ended_is_known_though_sigchld_was_ignored(slow: list[str]) -> None:
    """By whoever started the command."""
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with answering(slow, sys.executable, "-c", ignore) as (process, engine):
        engine.send_signal(signal.SIGSEGV)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "was ended by signal 11 (SIGSEGV): native code crashed" in err


def test_a_program_that_ignores_sigchld_is_told_what_can_be_known(slow: list[str]) -> None:
    script = """
import os, signal, sys
from wavecore import LLM, EngineDead
from wavecore.transport.processes.deployment import read
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with LLM(sys.argv[1], tokenizer=sys.argv[2]) as llm:
    stream = llm.stream([1])
    next(stream)
    os.kill(read(llm.runtime_dir).engines[0].pid, signal.SIGSEGV)
    try:
        list(stream)
    except EngineDead as error:
        print(error)
"""
    command = [sys.executable, "-c", script, slow[1], slow[3]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "ended; this program ignores SIGCHLD, which hides how" in done.stdout
    assert "its last line was: Fatal Python error: Segmentation fault" in done.stdout
