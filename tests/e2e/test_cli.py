"""The commands as a user runs them, on the scripted model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.scripted_model import EOS, ids_of, write_model
from tests.support.waiting import two_free_ports

from wavecore import SamplingParams, connect

COMMAND = [sys.executable, "-m", "wavecore.frontend.cli.main"]
GENERATION = 1  # <|im_start|>, the first token of a conversation


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    files = write_model(tmp_path_factory.mktemp("model"), {GENERATION: [*ids_of("Paris, of course."), EOS]})
    return ["--model", files["model"], "--tokenizer", files["tokenizer"], "--max-num-seqs", "4"]


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def engine(flags: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([*COMMAND, "engine", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.communicate()


def test_generate_streams_an_answer(flags: list[str]) -> None:
    done = run("generate", "What is the capital of France?", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Paris, of course.\n"
    assert "time to first token" in done.stderr
    assert "tokens/s" in done.stderr


def test_generate_options(flags: list[str]) -> None:
    done = run("generate", "-", *flags, "--max-tokens", "3", "--stop", '["x"]', "--system", "Be brief.", stdin="hi")
    assert done.returncode == 0, done.stderr
    assert "(3 tokens, finish reason length)" in done.stderr
    assert run("generate", "--raw", "abc", *flags, "--max-tokens", "2").returncode == 0


def test_chat_keeps_the_history(flags: list[str]) -> None:
    done = run("chat", *flags, stdin="hi\nand again\n/reset\n\nthird\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Paris, of course."] * 3


def test_chat_goes_on_after_a_conversation_that_is_too_long(flags: list[str]) -> None:
    done = run("chat", *flags, stdin=f"{'long ' * 300}\n/reset\nhi\n")
    assert done.returncode == 0, done.stderr
    assert "max_model_len" in done.stderr
    assert done.stdout.splitlines() == ["Paris, of course."]


def test_chat_goes_on_after_the_death_of_its_engine(tmp_path: Path) -> None:
    answer = [*ids_of("Paris, of course."), EOS]
    files = write_model(tmp_path, {GENERATION: answer}, step_seconds=0.05)
    command = [*COMMAND, "chat", "--model", files["model"], "--tokenizer", files["tokenizer"]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("hi\n")
        chat.stdin.flush()
        begun = chat.stdout.read(1)
        [engine] = [p for p in psutil.Process(chat.pid).children() if "wavecore engine" in " ".join(p.cmdline())]
        engine.kill()
        out, err = chat.communicate("and again\n", timeout=60)
    assert chat.returncode == 0, err
    assert (begun + out).endswith("Paris, of course.\n")
    assert err.count("Traceback") == 0
    assert "signal 9" in err
    assert "it is being restarted" in err


def test_engine_serves_others_and_ends_on_a_signal(flags: list[str]) -> None:
    with engine(flags) as (process, runtime_dir):
        assert Path(runtime_dir).is_dir()
        done = run("generate", "hi", "--attach", runtime_dir)
        assert done.stdout == "Paris, of course.\n", done.stderr
        with connect(runtime_dir) as llm:
            params = SamplingParams(temperature=0, max_tokens=20)
            assert llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)[0].outputs[0].text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not Path(runtime_dir).exists()


def test_attach_by_an_access_file(flags: list[str], tmp_path: Path) -> None:
    address, file = f"tcp://127.0.0.1:{two_free_ports()}", tmp_path / "access.json"
    with engine([*flags, "--address", address]) as (process, runtime_dir):
        assert process.stdout is not None
        told = process.stdout.readline() + process.stdout.readline()
        assert f"from other hosts: wavecore access {runtime_dir} > access.json" in told
        with file.open("w") as out:
            subprocess.run([*COMMAND, "access", runtime_dir], stdout=out, check=True)
        assert file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text())["engines"][0]["input"] == address
        done = run("generate", "hi", "--attach", str(file), "--tokenizer", flags[3])
        assert done.stdout == "Paris, of course.\n", done.stderr
        file.chmod(0o640)
        done = run("generate", "hi", "--attach", str(file))
        assert (done.returncode, f"chmod 600 {file}" in done.stderr) == (2, True)


def test_bench_offline(flags: list[str], tmp_path: Path) -> None:
    done = run("bench", "offline", *flags, "--num-prompts", "6", "--input-len", "8", "--output-len", "4")
    assert done.returncode == 0, done.stderr
    assert "output tokens                   24" in done.stdout
    for words in ("total tokens/s", "time to first token", "time per token", "schedule, a step"):
        assert words in done.stdout
    work = tmp_path / "work.json"
    work.write_text(json.dumps([{"prompt_token_ids": [5, 6], "max_tokens": 3}, {"prompt": "abc", "max_tokens": 2}]))
    figures = tmp_path / "figures.json"
    done = run("bench", "offline", *flags, "--workload", str(work), "--output-json", str(figures))
    assert done.returncode == 0, done.stderr
    assert json.loads(figures.read_text())["output_tokens"] == 5
    assert json.loads(figures.read_text())["counters"][0]["output_tokens"] == 5
    work.write_text("{}")
    done = run("bench", "offline", *flags, "--workload", str(work))
    assert done.returncode == 2
    assert "holds no list of requests" in done.stderr


def test_bench_of_a_request_that_fails_is_no_figure(tmp_path: Path) -> None:
    model = write_model(tmp_path, faults={"nan_token": 7})["model"]
    work = tmp_path / "work.json"
    work.write_text(json.dumps([{"prompt_token_ids": [first, 6], "max_tokens": 3} for first in (5, 7)]))
    done = run("bench", "offline", "--model", model, "--skip-tokenizer-init", "true", "--workload", str(work))
    assert done.returncode != 0
    assert "seconds" not in done.stdout
    assert "NaN" in done.stderr


def test_exit_codes_and_one_line_errors(flags: list[str], tmp_path: Path) -> None:
    done = run("generate", "hi", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 4
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("generate", "hi", "--attach", str(tmp_path)).returncode == 5
    assert run("generate", "x" * 100_000, *flags).returncode == 2
