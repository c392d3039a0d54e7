"""`import vllm` finds the stand-in: its modules, its version, an unmodified script."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import wavecore
import wavecore.vllm as vllm
from wavecore.frontend.vllm.modules import MODULES

SCRIPT = """
import sys
from importlib.metadata import version
from importlib.util import find_spec

import neighbour
import vllm
import vllm.v1.engine.async_llm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "a"], sys.argv
assert version("vllm") == vllm.__version__ == "0.33.0" and find_spec("vllm") and not find_spec("vllmx")
assert vllm.sampling_params.SamplingParams is SamplingParams
print(SamplingParams(temperature=0.5).temperature, LLM.__name__, neighbour.VALUE)
"""


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_every_module_has_its_names(module: str) -> None:
    found = import_module(f"wavecore.vllm.{module}")
    for name in MODULES[module]:
        assert getattr(found, name) is not None
    assert found.__all__ == MODULES[module]


def test_one_class_has_one_identity() -> None:
    assert vllm.LLM is vllm.entrypoints.llm.LLM
    assert vllm.TokensPrompt is wavecore.TokensPrompt
    assert issubclass(vllm.LLM, wavecore.LLM)
    assert set(vllm.__all__) <= set(dir(vllm))


@pytest.mark.parametrize("name", ["ModelRegistry", "GuidedDecodingParams", "ClassificationOutput"])
def test_a_class_that_is_not_here_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name}: .{{8}}"):
        getattr(vllm, name)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = vllm.Nonsense


@pytest.mark.parametrize(
    ("module", "way_out"),
    [("nonsense", "coming-from-vllm"), ("multimodal", "images"), ("renderers.inputs.preprocess", "LLM.generate")],
)
def test_a_module_that_is_not_here(module: str, way_out: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=way_out):
        import_module(f"wavecore.vllm.{module}")


def test_helpers_that_scripts_import(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", vllm.utils.network_utils.get_open_port())):
        pass
    vllm.utils.print_utils.print_embeddings([0.5, 1.0, 2.0, 3.0, 4.0])
    vllm.utils.print_utils.print_embeddings([0.5], prefix="Scores")
    assert capsys.readouterr().out == "Embeddings: [0.5, 1.0, 2.0, 3.0, ...] (size=5)\nScores: [0.5] (size=1)\n"
    platform = vllm.platforms.current_platform
    assert platform.is_cuda() == platform.is_cuda_alike() == torch.cuda.is_available() != platform.is_cpu()
    assert not (platform.is_rocm() or platform.is_tpu() or platform.is_xpu())


@pytest.mark.parametrize("command", [["wavecore.frontend.cli.main", "run-vllm"], ["wavecore.vllm"]])
def test_an_unmodified_script(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("VALUE = 3")
    words = [sys.executable, "-m", *command, str(tmp_path / "script.py"), "--flag", "a"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0.5 LLM 3\n"), done.stderr


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys, vllm\nprint(sys.argv[1:], vllm.__version__)")
    words = [sys.executable, "-m", "wavecore.vllm", "-m", "program", "a"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['a'] 0.33.0\n"), done.stderr


def test_the_script_decides_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    done = subprocess.run([sys.executable, "-m", "wavecore.vllm", str(tmp_path / "script.py")], check=False)
    assert done.returncode == 7


def test_no_script_is_a_usage_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "wavecore.frontend.cli.main", "run-vllm"]
    none = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (none.returncode, none.stdout[:22]) == (2, "usage: wavecore run-vl")
    missing = subprocess.run([*words, str(tmp_path / "no.py")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "does not exist" in missing.stderr
