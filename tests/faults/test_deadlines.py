"""Every wait has an end: queue, first token, total, connection, a call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until

from wavecore.frontend.llm import LLM
from wavecore.transport.errors import RequestTimeout, StartError
from wavecore.transport.processes.supervisor import Limits


def test_total_deadline(deploy: Any) -> None:
    """A request runs longer than its `timeout`.

    It ends with finish reason "timeout" and the tokens it has; its blocks are free again.
    """
    with deploy({"step_seconds": 0.02}) as deployed:
        stream = deployed.stream(1, 4000, timeout=1.0)
        assert stream.end == "timeout"
        assert stream.tokens
        stream.check_prefix()


def test_queue_deadline(deploy: Any) -> None:
    """A request waits longer for its first step than `max_queue_seconds` allows.

    It ends with finish reason "timeout"; those that run are not touched.
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=1, max_queue_seconds=0.3) as deployed:
        first = deployed.stream(1, 60)
        assert first.first.wait(30)
        second = deployed.stream(2, 50)
        assert second.end == "timeout"
        assert second.tokens == []
        first.check_finished()


def test_first_token_deadline(deploy: Any) -> None:
    """A request has no token when its `first_token_timeout` has passed.

    It ends with finish reason "timeout".
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=1) as deployed:
        first = deployed.stream(1, 60)
        assert first.first.wait(30)
        second = deployed.stream(2, 50, first_token_timeout=0.1)
        assert second.end == "timeout"
        first.check_finished()


@pytest.mark.slow
def test_deadline_while_the_engine_says_nothing(deploy: Any) -> None:
    """The engine stopped answering, and a request's `timeout` passes.

    The client ends the request by itself with `RequestTimeout`, five seconds later at most.
    """
    with deploy({"step_seconds": 0.02}, limits=Limits(idle=60)) as deployed:
        stream = deployed.stream(1, 4000, timeout=2.0)
        assert stream.first.wait(30)
        os.kill(deployed.engine.pid, signal.SIGSTOP)
        assert isinstance(stream.error, RequestTimeout)
        os.kill(deployed.engine.pid, signal.SIGCONT)
        until(lambda: deployed.llm._service.client.engines)
        until(lambda: deployed.call("stats")["running"] == 0)


def test_connection_deadline(deploy: Any) -> None:
    """A client attaches to an engine that does not answer.

    `connect` gives up after its `timeout` with `StartError`.
    """
    with deploy(limits=Limits(idle=60)) as deployed:
        os.kill(deployed.engine.pid, signal.SIGSTOP)
        with pytest.raises(StartError, match=r"within 0\.5 s"):
            LLM.connect(deployed.runtime_dir, timeout=0.5)
        os.kill(deployed.engine.pid, signal.SIGCONT)
        deployed.check_serving()


def test_nothing_to_attach_to(tmp_path: Path) -> None:
    """A client attaches where nothing runs.

    `connect` raises `StartError` at once and says how to start an engine.
    """
    with pytest.raises(StartError, match="wavecore engine"):
        LLM.connect(tmp_path)


def test_call_deadline(deploy: Any) -> None:
    """A call for statistics is not answered in time.

    It raises `RequestTimeout`; the engine is not touched.
    """
    with deploy(limits=Limits(idle=60)) as deployed:
        os.kill(deployed.engine.pid, signal.SIGSTOP)
        future = deployed.llm._service.client.call("stats", timeout=0.3)
        with pytest.raises(RequestTimeout, match="stats"):
            future.result(30)
        os.kill(deployed.engine.pid, signal.SIGCONT)
        deployed.check_serving()
