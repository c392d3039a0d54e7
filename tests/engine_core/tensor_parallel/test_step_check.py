"""Ranks that compare their steps: silence while they agree, and the first difference by step and row."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_driver import ModelDriver
from tests.support.model_engine import ModelEngine
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import LeastSize, NewRequest, StepPlan, int_table
from wavecore.engine_core.tensor_parallel import worker
from wavecore.engine_core.tensor_parallel.plan_codec import decode, encode
from wavecore.engine_core.tensor_parallel.step_check import digest
from wavecore.transport.errors import WavecoreError

ASKED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, logit_bias={3: 1.0}, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_config("Qwen3", num_attention_heads=4))


def difference(runner: ThreadRanks, steps: int) -> str:
    """What the worker says that ends behind the last of so many steps of five rows."""
    driver = ModelDriver(runner)
    rows = [driver.add(prompt, 10, slot, ASKED) for slot, prompt in enumerate(prompts(5, seed=2))]
    for _ in range(steps):
        driver.step(rows)
    with pytest.raises(WavecoreError) as found:
        runner.close()
    return str(found.value)


def test_ranks_that_agree(model: Path) -> None:
    """Two steps in flight, of which some are rolled back for want of memory."""
    engine = ModelEngine(model, 4, check_ranks=True, max_num_batched_tokens=32)
    runner: Any = engine.runner
    runner.collectives[2].fails_at = runner.collectives[2].calls + 20
    for prompt in prompts(5, seed=2):
        engine.add(prompt, ASKED)
    assert {output.finish.name for output in engine.run().values()} == {"LENGTH"}
    assert runner.collectives[2].fails_at == -1
    runner.close()


def test_a_token_that_one_rank_drew(model: Path) -> None:
    runner = ThreadRanks(model, 2, check_ranks=True)
    start = runner.ranks[1].start

    def starting(plan: StepPlan, *more: Any) -> Any:
        step = start(plan, *more)
        if plan.step_id == 3:
            assert step.fetched is not None
            step.fetched.drawn(plan.num_rows)[0, 4] += 1
        return step

    runner.ranks[1].start = starting  # type: ignore[method-assign]
    found = re.fullmatch(r"check_ranks: step 3, row 4: it drew token (\d+), rank 0 token (\d+)", difference(runner, 4))
    assert found is not None and int(found[1]) == int(found[2]) + 1


def test_a_plan_that_one_rank_has(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes is the same: nobody looks at blocks behind the sequence."""

    def other_plan(data: bytes) -> tuple[StepPlan, LeastSize | None]:
        plan, least = decode(data)
        more = [[0, 60, 1]] if plan.step_id == 2 else np.zeros((0, 3))
        return replace(plan, table=np.concatenate((plan.table, more), dtype=np.int32, casting="unsafe")), least

    monkeypatch.setattr(worker, "decode", other_plan)
    found = difference(ThreadRanks(model, 2, check_ranks=True), 3)
    assert found == "check_ranks: step 2: its plan is not that of rank 0"


def test_every_field_of_a_plan_counts() -> None:
    def plan(**changes: Any) -> StepPlan:
        new = NewRequest(1, np.arange(3, dtype=np.int32), 3, ASKED, 0, np.ones((3, 2), np.float32))
        table = int_table([(1, 2)], 2)
        columns: list[Any] = [np.array([0, 1], kind) for kind in (np.intp, np.int32, np.int32, np.bool_)]
        whole = StepPlan(7, *columns, (new,), table, table, table, int_table([(1, 2, 3)], 3), 5)
        return replace(whole, **changes)

    first = plan()
    assert digest(first) == digest(plan()) == digest(decode(b"".join(encode(first, None)))[0])
    numbers = {field.name for field in fields(StepPlan) if field.init} - {"new_requests", "samples", "captures"}
    others = [plan(**{name: getattr(first, name) + 1}) for name in numbers]
    others += [plan(samples=~first.samples), plan(captures=True)]
    changes: list[dict[str, Any]] = [
        {"slot": 2},
        {"token_ids": np.arange(1, 4, dtype=np.int32)},
        {"num_prompt": 2},
        {"params": replace(ASKED, seed=4)},
        {"choice": 1},
        {"prompt_embeds": np.zeros((3, 2), np.float32)},
        {"pooling": "mean"},
    ]
    assert [field.name for field in fields(NewRequest)] == [name for change in changes for name in change]
    others += [plan(new_requests=(replace(first.new_requests[0], **change),)) for change in changes]
    assert len({digest(first), *map(digest, others)}) == 1 + len(others)
