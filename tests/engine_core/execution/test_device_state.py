"""What a runner keeps between steps: fixed tensors and nothing else, whatever requests ask for and however they end."""

from __future__ import annotations

import gc
import random
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import VOCAB, load_reference
from tests.support.model_driver import GREEDY, ModelDriver, load
from tests.support.model_engine import CLIENT, ModelEngine

from wavecore.engine_core.api.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from wavecore.kernels import ops
from wavecore.kernels.batch import StepRows
from wavecore.kernels.sampling.rows import SamplingRows
from wavecore.transport.errors import ValidationError

EOS = 3
PROMPT = [5, 9, 140, 33, 7, 61]


@pytest.fixture(scope="module")
def table(broad_llama: Path) -> Any:
    """The model's token embeddings, float32 [vocab, hidden]."""
    return load_reference(broad_llama).get_input_embeddings().weight.detach().numpy()


def storages(root: Any) -> dict[int, int]:
    """Address and bytes of the memory of every tensor that an object holds, at any depth."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif is_dataclass(item):
            stack.extend(getattr(item, field.name) for field in fields(item))
        elif type(item).__module__.startswith("wavecore"):
            stack.extend(vars(item).values())
    return found


def kept(runner: Any) -> dict[int, int]:
    """All but weights and KV cache."""
    return storages([runner.state, runner.buffers, runner.out, runner.hidden, runner.copies])


def random_request(draw: random.Random, table: Any) -> tuple[list[int], dict[str, Any], Any, dict[str, Any]]:
    """Prompt, parameters, prompt embeddings, options."""
    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]
    values: dict[str, Any] = {"seed": draw.randrange(100), "max_tokens": draw.randint(1, 12)}
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0],
        "top_k": [0, 5],
        "top_p": [1.0, 0.8],
        "min_p": [0.0, 0.05],
        "presence_penalty": [0.0, 0.0, 0.5],
        "frequency_penalty": [0.0, 0.0, -0.5],
        "repetition_penalty": [1.0, 1.0, 1.4],
        "logit_bias": [None, None, {draw.randrange(VOCAB): 2.0 for _ in range(20)}],
        "allowed_token_ids": [None, None, draw.sample(range(VOCAB), 50)],
        "bad_words_token_ids": [None, None, [[draw.randrange(VOCAB)] * draw.randint(1, 3) for _ in range(9)]],
        "min_tokens": [0, 1],
        "logprobs": [None, None, 0, 5],
        "prompt_logprobs": [None, None, 3],
        "n": [1, 1, 1, 2],
    }
    values |= {name: draw.choice(some) for name, some in choices.items()}
    kind = draw.random()
    if kind < 0.15:
        return prompt, {"seed": 0, "max_tokens": 1}, None, {"pooling": draw.choice(["mean", "last"])}
    if kind < 0.3:
        return [0] * len(prompt), values, table[prompt], {}
    return prompt, values, None, {}


def test_every_address_stays_and_nothing_is_left(
    broad_llama: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of plans with all options, chunks, preemptions, forks and aborts."""
    engine = ModelEngine(broad_llama, max_num_seqs=6, max_num_batched_tokens=24, num_gpu_blocks_override=30)
    runner: Any = engine.runner
    before = kept(runner)
    seen: dict[str, set[int]] = {}

    def watch(name: str, kind: type) -> None:
        function = getattr(ops, name)

        def watching(*args: Any) -> Any:
            [rows] = [arg for arg in args if isinstance(arg, kind)]
            for field in fields(rows):
                if isinstance(value := getattr(rows, field.name), torch.Tensor):
                    seen.setdefault(f"{name} {field.name}", set()).add(value.data_ptr())
            return function(*args)

        monkeypatch.setattr(ops, name, watching)

    watch("draw", SamplingRows)
    watch("finish", SamplingRows)
    watch("prepare_batch", StepRows)
    draw = random.Random(0)
    plans = 0
    while plans < 300:
        if len(engine.core.requests.all()) < 10:
            prompt, values, embeds, options = random_request(draw, table)
            engine.add(prompt, SamplingParams(**values), embeds=embeds, **options)
        if draw.random() < 0.1:
            mine = engine.core.requests.by_client.get(CLIENT, {})
            engine.core.abort(CLIENT, [draw.choice(list(mine))] if mine else [])
        engine.step()
        plans += 1
    engine.core.abort_client(CLIENT)
    engine.run()
    assert engine.preempted > 3
    assert kept(runner) == before
    assert len(seen) > 25
    moved = {name: len(addresses) for name, addresses in seen.items() if len(addresses) > 1}
    assert not moved
    gc.collect()
    assert not runner.state.embeds


def test_all_memory_is_accounted_for(broad_llama: Path) -> None:
    runner: Any = load(broad_llama, max_num_seqs=5, max_num_batched_tokens=70)
    stats = runner.memory_stats()
    assert stats["tables_bytes"] + stats["sampling_bytes"] == sum(kept(runner).values())
    assert stats["sampling_bytes"] > 5 * 4 * (VOCAB + MAX_BAD_WORD_TOKENS)


@pytest.mark.parametrize("chunk", [2048, 4])
def test_embeddings_of_a_request_that_ends_early_go_with_it(broad_llama: Path, table: Any, chunk: int) -> None:
    """Aborted before its prompt is computed, while others run on; the whole prompt's are gone once it is computed."""
    engine = ModelEngine(broad_llama, max_num_batched_tokens=chunk, max_num_seqs=4, num_gpu_blocks_override=60)
    embeds: Any = engine.runner.state.embeds  # type: ignore[attr-defined]
    beside = engine.add(PROMPT, replace(GREEDY, max_tokens=30, ignore_eos=True))
    handle = engine.add([0] * 24, replace(GREEDY, max_tokens=2), embeds=table[PROMPT * 4])
    for _ in range(4):
        engine.step()
    if chunk == 2048:
        assert not embeds
    else:
        assert len(embeds) == 1
        engine.core.abort(CLIENT, [handle])
        for _ in range(3):
            engine.step()
        gc.collect()
        assert not embeds
        assert not engine.outputs[beside].finish
    engine.run()


def test_only_the_steps_part_of_prompt_embeddings_is_brought(
    broad_llama: Path, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ModelDriver(load(broad_llama))
    state: Any = driver.runner.state  # type: ignore[attr-defined]
    brought, new = [], state.uploads.new
    monkeypatch.setattr(state.uploads, "new", lambda v: brought.append(len(v)) or new(v))
    ids = PROMPT * 3
    want = driver.run([driver.add(ids, 5, 0)])
    assert driver.run([driver.add([0] * len(ids), 5, 1, embeds=table[ids])], chunk=7) == want
    assert brought == [7, 7, 4]


def test_changes_that_do_not_fit_the_steps_vector(broad_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ModelDriver(load(broad_llama))
    want = driver.run([driver.add(PROMPT * 5, 9, i) for i in range(3)])
    state: Any = driver.runner.state  # type: ignore[attr-defined]
    apart, new = [], state.uploads.new
    monkeypatch.setattr(state.uploads, "new", lambda v: apart.append(len(v)) or new(v))
    monkeypatch.setattr(state.input, "room", 8)
    assert driver.run([driver.add(PROMPT * 5, 9, i) for i in range(3)]) == want
    assert max(apart) > 60


def test_a_slot_forgets_the_options_of_its_last_request(broad_llama: Path) -> None:
    """Every option at its bound, then a plain request in the same slot."""
    driver = ModelDriver(load(broad_llama))
    plain = driver.run([driver.add(PROMPT, 6, 1)])
    everything = SamplingParams(
        seed=0,
        temperature=1.0,
        top_k=3,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        allowed_token_ids=list(range(40)),
        logit_bias=dict.fromkeys(range(VOCAB), -5.0),
        bad_words_token_ids=[[i % VOCAB] * 64 for i in range(256)],
        stop_token_ids=list(range(100, 228))[:111],
        min_tokens=3,
        max_tokens=6,
        logprobs=3,
        prompt_logprobs=3,
    )
    driver.run([driver.add(PROMPT, 6, 1, everything), driver.add(PROMPT, 6, 0, everything)])
    assert driver.run([driver.add(PROMPT, 6, 1)]) == plain


def test_bad_words_are_bounded_all_together() -> None:
    words = [[7] * 64] * 256
    assert sum(map(len, words)) == MAX_BAD_WORD_TOKENS
    assert SamplingParams(bad_words_token_ids=words).bad_words_token_ids
    with pytest.raises(ValidationError, match="bad_words: 16385 tokens"):
        SamplingParams(bad_words_token_ids=[[7] * 65, *words[1:]])


def test_the_search_for_tensors_sees_what_a_slot_would_leave(broad_llama: Path) -> None:
    runner: Any = load(broad_llama)
    before = kept(runner)
    runner.state.pooled = {3: torch.zeros(5)}
    assert len(kept(runner)) == len(before) + 1
