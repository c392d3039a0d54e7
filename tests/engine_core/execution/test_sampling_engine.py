"""Sampling options through the whole engine, on a tiny random model; the judge is transformers' logits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import VOCAB, load_reference, make_config, save_model
from tests.support.model_engine import ModelEngine, Output
from transformers import PreTrainedModel

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.messages import FinishReason

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 140, 33, 7, 61]
EOS = (3, 4)


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrow weights: the distribution is broad, so that sampling has something to choose from."""
    config = make_config("Llama", eos_token_id=list(EOS))
    return save_model(tmp_path_factory.mktemp("sampling") / "model", config, scale=0.12)


@pytest.fixture(scope="module")
def reference(two_ends: Path) -> PreTrainedModel:
    return load_reference(two_ends)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab]."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def one(two_ends: Path, params: SamplingParams, prompt: list[int] = PROMPT, **settings: Any) -> Output:
    engine = ModelEngine(two_ends, **settings)
    handle = engine.add(prompt, params)
    return engine.run()[handle]


SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.95, seed=1234, max_tokens=16)


def test_seed_alone_in_a_batch_after_preemption_and_beside_unseeded(two_ends: Path) -> None:
    alone = one(two_ends, SAMPLED).tokens
    assert one(two_ends, SAMPLED).tokens == alone
    assert one(two_ends, replace(SAMPLED, seed=1235)).tokens != alone

    draw = random.Random(0)
    engine = ModelEngine(two_ends, max_num_seqs=8, num_gpu_blocks_override=24, max_num_batched_tokens=16)
    handles = []
    for i in range(12):
        engine.add([draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], replace(SAMPLED, seed=None))
        if i % 3 == 0:
            handles.append(engine.add(PROMPT, SAMPLED))
    outputs = engine.run()
    assert engine.preempted > 0
    assert [outputs[handle].tokens for handle in handles] == [alone] * len(handles)
    assert len({outputs[h].extras["seed"] for h in outputs if h not in handles}) == 12, "fresh entropy each"
    assert outputs[handles[0]].extras["seed"] == 1234


def test_choices_are_distinct_and_reproducible(two_ends: Path) -> None:
    params = replace(SAMPLED, n=4)
    runs = []
    for settings in ({}, {"enable_prefix_caching": False, "max_num_batched_tokens": 32}):
        engine = ModelEngine(two_ends, **settings)
        engine.add(PROMPT, params)
        runs.append([out.tokens for out in engine.run().values()])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4
    assert runs[0][0] == one(two_ends, SAMPLED).tokens, "choice 0 is the request with n = 1"


def test_effective_seed_reproduces_an_unseeded_request(two_ends: Path) -> None:
    first = one(two_ends, replace(SAMPLED, seed=None))
    assert one(two_ends, replace(SAMPLED, seed=first.extras["seed"])).tokens == first.tokens


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.3},
        {"repetition_penalty": 1.4, "presence_penalty": -0.8, "frequency_penalty": 0.7},
        {"logit_bias": {17: 5.0, 18: 4.0, 19: -100.0}},
        {"allowed_token_ids": [1, 2, 30, 31, 32]},
    ],
)
@pytest.mark.parametrize("preempt", [False, True])
def test_greedy_with_processors_equals_the_plain_computation(
    two_ends: Path, reference: PreTrainedModel, options: dict[str, Any], preempt: bool
) -> None:
    params = replace(GREEDY, **options)
    settings = {"num_gpu_blocks_override": 14, "max_num_seqs": 4, "max_num_batched_tokens": 8} if preempt else {}
    engine = ModelEngine(two_ends, **settings)
    for _ in range(4 if preempt else 1):
        engine.add(PROMPT, params)
    outputs = [out.tokens for out in engine.run().values()]
    assert outputs == outputs[:1] * len(outputs)
    assert not preempt or engine.preempted
    logits = logits_of(reference, PROMPT + outputs[0])
    for i, token in enumerate(outputs[0]):
        x, output = logits[len(PROMPT) - 1 + i].clone(), outputs[0][:i]
        for biased, value in options.get("logit_bias", {}).items():
            x[biased] += value
        if "allowed_token_ids" in options:
            banned = [t for t in range(VOCAB) if t not in options["allowed_token_ids"]]
            x[banned] = -torch.inf
        seen = sorted({*PROMPT, *output})
        penalty = options.get("repetition_penalty", 1.0)
        x[seen] = torch.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
        for t in set(output):
            x[t] -= options.get("presence_penalty", 0.0) + options.get("frequency_penalty", 0.0) * output.count(t)
        best = x.topk(2).values
        assert token == int(x.argmax()) or best[0] - best[1] < 1e-4


def test_bad_words_of_one_and_of_several_tokens(two_ends: Path) -> None:
    plain = one(two_ends, GREEDY).tokens
    banned_first = one(two_ends, replace(GREEDY, bad_words_token_ids=((plain[0],),))).tokens
    assert plain[0] not in banned_first
    pair = (plain[3], plain[4])
    without = one(two_ends, replace(GREEDY, bad_words_token_ids=(pair, (200, 201, 202)))).tokens
    assert without[:4] == plain[:4]
    assert without[4] != plain[4]
    assert pair not in itertools.pairwise(without)
    across = one(two_ends, replace(GREEDY, bad_words_token_ids=((PROMPT[-1], plain[0]),))).tokens
    assert across[0] != plain[0], "a bad word may begin in the prompt"


def test_min_tokens_bans_every_stop_until_then(two_ends: Path) -> None:
    plain = one(two_ends, GREEDY).tokens
    eager = {"logit_bias": {EOS[0]: 100.0, EOS[1]: 90.0}, "ignore_eos": False, "max_tokens": 40}
    out = one(two_ends, replace(GREEDY, **eager))
    assert (out.tokens, out.finish) == ([EOS[0]], FinishReason.STOP)
    for stop in ((), (plain[1],)):
        out = one(two_ends, replace(GREEDY, min_tokens=5, stop_token_ids=stop, **eager))
        assert len(out.tokens) == 6
        assert not {*EOS, *stop} & set(out.tokens[:5])
        assert out.tokens[5] == EOS[0]
    ignoring = one(two_ends, replace(GREEDY, min_tokens=5, logit_bias={EOS[0]: 100.0}, max_tokens=8))
    assert ignoring.tokens == [EOS[0]] * 8, "an ignored eos is a token like any other"


def test_everything_banned_ends_the_request_not_with_token_0(two_ends: Path) -> None:
    engine = ModelEngine(two_ends)
    for hopeless in ({"stop_token_ids": (5,), "min_tokens": 3}, {"bad_words_token_ids": ((5,), (6,)), "min_tokens": 1}):
        with pytest.raises(ValidationError, match="allowed_token_ids"):
            engine.add(PROMPT, replace(GREEDY, allowed_token_ids=(5,), **hopeless))
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        engine.add(PROMPT, replace(GREEDY, allowed_token_ids=EOS, min_tokens=1, ignore_eos=False))
    params = replace(GREEDY, allowed_token_ids=(5,), bad_words_token_ids=((PROMPT[-1], 5),))
    bad, good = engine.add(PROMPT, params), engine.add(PROMPT, GREEDY)
    outputs = engine.run()
    assert outputs[bad].finish == FinishReason.ERROR
    assert outputs[bad].extras["code"] == "numerical"
    assert outputs[good].finish == FinishReason.LENGTH


@pytest.mark.parametrize("chunk", [2048, 5])
def test_logprobs_are_the_raw_models(two_ends: Path, reference: PreTrainedModel, chunk: int) -> None:
    params = replace(GREEDY, temperature=0.5, top_k=1, repetition_penalty=1.5, logprobs=3, prompt_logprobs=2)
    engine = ModelEngine(two_ends, max_num_batched_tokens=chunk, max_num_seqs=4)
    engine.add(PROMPT * 3, replace(params, logprobs=0))
    engine.run()  # the prompt is now in the prefix cache, which must not swallow prompt_logprobs
    handle = engine.add(PROMPT * 3, params)
    out = engine.run()[handle]
    expected = logits_of(reference, PROMPT * 3 + out.tokens).log_softmax(-1)
    prompt = [np.concatenate(parts) for parts in zip(*out.prompt_logprobs, strict=True)]
    output = [np.concatenate(parts) for parts in zip(*out.logprobs, strict=True)]
    cases = ((prompt, (PROMPT * 3)[1:], 0, 2), (output, out.tokens, len(PROMPT) * 3 - 1, 3))
    for (ids, values, ranks), chosen, first, count in cases:
        assert ids.shape == values.shape == (len(chosen), 1 + count)
        for i, token in enumerate(chosen):
            row = expected[first + i]
            assert ids[i, 0] == token
            np.testing.assert_allclose(values[i, 0], row[token], atol=2e-4)
            np.testing.assert_allclose(values[i, 1:], row.topk(count).values, atol=2e-4)
            assert abs(int(ranks[i]) - (1 + int((row > row[token]).sum()))) <= 1


def test_max_tokens_0_gives_the_prompts_logprobs_alone(two_ends: Path) -> None:
    out = one(two_ends, replace(GREEDY, max_tokens=0, prompt_logprobs=1))
    assert out.tokens == []
    assert sum(len(triple[0]) for triple in out.prompt_logprobs) == len(PROMPT) - 1


@pytest.mark.parametrize("chunk", [2048, 4])
def test_prompt_embeds_stand_in_for_tokens(two_ends: Path, reference: PreTrainedModel, chunk: int) -> None:
    table = reference.get_input_embeddings().weight.detach().numpy()
    engine = ModelEngine(two_ends, max_num_batched_tokens=chunk, max_num_seqs=4)
    by_tokens = engine.add(PROMPT, GREEDY)
    by_embeds = engine.add([0] * len(PROMPT), GREEDY, embeds=table[PROMPT])
    outputs = engine.run()
    assert outputs[by_embeds].tokens == outputs[by_tokens].tokens


def test_prompt_embeds_survive_preemption(two_ends: Path, reference: PreTrainedModel) -> None:
    table = reference.get_input_embeddings().weight.detach().numpy()
    expected = one(two_ends, GREEDY).tokens
    engine = ModelEngine(two_ends, num_gpu_blocks_override=14, max_num_seqs=4, max_num_batched_tokens=8)
    handles = [engine.add([0] * len(PROMPT), GREEDY, embeds=table[PROMPT]) for _ in range(4)]
    outputs = engine.run()
    assert engine.preempted
    assert [outputs[h].tokens for h in handles] == [expected] * 4


def test_nan_rows_are_isolated_to_the_bit(tmp_path: Path, two_ends: Path) -> None:
    """Token 200 has a NaN embedding: requests with it fail alone, all others see the same bits as without it."""
    from safetensors.torch import load_file, save_file

    ill = save_model(tmp_path / "ill", make_config("Llama", eos_token_id=list(EOS)), scale=0.12)
    tensors = load_file(ill / "model.safetensors")
    tensors["model.embed_tokens.weight"][200] = float("nan")
    save_file(tensors, ill / "model.safetensors")
    params = replace(SAMPLED, logprobs=4)

    def run(third: int) -> list[Output]:
        engine = ModelEngine(ill, enable_prefix_caching=False, num_gpu_blocks_override=60)
        rounds: list[Output] = []
        for _ in range(3):  # freed blocks that held NaN are used again
            handles = [engine.add([10 + i, *PROMPT], params) for i in range(3)]
            handles.append(engine.add([third, *PROMPT], params))
            handles.append(engine.add([77, *PROMPT, *PROMPT], params))
            outputs = engine.run()
            rounds += [outputs[h] for h in handles]
        return rounds

    sick, well = run(200), run(100)
    for i, (a, b) in enumerate(zip(sick, well, strict=True)):
        if i % 5 == 3:
            assert a.finish == FinishReason.ERROR
            assert a.extras["code"] == "numerical"
            assert not a.tokens
            continue
        assert a.tokens == b.tokens
        # The ill row ends early and later batches are smaller: only the first step is the same product of matrices.
        np.testing.assert_array_equal(a.logprobs[0][1], b.logprobs[0][1])


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("chunk", [2048, 4])
def test_embeddings(two_ends: Path, reference: PreTrainedModel, kind: str, chunk: int) -> None:
    engine = ModelEngine(two_ends, max_num_batched_tokens=chunk, max_num_seqs=4)
    prompts = [PROMPT, PROMPT[:1], PROMPT * 4]
    first = [engine.add(p, replace(GREEDY, max_tokens=1), pooling=kind) for p in prompts]
    beside = engine.add(PROMPT, GREEDY)
    engine.run()
    again = [engine.add(p, replace(GREEDY, max_tokens=1), pooling=kind) for p in prompts]
    outputs = engine.run()
    assert len(outputs[beside].tokens) == 12
    for handles in (first, again):  # the second time the prefix is cached
        for handle, prompt in zip(handles, prompts, strict=True):
            with torch.inference_mode():
                hidden = reference.model(input_ids=torch.tensor([prompt])).last_hidden_state[0].float()
            expected = hidden.mean(0) if kind == "mean" else hidden[-1]
            np.testing.assert_allclose(outputs[handle].pooled, expected / expected.norm(), atol=1e-5)
            assert outputs[handle].tokens == []
            assert outputs[handle].finish == FinishReason.STOP


PAIRWISE: dict[str, list[Any]] = {
    "temperature": [0.0, 0.9],
    "top_k": [0, 5],
    "top_p": [1.0, 0.8],
    "min_p": [0.0, 0.1],
    "presence_penalty": [0.0, 1.0],
    "frequency_penalty": [0.0, -0.5],
    "repetition_penalty": [1.0, 1.3],
    "logit_bias": [None, {5: 2.0, EOS[0]: 3.0}],
    "allowed_token_ids": [None, list(range(3, 60))],
    "bad_words_token_ids": [None, ((8,), (9, 10))],
    "min_tokens": [0, 3],
    "stop_token_ids": [None, [20, 21]],
    "ignore_eos": [False, True],
    "n": [1, 3],
    "logprobs": [None, 0, 4],
    "prompt_logprobs": [None, 2],
    "seed": [None, 99],
    "max_tokens": [1, 7],
}


def pairwise_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Rows that hold every pair of values of every two options, found greedily."""
    draw = random.Random(seed)
    names = list(PAIRWISE)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(PAIRWISE[a]))
        for j in range(len(PAIRWISE[b]))
    }
    rows = []
    while open_pairs:
        tries = [{name: draw.randrange(len(PAIRWISE[name])) for name in names} for _ in range(30)]
        covers = [{(a, t[a], b, t[b]) for a, b in itertools.combinations(names, 2)} & open_pairs for t in tries]
        best = max(range(len(tries)), key=lambda k: len(covers[k]))
        open_pairs -= covers[best]
        rows.append({name: PAIRWISE[name][i] for name, i in tries[best].items()})
    return rows


def test_every_pair_of_options_runs_together(two_ends: Path) -> None:
    engine = ModelEngine(two_ends, max_num_seqs=16, num_gpu_blocks_override=60, max_num_batched_tokens=64)
    rows = pairwise_rows()
    handles, params = [], []
    for row in rows:
        values = {**row, "min_tokens": min(row["min_tokens"], row["max_tokens"])}
        params.append(SamplingParams(**values))
        handles.append(engine.add(PROMPT, params[-1]))
    outputs = engine.run()
    for handle, asked in zip(handles, params, strict=True):
        for choice in range(asked.n):
            out = outputs[handle + choice]
            assert out.finish in (FinishReason.STOP, FinishReason.LENGTH), (asked, out.extras)
            assert asked.min_tokens <= len(out.tokens) <= asked.max_tokens  # type: ignore[operator]
            assert asked.logprobs is None or sum(len(t[0]) for t in out.logprobs) == len(out.tokens)
        assert asked.prompt_logprobs is None or outputs[handle].prompt_logprobs


def test_attention_map(two_ends: Path, tmp_path: Path) -> None:
    model = load_reference(two_ends)
    engine = ModelEngine(two_ends)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT]), output_attentions=True).attentions
    for layer, head in ((0, 0), (1, 5), (2, 2)):
        found = engine.runner.attention_map(PROMPT, layer, head)  # type: ignore[attr-defined]
        np.testing.assert_allclose(found, expected[layer][0, head], atol=1e-5)
    for wrong in ((PROMPT, 3, 0), (PROMPT, 0, 6), (PROMPT, -1, 0), ([], 0, 0), ([VOCAB], 0, 0), (["a"], 0, 0)):
        with pytest.raises(ValidationError):
            engine.runner.attention_map(*wrong)  # type: ignore[attr-defined]
