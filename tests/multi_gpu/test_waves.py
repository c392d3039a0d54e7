"""Engines that share the experts of a model, on two GPUs: right tokens, graphs that all replay, and new weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.multi_gpu.wave_rank import ASKED, GREEDY, SETTINGS, TURNS
from tests.support.checkpoints import assert_greedy, load_reference, make_config, prompts, save_model
from tests.support.environment import environment

from wavecore import LLM
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes import deployment, group_memory

PROGRAM = Path(__file__).with_name("wave_rank.py")
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_attention_heads": 8}
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), "cuda"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), make_config("Qwen3Moe", **EXPERTS), seed=seed) for seed in range(2)]


def run_ranks(model: Path, device: str) -> list[dict[str, Any]]:
    """What two ranks said."""
    with ExitStack() as until:
        fds = [fd for _, fd in group_memory.create(2, until)]
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAM, str(rank), model, f"cuda:{rank}" if device == "cuda" else device]
                + [str(fd) for fd in fds],
                env=environment(),
                pass_fds=fds,
                stdout=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=160)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_replay_alike(models: list[Path], device: str, request: pytest.FixtureRequest) -> None:
    """The rank without requests replays the graphs that the other replays, and writes no block."""
    if device == "cuda":
        request.getfixturevalue("two_gpus")
    busy, idle = run_ranks(models[0], device)
    reference = load_reference(models[0])
    for turn in range(TURNS):
        for prompt, tokens in zip(ASKED, busy["tokens"][turn * len(ASKED) :], strict=False):
            assert len(tokens) == GREEDY.max_tokens
            assert_greedy(reference, prompt, tokens, f"turn {turn}")
    assert idle["dummies"] >= TURNS * 20 and idle["tokens"] == [] and idle["written"] == 0 < busy["written"]
    assert idle["replayed"] == busy["replayed"]
    assert device == "cpu" or all(idle["replayed"][-15:])
    whole = sum(tensor.numel() * 4 for tensor in reference.parameters())
    experts = sum(p.numel() * 4 for name, p in reference.named_parameters() if ".experts." in name)
    assert idle["weights"] <= 1.02 * (whole - experts / 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("more", [{}, {"data_parallel_size": 1, "tensor_parallel_size": 2}], ids=["engines", "ranks"])
def test_tokens_and_new_weights(
    models: list[Path], more: dict[str, int], device: str, request: pytest.FixtureRequest
) -> None:
    """Of the model, with either weights, over two engines and over the ranks of one; graphs stay valid."""
    if device == "cuda":
        request.getfixturevalue("two_gpus")
    settings = {**SETTINGS, "device": device, "skip_tokenizer_init": True, **more}
    references = [load_reference(model) for model in models]
    with LLM(models[0], **settings) as llm:
        for number in (0, 0, 1, 0):
            llm.update_weights(models[number])
            for output in llm.generate(ASKED * 3, GREEDY, use_tqdm=False):
                assert_greedy(references[number], output.prompt_token_ids, output.outputs[0].token_ids, f"{number}")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ten_thousand_requests(models: list[Path], device: str, request: pytest.FixtureRequest) -> None:
    """Of 40 prompts and random lengths; twice a rank is killed or stopped, which ends the life of both engines."""
    if device == "cuda":
        request.getfixturevalue("two_gpus")
    dice, reference, asked = random.Random(1), load_reference(models[0]), prompts(40, longest=40, seed=3)
    expected: dict[int, list[int]] = {}
    settings = {**SETTINGS, "device": device, "skip_tokenizer_init": True, "max_num_seqs": 32}
    with LLM(models[0], **settings) as llm:
        for turn in range(20):
            chosen = dice.choices(range(len(asked)), k=500)
            lengths = [GREEDY.clone(max_tokens=dice.randint(1, 20)) for _ in chosen]
            outputs = llm.generate([asked[i] for i in chosen], lengths, use_tqdm=False)
            for i, output in zip(chosen, outputs, strict=True):
                tokens = list(output.outputs[0].token_ids)
                known = expected.get(i, [])[: len(tokens)]
                if known != tokens:
                    assert_greedy(reference, asked[i], tokens, f"turn {turn}")
                    expected[i] = tokens
            if turn in (6, 13):
                rank = deployment.read(llm.runtime_dir).engines[turn % 2].ranks[0].pid
                stream = llm.stream(asked[0], GREEDY.clone(max_tokens=1000))
                next(stream)
                os.kill(rank, signal.SIGKILL if turn == 6 else signal.SIGSTOP)
                with pytest.raises(EngineDead):
                    for _ in stream:
                        pass
        assert [engine.restarts for engine in deployment.read(llm.runtime_dir).engines] == [2, 2]
