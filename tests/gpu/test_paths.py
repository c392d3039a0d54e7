"""What a request can ask for beyond tokens, on CUDA: the same as on the CPU, through the whole engine, in chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_config, save_model
from tests.support.model_engine import ModelEngine, Output

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.messages import FinishReason

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=10, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95)
SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 200, "max_num_seqs": 16}
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("paths") / "model", make_config("Llama"), scale=0.2)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


def ask_for_everything(small_llama: Path, device: str) -> dict[str, Output]:
    """Prompts of up to 75 tokens in steps of at most 32; the last request finds its prefix in the cache."""
    engine = ModelEngine(small_llama, device=device, max_num_batched_tokens=32, **SETTINGS)
    table = load_file(small_llama / "model.safetensors")[EMBEDDINGS].numpy()
    handles = {
        "logprobs": engine.add(prompt(40), replace(GREEDY, logprobs=4, prompt_logprobs=3)),
        "no alternatives": engine.add(prompt(20, 1), replace(SAMPLED, logprobs=0, prompt_logprobs=0)),
        "embeds": engine.add([0] * 75, GREEDY, embeds=table[prompt(75, 2)]),
        "embeds, penalised": engine.add([0] * 5, replace(GREEDY, repetition_penalty=1.5), embeds=table[prompt(5, 3)]),
    }
    first = engine.add(prompt(37, 4), replace(SAMPLED, n=4, seed=5, logprobs=1))
    handles |= {f"choice {i}": first + i for i in range(4)}
    for kind in ("mean", "last"):
        for length in (1, 16, 75):
            handles[f"{kind} of {length}"] = engine.add(prompt(length, 6), replace(GREEDY, max_tokens=1), pooling=kind)
    engine.run()
    handles["logprobs, cached prefix"] = engine.add(prompt(40), replace(GREEDY, logprobs=4))
    return {name: engine.run()[handle] for name, handle in handles.items()}


def joined(triples: list[Any]) -> list[npt.NDArray[Any]]:
    """Token ids, log-probabilities and ranks of all positions."""
    return [np.concatenate(parts) for parts in zip(*triples, strict=True)]


def test_everything_equals_the_cpu(small_llama: Path) -> None:
    want, got = ask_for_everything(small_llama, "cpu"), ask_for_everything(small_llama, "cuda")
    for name, left in want.items():
        right = got[name]
        assert (right.tokens, right.finish) == (left.tokens, left.finish), name
        for a, b in ((left.logprobs, right.logprobs), (left.prompt_logprobs, right.prompt_logprobs)):
            assert bool(a) == bool(b), name
            if a:
                (ids, values, ranks), (other_ids, other_values, other_ranks) = joined(a), joined(b)
                np.testing.assert_allclose(other_values, values, atol=1e-3, err_msg=name)
                assert (other_ids[:, 0] == ids[:, 0]).all() and (other_ids == ids).mean() > 0.99, name
                assert abs(other_ranks - ranks).max() <= 1, name
        assert (left.pooled is None) == (right.pooled is None), name
        if left.pooled is not None:
            np.testing.assert_allclose(right.pooled, left.pooled, atol=1e-5, err_msg=name)
    assert len({tuple(got[f"choice {i}"].tokens) for i in range(4)}) == 4
    assert len(joined(got["logprobs"].prompt_logprobs)[0]) == 39
    assert sum(out.pooled is not None for out in got.values()) == 6


@pytest.mark.parametrize("layer, head", [(0, 0), (2, 5)])
def test_attention_map(small_llama: Path, layer: int, head: int) -> None:
    devices = ("cpu", "cuda")
    maps = [
        ModelEngine(small_llama, device=d, **SETTINGS).runner.attention_map(prompt(50), layer, head) for d in devices
    ]
    np.testing.assert_allclose(maps[1], maps[0], atol=1e-4)
    np.testing.assert_allclose(maps[1].sum(1), 1.0, atol=1e-5)


@pytest.mark.parametrize("traced", [True, False])
def test_profiles_and_ranges(small_llama: Path, tmp_path: Path, traced: bool) -> None:
    """torch's profiler sees the kernels; without a folder an outer profiler is told, which is none here."""
    folder = str(tmp_path) if traced else None
    engine = ModelEngine(small_llama, device="cuda", nvtx=True, torch_profiler_dir=folder, **SETTINGS)
    for _ in range(2):
        engine.runner.profile(True)
        engine.add(prompt(20), GREEDY)
        engine.run()
        engine.runner.profile(False)
    traces = [path.read_text() for path in tmp_path.glob("*.pt.trace.json")]
    assert len(traces) == 2 * traced
    assert all('"cat": "kernel"' in trace for trace in traces)
    with pytest.raises(ValidationError, match=r"start_profile\(\) first"):
        engine.runner.profile(False)


def test_a_row_of_nan_fails_alone(tmp_path: Path) -> None:
    """Token 200 has a NaN embedding. Others see what they see without it, also on blocks that held its keys."""
    folder = save_model(tmp_path / "ill", make_config("Llama"), scale=0.2)
    tensors = load_file(folder / "model.safetensors")
    tensors[EMBEDDINGS][200] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sick, well = ill_rounds(folder, 200), ill_rounds(folder, 100)
    for i, (a, b) in enumerate(zip(sick, well, strict=True)):
        assert b.finish == FinishReason.LENGTH
        if i % 5 == 3:
            assert (a.finish, a.extras["code"], a.tokens) == (FinishReason.ERROR, "numerical", [])
            continue
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs[0][1], b.logprobs[0][1], atol=1e-5)


def ill_rounds(small_llama: Path, third: int) -> list[Output]:
    settings = SETTINGS | {"num_gpu_blocks_override": 12, "enable_prefix_caching": False}
    engine = ModelEngine(small_llama, device="cuda", **settings)
    params = replace(SAMPLED, logprobs=4, logit_bias={200: -100.0})
    rounds: list[Output] = []
    for _ in range(4):  # blocks that held NaN are used again
        starts = [10, 11, 12, third, 77]
        handles = [engine.add([start, *prompt(13 + i)], params) for i, start in enumerate(starts)]
        outputs = engine.run()
        rounds += [outputs[handle] for handle in handles]
    return rounds
