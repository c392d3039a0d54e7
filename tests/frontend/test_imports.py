"""Importing the package is cheap: no torch, no transformers, nothing but names until they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import wavecore

HEAVY = ("torch", "transformers", "triton", "matplotlib", "gguf")


def modules_after(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout))


def test_import_alone_loads_nothing() -> None:
    loaded = modules_after("import wavecore")
    assert not [m for m in loaded if m.startswith("wavecore.")]


def test_frontend_is_torch_free() -> None:
    code = (
        "from wavecore import LLM, AsyncLLM, SamplingParams, EngineConfig, connect, EngineDead\n"
        "import wavecore.frontend.cli.main, wavecore.frontend.text.tokenizer_files"
    )
    loaded = modules_after(code)
    assert not loaded & {"torch", "transformers", "triton", "matplotlib", "jinja2"}
    # The command line's modules too.
    code = "from wavecore.frontend.cli import bench, chat, engine, generate"
    assert "torch" not in modules_after(code)


def test_helpers_for_tests_need_pytest_only_where_they_skip() -> None:
    assert not modules_after("import wavecore.testing") & {"torch", "pytest", "_pytest"}


def test_public_names_are_all_there() -> None:
    for name in wavecore.__all__:
        if name != "register_op":  # lives beside the kernels and needs torch
            assert getattr(wavecore, name) is not None
    assert set(wavecore.__all__) <= set(dir(wavecore))
