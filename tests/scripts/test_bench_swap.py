"""The swap benchmark does what its rows say; how long that takes is for a GPU to tell."""

from __future__ import annotations

import json
from pathlib import Path

import bench_swap
import pytest
from bench_swap import AGAIN, BESIDE, NEVER
from make_checkpoint import make


def scripted(folder: Path, **options: int) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps({"vocab_size": 512, "eos_token_id": [], **options}))
    return f"scripted:{path}"


def test_rows_of_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("tiny", tmp_path, "float32")
    sizes = ["--steady", "2", "--long", "200", "--rounds", "2", "--every", "20", "--swap-space-gib", "0.01"]
    bench_swap.main([str(tmp_path), "--device", "cpu", *sizes])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [dict(zip(bench_swap.COLUMNS, map(str.strip, line.strip("|").split("|")), strict=True)) for line in lines]
    rows = rows[2:]
    assert [row["the long one is"] for row in rows] == [NEVER, AGAIN, BESIDE]
    assert [row["pushed out"] for row in rows] == ["0", "2", "2"]
    moved = [float(row["MB out"]) for row in rows]
    # Twice some 250 tokens of 1024 bytes: 2 layers, 2 KV heads, 32 numbers each of keys and of values, float32
    assert moved[:2] == [0.0, 0.0]
    assert 0.4 <= moved[2] <= 0.7


@pytest.mark.parametrize("name", [NEVER, AGAIN, BESIDE])
def test_steady_requests_decode_in_every_step(tmp_path: Path, name: str) -> None:
    model = scripted(tmp_path, num_host_blocks=40, transfer_steps=3)
    load = bench_swap.Load(model, "cpu", steady=3, long=300, steps=200, swap_gib=1)
    _, pushed, steps, *_ = bench_swap.measure(load, name, rounds=4, every=25)
    assert int(pushed) == (0 if name == NEVER else 4)
    assert int(steps) >= 100
    assert len(load.gaps) == 3 * int(steps)
    assert len(load.long_gaps) < int(steps) or name == NEVER
    load.core.utilities.check_integrity()


def test_a_long_sequence_that_does_not_fit_to_the_host_is_no_figure(tmp_path: Path) -> None:
    load = bench_swap.Load(scripted(tmp_path, num_host_blocks=4), "cpu", steady=3, long=300, steps=200, swap_gib=1)
    with pytest.raises(SystemExit, match="must fit into the swap space"):
        bench_swap.measure(load, BESIDE, rounds=2, every=25)
