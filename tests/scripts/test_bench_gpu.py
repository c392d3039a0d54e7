"""The table: its arithmetic on made-up figures, and a run on a tiny model."""

from __future__ import annotations

from pathlib import Path

import bench_gpu
import pytest
from floors import Floor
from make_checkpoint import make

from wavecore.frontend.cli.bench import BenchReport
from wavecore.frontend.cli.workload import random_work


def report(seconds: float, preemptions: int = 0) -> BenchReport:
    counters = {"steps": 50, "preemptions": preemptions, "wait_seconds": 2.0, "schedule_seconds": 1.0}
    counters |= {"update_seconds": 1.0, "launch_seconds": 4.0}
    return BenchReport(seconds, 3000, 1000, [0.5, 0.25], [0.01, 0.03], [counters])


def test_cells() -> None:
    cells = bench_gpu.cells(Floor(prefill=1.0, decode=2.0), 4.0, [report(12.0), report(10.0), report(11.0)])
    assert dict(zip(bench_gpu.COLUMNS[2:], cells, strict=True)) == {
        "requests": "2",
        "tokens in": "3,000",
        "out": "1,000",
        "s": "12.00 10.00 11.00",
        "out tokens/s": "100",
        "in + out tokens/s": "400",
        "first token ms p50 / p99": "375.0 / 497.5",
        "ms a token p50 / p99": "20.0 / 29.8",
        "steps": "50",
        "ms a step": "200.00",
        "schedule / launch / wait / update": "12% / 50% / 25% / 12%",
        "floor s": "3.000",
        "share of the floor": "30%",
        "prefill": "25%",  # 1.0 of 4.0
        "decode": "33%",  # 2.0 of 10.0 - 4.0
    }


def test_preemptions_show_and_noise_does_not() -> None:
    cells = bench_gpu.cells(Floor(1.0, 2.0), 10.5, [report(10.0, preemptions=3)])
    assert cells[8] == "50 (3 preemptions)"
    assert cells[-1] == ""


def test_requests_are_cut() -> None:
    assert bench_gpu.cut("single-in128-out256", 5)[0] == "single-in128-out256"
    label, work = bench_gpu.cut("ragged-256", 5)
    assert (label, len(work)) == ("ragged-256, first 5", 5)
    assert work == bench_gpu.cut("ragged-256", None)[1][:5]


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make("tiny", tmp_path / "tiny")
    monkeypatch.setitem(bench_gpu.SETTINGS, "device", "cpu")
    monkeypatch.setitem(bench_gpu.WORKLOADS, "x128-in512-out8", lambda: random_work(128, (512, 512), (8, 8)))
    workloads = ["--only", "x128-in512-out8", "--only", "shared-prefix-16x32"]
    bench_gpu.main([str(tmp_path / "tiny"), *workloads, "--max-requests", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [len(row) for row in rows] == [len(bench_gpu.COLUMNS)] * 4
    assert rows[2][:5] == ["tiny", "x128-in512-out8, first 2", "2", "1,024", "16"]
    assert rows[3][:5] == ["tiny", "shared-prefix-16x32, first 2", "2", "4,224", "128"]
    assert 8 <= int(rows[2][10]) <= 16, "eight steps for both together, or for one after the other"
