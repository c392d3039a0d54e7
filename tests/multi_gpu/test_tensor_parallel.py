"""A model of real size on two GPUs: the tokens of one, from CUDA graphs and without, and each kind of end of a rank.

In float32 the tokens are equal, or the first difference is a near tie: rounding differs, as each rank adds up a part of
each sum. The ranks of an engine compare what they do in every step (`check_ranks`).
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from make_checkpoint import make
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.rank_faults import SAYS, Fault, environment_of_ranks
from tests.support.waiting import until

from wavecore import LLM, EngineDead, RequestOutput, SamplingParams, WavecoreError
from wavecore.transport.processes.deployment import EngineEntry, read

pytestmark = pytest.mark.usefixtures("two_gpus")

MODEL, VOCAB, NEAR = "qwen3-0.6b", 151_936, 1e-4
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "num_gpu_blocks_override": 600,
    "enable_prefix_caching": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = GREEDY.clone(temperature=0.9)
SAMPLED = (
    HOT.clone(seed=1, n=2),
    HOT.clone(seed=2, top_k=20, top_p=0.95),
    HOT.clone(seed=3, min_p=0.05),
    HOT.clone(seed=4, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    HOT.clone(seed=5, logit_bias={7: 3.0, VOCAB - 1: 3.0}, min_tokens=4, top_p=0.9),
    HOT.clone(seed=6, allowed_token_ids=[3, 70_000, 80_000, VOCAB - 1]),
    HOT.clone(seed=7, bad_words_token_ids=[[5], [VOCAB - 2]], logprobs=3),
)
PROMPTS = prompts(12, vocab=VOCAB, seed=1)
SAMPLED_PROMPTS = prompts(14, vocab=VOCAB, seed=2)


@pytest.fixture(scope="module")
def model(two_gpus: list[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        make(MODEL, Path(folder), "float32")
        yield Path(folder)


def greedy(llm: LLM, count: int = len(PROMPTS), **more: Any) -> list[RequestOutput]:
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:count]]
    return llm.generate(asked, GREEDY.clone(**more), use_tqdm=False)


def sampled(llm: LLM) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in SAMPLED_PROMPTS]
    outputs = llm.generate(asked, [*islice(cycle(SAMPLED), len(asked))], use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[RequestOutput], list[list[int]]]:
    """What one GPU says: greedy with the best two at each place, and sampled."""
    with LLM(model, **SETTINGS) as llm:
        return greedy(llm, logprobs=2), sampled(llm)


def check_greedy(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    for mine, its in zip(ours, theirs, strict=False):
        tokens, other = mine.outputs[0].token_ids, its.outputs[0]
        assert len(tokens) == len(other.token_ids) > 0
        for i, (token, wanted) in enumerate(zip(tokens, other.token_ids, strict=True)):
            if token != wanted:
                assert other.logprobs is not None
                best = {id_: one.logprob for id_, one in other.logprobs[i].items()}
                assert token in best and best[wanted] - best[token] < NEAR, (i, token, wanted, best)
                break


def check_all(llm: LLM, expected: tuple[list[RequestOutput], list[list[int]]]) -> None:
    check_greedy(greedy(llm), expected[0])
    drawn = sampled(llm)
    assert len(drawn) == len(expected[1])
    assert sum(a != b for a, b in zip(drawn, expected[1], strict=True)) <= 1  # a near tie of noise and logits
    assert entry(llm).restarts == 0


def entry(llm: LLM) -> EngineEntry:
    return read(llm.runtime_dir).engines[0]


def check_end(llm: LLM, before: EngineEntry, stream: Iterator[RequestOutput], words: str) -> None:
    """A stream says what became of which rank; then all ranks are new, and serve."""
    with pytest.raises(EngineDead, match=words):
        for _ in stream:
            pass
    assert len(greedy(llm, 2)) == 2  # waits for the next life
    after = until(lambda: (found := entry(llm)).state == "ready" and found, "ready")
    assert len(after.ranks) == 2 and after.restarts == before.restarts + 1
    assert not any(psutil.pid_exists(rank.pid) for rank in before.ranks)


def started(llm: LLM) -> Iterator[RequestOutput]:
    """A stream that has its first token."""
    stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, GREEDY.clone(max_tokens=500))
    next(stream)
    return stream


def test_from_graphs_and_after_a_rank_was_killed_or_stopped(model: Path, expected: Any) -> None:
    """The first round counts what runs, and is followed by captures; the next ones are replayed."""
    with LLM(model, tensor_parallel_size=2, check_ranks=True, **SETTINGS) as llm:
        for _ in range(3):
            check_all(llm, expected)
        for number, rank, words in ((signal.SIGKILL, 1, "SIGKILL"), (signal.SIGSTOP, 0, "has been stopped")):
            before, stream = entry(llm), started(llm)
            os.kill(before.ranks[rank].pid, number)
            check_end(llm, before, stream, f"engine 0 rank {rank} .*{words}")
        check_greedy(greedy(llm), expected[0])


def test_without_graphs_and_after_an_exception(model: Path, expected: Any, tmp_path: Path) -> None:
    raises = tmp_path / "raise"
    operation = {"silu_mul": "tests.support.custom_ops:raising_on_rank_1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIL_ON_RANK_1", str(raises))
        with LLM(model, tensor_parallel_size=2, check_ranks=True, custom_ops=operation, **SETTINGS) as llm:
            check_all(llm, expected)
            before, stream = entry(llm), started(llm)
            raises.touch()
            until(lambda: entry(llm).last_cause is not None, "the rank to raise")
            raises.unlink()
            check_end(llm, before, stream, "rank 1: RuntimeError: this test wants rank 1 to raise")


# --- few layers, whose steps take a millisecond -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Else as large as that model."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "vocab_size": 12_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}
    return save_model(tmp_path_factory.mktemp("few"), make_config("Qwen3", **sizes, **heads), scale=0.05)


def test_swapped_as_on_one_gpu(few_layers: Path) -> None:
    """Sequences that do not fit together go to the host and come back, on each rank with its heads."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(8, longest=200, vocab=12_000, seed=3)]
    found, params = [], GREEDY.clone(max_tokens=200, logprobs=2)
    for size, more in ((1, {}), (2, {"num_gpu_blocks_override": 40, "swap_space_gib": 1.0, "check_ranks": True})):
        with LLM(few_layers, tensor_parallel_size=size, **{**SETTINGS, "block_size": 16, **more}) as llm:
            found.append(llm.generate(asked, params, use_tqdm=False))
            [stats] = llm.step_stats()
            assert (stats["preemptions"] > 0, stats["swapped_tokens"] > 0) == (size == 2, size == 2)
    check_greedy(found[1], found[0])


@pytest.mark.slow
def test_ten_thousand_steps_replayed_and_not(few_layers: Path) -> None:
    """Log-probabilities, pooled prompts and those of embeddings make parts of steps run kernel by kernel; the ranks
    compare each step."""
    asked = [
        GREEDY.clone(max_tokens=450),
        HOT.clone(seed=1, max_tokens=400, top_p=0.9),
        HOT.clone(seed=2, max_tokens=200, logprobs=2),
        GREEDY.clone(max_tokens=50, prompt_logprobs=1),
        HOT.clone(seed=3, max_tokens=100, repetition_penalty=1.1),
    ]
    asked_of = [{"prompt_token_ids": prompt} for prompt in prompts(5, vocab=12_000, seed=1)]
    embeds = {"prompt_embeds": np.random.default_rng(0).normal(size=(30, 1024)).astype(np.float32)}
    with LLM(few_layers, tensor_parallel_size=2, check_ranks=True, **SETTINGS) as llm, ThreadPoolExecutor(1) as beside:
        began = time.monotonic()
        while (steps := llm.step_stats()[0]["steps"]) < 10_000:
            rare = beside.submit(lambda: [llm.generate(embeds, HOT, use_tqdm=False) for _ in range(8)])
            outputs = llm.generate(asked_of, asked, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [params.max_tokens for params in asked]
            llm.embed(asked_of[0], use_tqdm=False)
            rare.result()
        print(f"{steps} steps in {time.monotonic() - began:.1f} s")
        assert entry(llm).restarts == 0


# --- phases that CPUs do not have -------------------------------------------------------------------------------------

TINY = {**SETTINGS, "max_model_len": 250, "tensor_parallel_size": 2}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_restarts: None) -> Path:
    """Where the next `Fault` is to be written."""
    for name, value in environment_of_ranks(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "fault"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(1, "measure", "kill"), Fault(0, "measure", "stop")], ids=str)
def test_rank_that_fails_while_steps_are_measured(tiny_llama: Path, file: Path, fault: Fault) -> None:
    fault.write(file)
    said = rf"rank {fault.rank}\b.*{SAYS[fault.does]}.*\(while: warm_up\)"
    with pytest.raises(WavecoreError, match=said), LLM(tiny_llama, **TINY):
        pass


@pytest.mark.slow
def test_rank_that_fails_while_a_graph_is_captured(tiny_llama: Path, file: Path) -> None:
    """In an idle turn or beside requests. The next life captures again."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(5, seed=1)]
    with LLM(tiny_llama, **TINY) as llm:
        for fault in (Fault(1, "capture", "kill"), Fault(0, "capture", "raise"), Fault(1, "capture", "hang")):
            before = entry(llm)
            fault.write(file)

            def is_over(before: EngineEntry = before) -> bool:
                with suppress(EngineDead):
                    llm.generate(asked, GREEDY, use_tqdm=False)
                return entry(llm).restarts > before.restarts

            until(is_over, f"{fault} to happen", seconds=60)
            cause = entry(llm).last_cause
            assert cause is not None and re.search(rf"rank {fault.rank}\b.*{SAYS[fault.does]}", cause.message)
        assert all(output.error is None for output in llm.generate(asked, GREEDY, use_tqdm=False))
