"""The steps of the warm-up: they reach every bound, meet every size, ask for everything and leave nothing behind."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.model_engine import ModelEngine

from wavecore.engine_core import plan as step_plan
from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.engine_core.execution.step_shape import MAX_BUCKET, Bucket, Buckets, StepShape, bucket
from wavecore.engine_core.plan import LOGPROB_CHUNK, NewRequest, RunnerInfo, StepPlan
from wavecore.engine_core.startup.warm_up import PLAIN, warm_up


class Recorder:
    """A runner that only notes plans."""

    def __init__(self, length: int, tokens: int, seqs: int) -> None:
        self.info = RunnerInfo(2, 0, 16, length, 211, 8, (), "bfloat16", "cuda")
        self.state = SimpleNamespace(block_table=torch.zeros((seqs, 1)))
        self.buckets = Buckets(tokens, seqs)
        self.unmet: deque[Bucket | StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.slots: dict[int, NewRequest] = {}

    def start(self, plan: StepPlan) -> Any:
        assert not self.state.block_table.any()
        self.slots |= {admission.slot: admission for admission in plan.new_requests}
        for slot, end, samples in zip(plan.slots, plan.starts + plan.query_lens, plan.samples, strict=True):
            holds = self.slots.get(slot)
            assert not (samples and holds) or (end >= holds.num_prompt and not holds.pooling), "no plan is like this"
        self.plans.append(plan)
        return SimpleNamespace(wait=lambda: None)


def recorded(length: int, tokens: int, seqs: int, max_logprobs: int = MAX_LOGPROBS) -> Recorder:
    runner = Recorder(length, tokens, seqs)
    runner.info = replace(runner.info, max_logprobs=max_logprobs)
    warm_up(runner, EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens))  # type: ignore[arg-type]
    return runner


def record(length: int, tokens: int, seqs: int, max_logprobs: int = MAX_LOGPROBS) -> list[StepPlan]:
    """Those of idle turns, too."""
    runner = recorded(length, tokens, seqs, max_logprobs)
    plans = runner.plans
    for plan in rare(runner):
        runner.start(plan)
    return plans


def rare(runner: Recorder) -> list[StepPlan]:
    return [step for step in runner.unmet if isinstance(step, StepPlan)]


def padded(runner: Recorder) -> list[Bucket]:
    return [step for step in runner.unmet if isinstance(step, Bucket)]


limits = st.tuples(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 300))
limits = limits.filter(lambda sizes: sizes[1] >= sizes[2])


@settings(max_examples=40)
@given(limits)
@example((4200, 8192, 256))
@example((4097, 8192, 8))
@example((131072, 8192, 256))
@example((8192, 16000, 64))
@example((1, 64, 64))
def test_the_largest_steps_are_among_them(sizes: tuple[int, int, int]) -> None:
    """As many tokens as a plan may have, with as many rows as it may have, with all options and without any."""
    length, tokens, seqs = sizes
    most = min(tokens, seqs * length)
    runner = recorded(*sizes)
    plans, later = runner.plans, rare(runner)
    for plan in plans + later:
        assert plan.num_rows <= seqs and plan.num_tokens <= tokens
        assert (plan.query_lens > 0).all() and (plan.starts + plan.query_lens <= length).all()
        assert sorted(plan.slots.tolist()) == list(range(plan.num_rows))
    asks = [(plan.num_tokens, [a.params != PLAIN for a in plan.new_requests]) for plan in later]
    assert all(size <= max(seqs, LOGPROB_CHUNK) for size, rare in asks if any(rare)), "memory that was not measured"
    full = [plan for plan in plans if plan.num_tokens == most and plan.num_rows == seqs and plan.samples.all()]
    asked = [[a.params for a in plan.new_requests] for plan in full if len(plan.new_requests) == seqs]
    assert any(all(p.logprobs and p.prompt_logprobs and p.repetition_penalty != 1 for p in each) for each in asked)
    assert any(all(p.temperature == 0 and not p.logprobs for p in each) for each in asked)
    for option in ("prompt_embeds", "pooling"):
        assert any(plan.num_tokens == most and all(_has(a, option) for a in plan.new_requests) for plan in plans)


def _has(admission: Any, option: str) -> bool:
    value = getattr(admission, option)
    return value is not None and len(value) > 0


@settings(max_examples=40)
@given(limits)
@example((4200, 8192, 256))
@example((131072, 16384, 1024))
def test_every_padded_size_is_among_them(sizes: tuple[int, int, int]) -> None:
    """Once the engine was idle, no matrix product meets a shape that it has not met. At once it has met some of every
    order of size."""
    _, tokens, seqs = sizes
    runner = recorded(*sizes)
    assert {bucket(rows, seqs) for rows in range(1, seqs + 1)} <= {size.rows for size in padded(runner)}
    met = {size.tokens for size in padded(runner)}
    assert {bucket(count, tokens) for count in range(1, min(tokens, MAX_BUCKET) + 1)} <= met and max(met) <= tokens
    largest = sorted(size for size in met if size >= MAX_BUCKET)
    assert all(after <= 1.34 * before for before, after in pairwise(largest))
    ran = [StepShape(plan, runner.buckets).bucket for plan in runner.plans]
    ran += [StepShape(plan, runner.buckets).bucket for plan in rare(runner)]
    for many in ({size.rows for size in ran if size.max_query_len == 1}, {size.tokens for size in ran}):
        assert all(after <= 2 * before for before, after in pairwise(sorted(many)))


def test_ranks_in_lockstep_meet_everything_at_once() -> None:
    """A turn is no rank's own there. Sizes go first."""
    runner = recorded(100, 300, 20)
    wanted = len(runner.unmet)
    met = deque[Bucket | StepPlan]()
    runner.unmet.clear()
    runner.meet = lambda: met.append(runner.unmet.popleft())  # type: ignore[attr-defined]
    limits: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 300, "data_parallel_size": 2}
    warm_up(runner, EngineConfig(**limits, dp_lockstep=True))  # type: ignore[arg-type]
    assert len(met) == wanted and not runner.unmet
    assert [isinstance(step, StepPlan) for step in met] == sorted(isinstance(step, StepPlan) for step in met)


def test_what_is_admitted_last_asks_for_nothing() -> None:
    admitted = {a.slot: a for plan in recorded(100, 300, 20).plans for a in plan.new_requests}
    plain = SamplingParams(temperature=0.0, seed=0)
    assert len(admitted) == 20
    assert all(a.params == plain and a.prompt_embeds is None and not a.pooling for a in admitted.values())


def test_every_kernel_is_used() -> None:
    plans = record(100, 300, 20)
    assert any(len(plan.copies) for plan in plans)
    assert any(not plan.samples.any() and not plan.new_requests for plan in plans)
    params = [a.params for plan in plans for a in plan.new_requests]
    options = ("logit_bias", "bad_words_token_ids", "allowed_token_ids", "stop_token_ids", "min_tokens")
    assert all(any(getattr(p, option) for p in params) for option in options)
    assert any(p.temperature and not (p.top_k or p.min_p or p.top_p < 1 or p.logit_bias) for p in params)
    assert any(p.temperature and p.top_k and not p.logit_bias for p in params)
    assert any(p.temperature and p.logit_bias and not (p.top_k or p.min_p or p.top_p < 1) for p in params)
    assert {a.pooling for plan in plans for a in plan.new_requests} == {"", "mean", "last"}


def reports(plans: list[StepPlan]) -> set[tuple[int, int]]:
    """(positions at once, alternatives) of every log-softmax and topk of these plans, of output and of prompts."""
    found: set[tuple[int, int]] = set()
    slots: dict[int, NewRequest] = {}
    for plan in plans:
        slots |= {a.slot: a for a in plan.new_requests}
        rows = [slots[slot] for slot in plan.slots.tolist()]
        asked = [a.params.logprobs for a in rows if a.params.logprobs is not None]
        if asked and plan.samples.all():
            found |= {
                (min(LOGPROB_CHUNK, len(asked) - first), max(asked)) for first in range(0, len(asked), LOGPROB_CHUNK)
            }
        for admission, start, length in zip(rows, plan.starts.tolist(), plan.query_lens.tolist(), strict=True):
            if (count := admission.params.prompt_logprobs) is not None:
                positions = min(start + length, admission.num_prompt - 1) - start
                found |= {
                    (min(LOGPROB_CHUNK, positions - first), count) for first in range(0, positions, LOGPROB_CHUNK)
                }
    return found


@pytest.mark.parametrize("sizes", [(100, 300, 20), (100, 64, 1), (4096, 8192, 256)])
def test_every_kernel_that_torch_picks_by_size_is_used(sizes: tuple[int, int, int]) -> None:
    """The limits are ATen's: TensorTopK.cu, Sort.cu and Indexing.cu of torch 2.11."""
    plans = record(*sizes)
    positions = [range(1, 2), range(2, 21), range(21, 41), range(41, 65)]
    alternatives = [range(2, 33), range(33, 65)]
    found = reports(plans)
    for at_once, count in found:
        assert at_once <= LOGPROB_CHUNK and count <= MAX_LOGPROBS
    for some in positions:
        for few in alternatives:
            assert any(n in some and k in few for n, k in found), (some, few)
    output = [
        len(a.token_ids) - a.num_prompt for p in plans for a in p.new_requests if a.params.repetition_penalty != 1
    ]
    assert any(1 <= count <= 16 for count in output) and any(count > 16 for count in output)
    entries = [block for plan in plans for block in plan.table[:, 2].tolist()]
    assert entries and set(entries) <= {0, 1}, "the cache has two blocks when steps are measured"
    pooled = 0
    kept: set[int] = set()
    for plan in plans:
        kept -= {a.slot for a in plan.new_requests}
        begun = {a.slot: a for a in plan.new_requests if a.pooling == "mean"}
        pooled += sum(slot in kept and start > 0 for slot, start in zip(plan.slots, plan.starts, strict=True))
        ends = dict(zip(plan.slots.tolist(), (plan.starts + plan.query_lens).tolist(), strict=True))
        kept |= {slot for slot, a in begun.items() if ends[slot] < a.num_prompt}
    assert pooled, "no prompt is pooled in two steps"


@pytest.mark.parametrize("room", [step_plan.MANY_VALUES, 1])
def test_reports_of_many_alternatives_are_made_in_as_many_positions_as_fit(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(step_plan, "MANY_VALUES", room)
    found = {(n, k) for n, k in reports(record(100, 300, 20, max_logprobs=-1)) if k > MAX_LOGPROBS}
    fits = {128: (3,), 211: (2,)} if room == 1 else {128: (20, 40, 64), 211: (20, 40, 64)}
    assert found == {(n, k) for k, sizes in fits.items() for n in (1, *sizes)}


@pytest.mark.parametrize(
    ("sizes", "padded"),
    [((8, 64, None), False), ((1, 4, None), False), ((1, 1, 20), False), ((4, 4, 8), True), ((3, 700, 200), True)],
)
def test_warm_up_leaves_no_trace(tiny_llama: Path, sizes: tuple[int, int, int | None], padded: bool) -> None:
    """It is for CUDA, where it measures memory and compiles; the plans are the same everywhere. Those of idle turns
    leave alone what the prefix cache has."""
    seqs, tokens, length = sizes
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": length}
    fresh, warmed = ModelEngine(tiny_llama, **limits), ModelEngine(tiny_llama, **limits)
    runner: Any = warmed.runner
    if padded:
        runner.buckets = Buckets(tokens, seqs)
    warm_up(runner, EngineConfig(model=str(tiny_llama), device="cpu", **limits))
    asked = [[1, 2, 7], [2, 4], [3, 6, 7, 1]]
    for idle in (False, True):
        cache = runner.kv_cache[1:].clone()
        while idle and warmed.core.has_work:
            warmed.core.step()
        assert torch.equal(cache, runner.kv_cache[1:]) and bool(runner.unmet) != idle
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=4, ignore_eos=True)
            assert warmed.generate(asked, params) == fresh.generate(asked, params)
