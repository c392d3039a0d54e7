"""A model shared by ranks, here threads of this process, says what it says on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_core.models.test_equality_families import CASES, make
from tests.support.checkpoints import VOCAB, make_config, prompts, save_model
from tests.support.model_engine import ModelEngine, Output
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.models.weights import draw
from wavecore.engine_core.startup.factory import make_worker
from wavecore.transport.errors import ConfigError

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}  # over 1, 2, 4 or 8 ranks
EVERYTHING = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=1, max_tokens=12, n=3),
    SamplingParams(temperature=1.1, seed=2, max_tokens=12, top_k=7, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=3),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    SamplingParams(temperature=0.8, seed=4, max_tokens=12, logit_bias={5: 3.0, VOCAB - 1: 2.0}, min_tokens=4),
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, allowed_token_ids=[3, 80, 150, VOCAB - 1]),
    SamplingParams(temperature=1.0, seed=6, max_tokens=12, bad_words_token_ids=[[7], [9, 11]], stop_token_ids=[20]),
)

SLOW = pytest.mark.slow
# They differ from another case in what each rank has whole: frequencies, windows.
CUT_AS_OTHERS = {
    *("linear scaling", "yarn scaling", "dynamic scaling below the limit", "mistral without window"),
    *("qwen2 with windows", "gemma3 with biases, both ropes scaled", "llama that is told of windows"),
    *("mistral that is told of biases", "phi3 partial rotary", "phi3 long rope"),
}


def outputs(model: Path, ranks: int, **settings: Any) -> list[Output]:
    engine = ModelEngine(model, ranks, **settings)
    asked = prompts(2 * len(EVERYTHING), seed=3)
    for i, prompt in enumerate(asked):
        engine.add(prompt, EVERYTHING[i % len(EVERYTHING)])
    embeds = np.random.default_rng(0).normal(size=(9, engine.runner.info.hidden_size))
    engine.add([0] * 9, EVERYTHING[0], embeds=embeds)
    for pooling in ("last", "mean"):
        engine.add(asked[0], SamplingParams(temperature=0, max_tokens=0, detokenize=False), pooling=pooling)
    ended = list(engine.run().values())
    if isinstance(engine.runner, ThreadRanks):
        assert engine.runner.board.calls > 0
        engine.runner.close()
    return ended


def assert_same(ours: list[Output], theirs: list[Output]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        for mine, its in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert len(mine) == len(its)
            for a, b in zip(mine, its, strict=True):
                np.testing.assert_array_equal(a[0], b[0])
                np.testing.assert_allclose(a[1], b[1], rtol=0, atol=1e-3)
        if one.pooled is not None:
            np.testing.assert_allclose(one.pooled, other.pooled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW if case in CUT_AS_OTHERS else ()) for case in CASES])
def test_every_family_over_two_ranks(tmp_path: Path, case: str) -> None:
    """Ragged prompts in chunks, windows, all sampling options, log-probabilities, embeddings."""
    model = make(tmp_path, case)
    small = {"max_num_batched_tokens": 48, "max_model_len": 120}
    assert_same(outputs(model, 2, **small), outputs(model, 1, **small))


@pytest.fixture(scope="module", params=["tied", "untied"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config("Qwen3", **WIDE, attention_bias=True, tie_word_embeddings=request.param == "tied")
    return save_model(tmp_path_factory.mktemp("wide"), config)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), pytest.param(4, 1, marks=SLOW), (8, 1)])
def test_more_ranks_than_kv_heads(wide: Path, ranks: int, kv_heads: int) -> None:
    """211 tokens of vocabulary divide by no number of ranks."""
    assert_same(outputs(wide, ranks), outputs(wide, 1))
    runner = ThreadRanks(wide, ranks)
    for rank in runner.ranks:
        assert rank.kv_cache.shape[3] == kv_heads
    runner.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 5, "swap_space_gib": 0.01},
    ],
    ids=["recompute", "swap"],
)
def test_preemption_and_swap_over_ranks(wide: Path, settings: dict[str, Any]) -> None:
    def tokens(ranks: int, **settings: Any) -> tuple[dict[int, list[int]], int]:
        engine = ModelEngine(wide, ranks, **settings)
        text = [(7 * i + i * i // 3) % VOCAB for i in range(64)]
        for i in range(6):
            params = SamplingParams(n=1 + i % 3, max_tokens=20, temperature=0.7 * (i % 2), seed=i)
            engine.add([*text[: 18 + i], i + 1, i + 2], params)
        outputs = {handle: output.tokens for handle, output in engine.run().items()}
        if isinstance(engine.runner, ThreadRanks):
            engine.runner.close()
        return outputs, engine.core.requests.totals.preemptions

    expected, _ = tokens(1, num_gpu_blocks_override=300)
    got, preemptions = tokens(2, **settings)
    assert got == expected and preemptions > 0


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    spec = from_config(make_config("Llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}, tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4: 6 heads, 2 KV heads .* sizes that work: 1, 2$"):
        Shard(spec, 4)
    assert Shard(spec, 2, 1).spec.num_heads == 3


def test_a_number_of_ranks_is_refused_before_torch_is_imported(wide: Path) -> None:
    phases: list[str] = []
    group: Any = SimpleNamespace(ranks=3, rank=1)
    with pytest.raises(ConfigError, match="tensor_parallel_size 3: 8 heads"):
        make_worker(EngineConfig(model=str(wide), tensor_parallel_size=3), lambda phase, _: phases.append(phase), group)
    assert "import" not in phases


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_each_weight_once(tmp_path: Path, size: int) -> None:
    """What the ranks hold of random weights are the cuts of one rank's, and together all of them."""
    config = make_config("Llama", **WIDE, attention_bias=True).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    spec = from_config(config, tmp_path)
    [whole, *ranks] = [
        draw(Shard(spec, n, rank), torch.float32, torch.device("cpu"))
        for n, rank in [(1, 0), *((size, rank) for rank in range(size))]
    ]
    dim, own = spec.head_dim, 8 // size
    for rank, parameters in enumerate(ranks):
        qkv = whole["layers.1.qkv"]
        kv = rank * 2 // size * dim
        width = max(1, 2 // size) * dim
        expected = torch.cat(
            [
                qkv[rank * own * dim : (rank + 1) * own * dim],
                qkv[8 * dim + kv : 8 * dim + kv + width],
                qkv[10 * dim + kv : 10 * dim + kv + width],
            ]
        )
        torch.testing.assert_close(parameters["layers.1.qkv"], expected, rtol=0, atol=0)
    for name, columns in (("o", True), ("down", True), ("gate_up", False)):
        parts = [parameters[f"layers.2.{name}"] for parameters in ranks]
        if name == "gate_up":
            halves = [part.chunk(2) for part in parts]
            joined = torch.cat([torch.cat([half[i] for half in halves]) for i in range(2)])
        else:
            joined = torch.cat(parts, dim=1 if columns else 0)
        torch.testing.assert_close(joined, whole[f"layers.2.{name}"], rtol=0, atol=0)
    for name in ("embed", "lm_head"):
        joined = torch.cat([parameters[name] for parameters in ranks])[: spec.vocab_size]
        torch.testing.assert_close(joined, whole[name], rtol=0, atol=0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_out_of_memory_at_each_collective_of_each_rank(wide: Path, rank: int) -> None:
    """The rank still takes part in what the other one waits for; the step is rolled back and tried again, on both."""

    def tokens(fails_at: int | None) -> tuple[list[list[int]], int]:
        engine = ModelEngine(wide, 2, max_num_batched_tokens=32)
        runner = engine.runner
        assert isinstance(runner, ThreadRanks)
        begin = runner.collectives[rank].calls
        if fails_at is not None:
            runner.collectives[rank].fails_at = begin + fails_at
        for i, params in enumerate(EVERYTHING[1:4]):
            engine.add(prompts(3, longest=30, seed=5)[i], params.clone(max_tokens=3))
        ended = [output.tokens for output in engine.run().values()]
        calls = runner.collectives[rank].calls - begin
        runner.close()
        assert fails_at is None or runner.collectives[rank].fails_at == -1
        return ended, calls

    expected, calls = tokens(None)
    for fails_at in range(0, calls, 4):
        assert tokens(fails_at)[0] == expected, fails_at
