"""What a user sees of the logs: nothing while all is well, and whatever `log_level` asks for."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.scripted_model import write_model

from wavecore import LLM, ConfigError, EngineConfig, connect
from wavecore.frontend.compat import engine_config
from wavecore.transport.processes import logs

PREEMPTS = """
from wavecore import LLM, SamplingParams
with LLM({model!r}, tokenizer={tokenizer!r}, block_size=4, num_gpu_blocks_override=12, max_num_seqs=4{more}) as llm:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm.generate([[7, i] * 4 for i in range(4)], params)
    print(llm.step_stats()[0]["preemptions"])
"""


def stderr_of(files: dict[str, str], more: str = "", **environment: str) -> str:
    """Of a program in which requests push each other out: steps are slow enough that they run together."""
    script = PREEMPTS.format(**files, more=more)
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True, timeout=60
    )
    assert int(done.stdout) > 0
    return done.stderr


def test_quiet_by_default(tmp_path: Path) -> None:
    assert stderr_of(write_model(tmp_path, step_seconds=0.01)) == ""


@pytest.mark.parametrize("way", ["setting", "variable"])
def test_preemptions_are_told_at_info(tmp_path: Path, way: str) -> None:
    files = write_model(tmp_path, step_seconds=0.01)
    text = stderr_of(files, ', log_level="info"') if way == "setting" else stderr_of(files, WAVECORE_LOG_LEVEL="INFO")
    assert re.search(r"INFO \[\d+ engine 0\] wavecore\S+: preempted request \d", text)


@pytest.fixture
def own_logger() -> Iterator[logging.Logger]:
    """As at a program's start, before the test and after it."""
    logger = logging.getLogger("wavecore")
    logger.setLevel(logging.NOTSET)  # other tests of this process may have asked for another
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers = []
    logger.setLevel(logging.NOTSET)


def test_the_clients_lines(
    own_logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a program without logging of its own
    logs.show("warning")
    assert (own_logger.level, own_logger.handlers) == (logging.NOTSET, []), "a program's own set-up stays"
    logs.show("debug")
    logs.show("debug")
    [handler] = own_logger.handlers
    logging.getLogger("wavecore.frontend.client.client").debug("the engine is %s", "gone")
    handler.close()
    assert re.search(
        r"DEBUG \[\d+ client\] wavecore.frontend.client.client: the engine is gone\n", capsys.readouterr().err
    )
    logs.show("error")
    assert not logging.getLogger("wavecore.frontend").isEnabledFor(logging.WARNING)


def test_a_program_with_logging_of_its_own_keeps_it(own_logger: logging.Logger) -> None:
    assert logging.getLogger().handlers, "pytest has some"
    logs.show("info")
    assert own_logger.handlers == []
    assert own_logger.isEnabledFor(logging.INFO)


def test_a_client_that_attaches_has_the_variable(
    tmp_path: Path, own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(**write_model(tmp_path, step_seconds=0.01)) as llm:
        monkeypatch.setenv("WAVECORE_LOG_LEVEL", "debug")
        monkeypatch.setenv("WAVECORE_MAX_NUM_SEQS", "not of its concern")
        connect(llm.runtime_dir).shutdown()
        assert own_logger.level == logging.DEBUG
        monkeypatch.setenv("WAVECORE_LOG_LEVEL", "loud")
        with pytest.raises(ConfigError, match="WAVECORE_LOG_LEVEL in the environment must be one of debug, info"):
            connect(llm.runtime_dir)


def test_names_of_levels() -> None:
    assert (
        engine_config({"log_level": "INFO"}) == engine_config({"log_level": "info"}) == EngineConfig(log_level="info")
    )
    with pytest.raises(ConfigError, match="log_level must be one of debug, info, warning, error, not 'loud'"):
        LLM("scripted:", log_level="loud")
