"""Whole systems, as a user starts them: nothing is left behind, and no engine is waited for longer than needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.scripted_model import ids_of, write_model

from wavecore import LLM

HELLO = 300  # a prompt that starts with this token is answered with "Hello world"


@pytest.fixture(autouse=True)
def _rules(nothing_left: None, quick_restarts: None) -> None:
    """Also of engines that the tests of one file share: a test leaves no more than it finds."""


@pytest.fixture(scope="session")
def hello_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`LLM`'s arguments for a scripted model that knows one answer."""
    return write_model(tmp_path_factory.mktemp("model"), {HELLO: ids_of("Hello world")}, step_seconds=0.001)


@pytest.fixture(scope="module")
def llm(hello_model: dict[str, str]) -> Iterator[LLM]:
    """Of that model; most files have one of their own."""
    with LLM(**hello_model, max_num_seqs=8, max_num_queued_reqs=16) as llm:
        yield llm
