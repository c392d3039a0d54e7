"""The comparison with vLLM: its arithmetic, and a run against a package that has vLLM's name and answers at once."""

from __future__ import annotations

import json
from pathlib import Path

import bench_compare
import pytest
from bench_workloads import work_named
from make_checkpoint import make

PEER = """
from types import SimpleNamespace as Of

def SamplingParams(**params):
    return Of(**params)

class LLM:
    def __init__(self, model, **settings):
        assert settings["max_num_seqs"] in (512, 1024) and settings["skip_tokenizer_init"]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        print("whatever it prints is not an answer")
        return [Of(outputs=[Of(token_ids=[0] * p.max_tokens)]) for p in params]
"""


def test_a_row() -> None:
    seconds = {"wavecore": [2.0, 1.0, 4.0], "vllm": [3.0, 5.0, 2.5]}
    row = bench_compare.Row("m", "ragged-256", True, 0.25, {"wavecore": 9.0, "vllm": 9.0}, seconds)
    assert row.cells() == ["m", "ragged-256", "2.000 (1.000)", "3.000 (2.500)", "1.50", "25%", "in turn"]


def test_a_row_of_one_engine() -> None:
    row = bench_compare.Row("m", "x1-in8-out2", False, 0.25, {"vllm": 1.0}, {"vllm": [1.0]})
    assert row.cells()[2:] == ["", "1.000 (1.000)", "", "", "one after the other"]


def test_points_of_the_curves() -> None:
    assert bench_compare.curve_point("x4-in128-out1", "x4-in128-out129", 1.0, 2.28) == (4, pytest.approx(400))
    assert bench_compare.curve_point("x16-in256-out1", "x16-in256-out65", 1.0, 1.64) == (256, pytest.approx(10))


def test_a_workload_by_its_sizes() -> None:
    work = work_named("x3-in5-out7")
    assert [(len(item.prompt), item.max_tokens) for item in work] == [(5, 7)] * 3
    with pytest.raises(ValueError, match="x8-in128-out64"):
        work_named("x3")


@pytest.mark.slow
def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make("tiny", tmp_path / "tiny")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(PEER)
    monkeypatch.setattr(bench_compare, "HOST_BOUND", ("single-in8192-out16",))
    command = [str(tmp_path / "tiny"), "--peer-path", str(tmp_path / "site"), "--repeats", "2"]
    command += ["--only", "single-in8192-out16", "--only", "single-in128-out256", "--json", str(tmp_path / "out.json")]
    bench_compare.main([*command, "--settings", json.dumps({"device": "cpu"})])
    figures = json.loads((tmp_path / "out.json").read_text())
    rows = [bench_compare.Row(**row) for row in figures["rows"]]
    assert [(row.workload, row.interleaved) for row in rows] == [
        ("single-in8192-out16", True),
        ("single-in128-out256", False),
    ]
    for row in rows:
        assert {name: len(seconds) for name, seconds in row.seconds.items()} == {"wavecore": 2, "vllm": 2}
        assert min(row.seconds["wavecore"]) > max(row.seconds["vllm"]) > 0
    assert [start["engine"] for start in figures["starts"]] == ["wavecore", "vllm"] * 2
    assert capfd.readouterr().out.count("| tiny |") == 2


def test_an_engine_that_does_not_start_is_named(tmp_path: Path) -> None:
    make("tiny", tmp_path / "tiny")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text("raise ImportError('no such thing')")
    with pytest.raises(SystemExit, match="vllm ended with status 1"):
        bench_compare.Engine("vllm", tmp_path / "tiny", {}, str(tmp_path / "caches"), str(tmp_path / "site"))
