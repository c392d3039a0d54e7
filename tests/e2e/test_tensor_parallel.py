"""One engine as two processes that share a real (tiny, random) model over gloo."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_engine import ModelEngine
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ConfigError, EngineDead, NotSupportedError, ValidationError, WavecoreError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import EngineEntry

SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 250}
ASKED = (
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=7, max_tokens=20, n=2),
    SamplingParams(temperature=1.0, seed=8, max_tokens=20, top_k=9, top_p=0.9, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_config("Qwen3", num_attention_heads=4))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """The ranks compare what they do in every step of every test."""
    more = {**SETTINGS, "kv_cache_memory_gib": 0.01, "check_ranks": True}
    with LLM(model, tensor_parallel_size=2, skip_tokenizer_init=True, **more) as llm:
        yield llm


def entry(llm: LLM) -> EngineEntry:
    return deployment.read(llm.runtime_dir).engines[0]


def test_the_same_tokens_as_one_rank(llm: LLM, model: Path) -> None:
    engine, asked = ModelEngine(model, **SETTINGS), prompts(9, seed=4)
    for i, prompt in enumerate(asked):
        engine.add(prompt, ASKED[i % 3])
    expected = [output.tokens for output in engine.run().values()]
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked], [ASKED[i % 3] for i in range(9)], use_tqdm=False)
    assert [choice.token_ids for output in outputs for choice in output.outputs] == expected


def test_prompt_embeddings_and_embeddings(llm: LLM) -> None:
    """Both travel to the other rank; a vector of 48 values for each of 240 positions."""
    embeds = np.random.default_rng(0).normal(size=(240, 48)).astype(np.float32)
    one, other = (llm.generate({"prompt_embeds": embeds}, ASKED[0], use_tqdm=False)[0] for _ in range(2))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids and len(one.outputs[0].token_ids) == 10
    [pooled] = llm.embed({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
    assert np.linalg.norm(pooled.outputs.embedding) == pytest.approx(1.0, abs=1e-3)


def test_prompt_embeddings_that_begin_in_step_after_step(llm: LLM) -> None:
    """Each is computed in chunks, while the next ones begin."""
    draw = np.random.default_rng(1)
    asked = [{"prompt_embeds": draw.normal(size=(40 + 9 * i, 48)).astype(np.float32)} for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=4)
    alone = [llm.generate(one, params, use_tqdm=False)[0].outputs[0].token_ids for one in asked]
    assert [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)] == alone
    assert entry(llm).restarts == 0


def test_an_attention_map(llm: LLM, model: Path, tmp_path: Path) -> None:
    """That of one rank, also of a head that the other rank has; one that is refused ends nothing."""
    alone, prompt = ModelEngine(model, **SETTINGS), {"prompt_token_ids": [1, 2, 3]}
    for head in (0, 3):
        found = llm.visualize_attention(prompt, 1, head, tmp_path / "map.png")
        np.testing.assert_allclose(found, alone.runner.attention_map([1, 2, 3], 1, head), rtol=0, atol=1e-5)
    with pytest.raises(ValidationError, match="head"):
        llm.visualize_attention(prompt, 1, 4, tmp_path / "map.png")
    assert llm.generate({"prompt_token_ids": [5]}, ASKED[0], use_tqdm=False)[0].outputs[0].finish_reason == "length"
    assert entry(llm).restarts == 0


def test_a_profile_that_is_refused_ends_no_rank(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="torch_profiler_dir"):
        llm.start_profile()
    with pytest.raises(ValidationError, match="start_profile"):
        llm.stop_profile()
    assert llm.generate({"prompt_token_ids": [5]}, ASKED[0], use_tqdm=False)[0].outputs[0].finish_reason == "length"
    assert entry(llm).restarts == 0


@pytest.mark.slow
def test_plans_that_are_longer_than_the_ring(tmp_path: Path) -> None:
    """5.8 MB of embeddings in one plan, while another step is in flight."""
    folder = save_model(tmp_path, make_config("Qwen3", num_attention_heads=4, max_position_embeddings=2048))
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 32_768, "max_model_len": 2000, "kv_cache_memory_gib": 0.1}
    draw, found = np.random.default_rng(0), []
    asked = [{"prompt_embeds": draw.normal(size=(1900, 48)).astype(np.float32)} for _ in range(16)]
    for ranks in (1, 2):
        more = {**SETTINGS, **sizes, "tensor_parallel_size": ranks}
        with LLM(folder, skip_tokenizer_init=True, **more) as llm:
            outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert entry(llm).restarts == 0
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_profile_of_every_rank_or_of_none(model: Path, tmp_path: Path) -> None:
    """The second one cannot be written, and only its caller hears of that."""
    folder = tmp_path / "traces"
    more = {**SETTINGS, "torch_profiler_dir": str(folder), "kv_cache_memory_gib": 0.01}
    with LLM(model, tensor_parallel_size=2, skip_tokenizer_init=True, **more) as llm:
        for attempt in range(2):
            llm.start_profile()
            llm.generate({"prompt_token_ids": [5]}, ASKED[0], use_tqdm=False)
            if attempt == 0:
                llm.stop_profile()
                until(lambda: len([*folder.glob("*.pt.trace.json")]) == 2, "a trace of each rank")
                shutil.rmtree(folder)
                folder.write_text("in the way")
        with pytest.raises(WavecoreError):
            llm.stop_profile()
        llm.generate({"prompt_token_ids": [5]}, ASKED[0], use_tqdm=False)
        assert entry(llm).restarts == 0


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3: 4 heads, 2 KV heads .* sizes that work: 1, 2, 4"):
        LLM(model, tensor_parallel_size=3, skip_tokenizer_init=True, **SETTINGS)


@pytest.mark.slow  # in the fast tier: tests/faults/test_tensor_parallel.py
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_and_the_group_starts_again(model: Path, number: signal.Signals) -> None:
    with LLM(model, tensor_parallel_size=2, skip_tokenizer_init=True, kv_cache_memory_gib=0.01, **SETTINGS) as llm:
        for rank in (0, 1):
            before = entry(llm)
            params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
            stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, params)
            next(stream)
            began = time.monotonic()
            os.kill(before.ranks[rank].pid, number)
            said = "SIGKILL" if number == signal.SIGKILL else "has been stopped"
            with pytest.raises(EngineDead, match=f"engine 0 rank {rank} .*{said}"):
                for _ in stream:
                    pass
            print(f"{number.name} of rank {rank} heard after {time.monotonic() - began:.2f} s")
            [output] = llm.generate({"prompt_token_ids": [4, 5, 6]}, ASKED[0], use_tqdm=False)  # of the next life
            assert output.outputs[0].finish_reason == "length"
            after = until(lambda: (found := entry(llm)).state == "ready" and found, "ready")
            assert {each.pid for each in after.ranks}.isdisjoint(each.pid for each in before.ranks)


@pytest.mark.slow
def test_a_rank_that_does_something_else_is_named_with_step_and_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "fail"
    monkeypatch.setenv("FAIL_ON_RANK_1", str(fails))
    operation = {"finish": "tests.support.custom_ops:another_token_on_rank_1"}
    more = {**SETTINGS, "kv_cache_memory_gib": 0.01, "custom_ops": operation, "check_ranks": True}
    with LLM(model, tensor_parallel_size=2, skip_tokenizer_init=True, **more) as llm:
        stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=200, temperature=0))
        next(stream)
        fails.touch()
        with pytest.raises(EngineDead, match=r"rank 1: .*check_ranks: step \d+, row 0: it drew token \d+, rank 0"):
            for _ in stream:
                pass
        fails.unlink()
        [output] = llm.generate({"prompt_token_ids": [4, 5, 6]}, ASKED[0], use_tqdm=False)  # of the next life
        assert output.outputs[0].finish_reason == "length"
