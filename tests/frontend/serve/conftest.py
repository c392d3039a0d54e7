"""Servers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.scripted_model import EOS, ids_of, write_model
from tests.support.served import Served, served
from tests.support.tokenizers_for_tests import write_folder

PARIS = 1  # <|im_start|>: every chat begins so
SCRIPTS = {
    PARIS: ids_of("Paris", ",", " of course."),
    300: ids_of("DEF", "G", "HI", "J", " more"),
    301: [*ids_of("abc", "Z", "Z"), EOS],
    302: ids_of("한국어 你好 👩‍👩‍👧‍👦!"),
    303: [EOS] * 9,
    304: ids_of("visible"),
}


@pytest.fixture(scope="session")
def scripted_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    files = write_model(tmp_path_factory.mktemp("model"), SCRIPTS, step_seconds=0.001)
    return [files["model"], "--tokenizer", files["tokenizer"], "--served-model-name", "scripted", "also"]


@pytest.fixture(scope="session")
def server(scripted_files: list[str], runtime_folder: Path) -> Iterator[Served]:
    with served(*scripted_files, "--max-num-queued-reqs", "64") as server:
        yield server


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, runtime_folder: Path) -> Iterator[Served]:
    """A small random Llama with a tokenizer."""
    from tests.support.checkpoints import make_config, save_model

    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, make_config("Llama", vocab_size=512))
    write_folder(folder)
    flags = ["--device", "cpu", "--kv-cache-memory-gib", "0.05", "--served-model-name", "llama"]
    with served(str(folder), *flags) as server:
        yield server
