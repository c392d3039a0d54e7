"""Sums over two GPUs by `kernels/all_reduce.py`: exact, the same bits on each, in graphs and out, however they run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench_all_reduce import start
from tests.support.environment import environment

from wavecore import LLM, SamplingParams

PROGRAM = Path(__file__).with_name("all_reduce_rank.py")
pytestmark = pytest.mark.usefixtures("two_gpus")


@pytest.mark.parametrize("checks", [["equality", "graph", "bound"], ["poison"]], ids=" ".join)
def test_sums_of_two_gpus(tmp_path: Path, checks: list[str]) -> None:
    with (tmp_path / "said").open("w+") as file:
        for rank in start(PROGRAM, 2, *checks, stdout=file, env=environment()):
            rank.wait(150)
        file.seek(0)
        said = [json.loads(line) for line in file]
    results = [(line["check"], line["found"]) for line in said if "check" in line]
    assert sorted(results) == sorted((check, []) for check in checks * 2), said[-4:]


def test_who_waits_for_a_dead_peer_ends_by_a_signal() -> None:
    """Its kernel reads a flag for ever, and goes with the process."""
    left, right = start(PROGRAM, 2, "dies", stdout=subprocess.PIPE, env=environment())
    with left, right:
        assert right.wait(90) == 0
        assert left.stdout is not None
        said = [json.loads(left.stdout.readline()) for _ in range(2)]
        assert said[1] == {"rank": 0, "waits": True}
        left.kill()
        assert left.wait(30) == -9
        assert left.stdout.read() == b""


def test_an_engine_says_the_same_with_nccl_alone(tiny_llama: Path) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "device": "cuda"}
    settings |= {"num_gpu_blocks_override": 64, "tensor_parallel_size": 2}
    prompts = [[i + 1, 2, 3] for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    tokens = []
    for disable in (False, True):
        with LLM(str(tiny_llama), disable_custom_all_reduce=disable, **settings) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
