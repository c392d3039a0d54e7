"""Drives a runner with hand-made plans: exact control over chunks, preemptions and shared blocks, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import NewRequest, RowLogprobs, Runner, StepPlan, StepResult, int_table
from wavecore.engine_core.startup import beginning, factory

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1000)
NO_ROWS = np.zeros(0, np.intp), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_)


def load(model: Any, **settings: Any) -> Runner:
    values: dict[str, Any] = {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 4}
    values |= {"num_gpu_blocks_override": 2000, "model": str(model)}
    # A process of tests has most kernels compiled, and no engine to wait for.
    with patch.object(beginning, "compiler_beside", lambda *_: nullcontext()):
        runner: Any = factory.make_runner(EngineConfig(**{**values, **settings}), lambda _phase, _fraction: None)
    with runner.graphs.uncounted() if hasattr(runner, "graphs") else nullcontext():
        while getattr(runner, "unmet", ()):  # as in the idle turns of an engine; only what tests run gets graphs
            runner.meet()
    return runner  # type: ignore[no-any-return]


@dataclass
class DrivenSequence:
    """A running sequence: `computed` tokens have keys in the cache."""

    tokens: list[int]
    num_prompt: int
    slot: int
    count: int
    params: SamplingParams
    choice: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    begun: bool = False
    embeds: Any = None
    pooling: str = ""
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    pooled: Any = None
    fault: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def done(self) -> bool:
        return self.fault or self.pooled is not None or len(self.output) >= self.count


class ModelDriver:
    """Drives a runner by hand, one step after the other; between two of them a CUDA graph is captured."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.next_block = 1
        self.step_id = 0
        self.after: int | None = None  # of the next plans; None: behind every transfer before them

    def add(
        self, prompt: Sequence[int], count: int, slot: int, params: SamplingParams = GREEDY, **more: Any
    ) -> DrivenSequence:
        return DrivenSequence(list(prompt), len(prompt), slot, count, params, **more)

    def preempt(self, sequence: DrivenSequence) -> None:
        """Drop its blocks; it begins again with all its tokens."""
        sequence.computed, sequence.begun, sequence.blocks = 0, False, []

    def move(
        self,
        swap_out: Sequence[tuple[int, int]] = (),
        swap_in: Sequence[tuple[int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
        table: Sequence[tuple[int, int, int]] = (),
    ) -> StepResult:
        """A plan of events alone."""
        pairs = (int_table(p, 2) for p in (swap_out, swap_in, copies))
        return self._run(StepPlan(self.step_id, *NO_ROWS, (), *pairs, int_table(table, 3)))

    def step(self, running: Sequence[DrivenSequence], chunk: int = 1 << 30) -> StepResult:
        rows = [s for s in running if not s.done]
        rows.sort(key=lambda s: min(chunk, len(s.tokens) - s.computed) > 1)  # rows with one query token come first
        new_requests, table = [], []
        lens = [min(chunk, len(s.tokens) - s.computed) for s in rows]
        for s, length in zip(rows, lens, strict=True):
            if not s.begun:
                ids = np.array(s.tokens, np.int32)
                new_requests.append(NewRequest(s.slot, ids, s.num_prompt, s.params, s.choice, s.embeds, s.pooling))
                table += [(s.slot, i, block) for i, block in enumerate(s.blocks)]
                s.begun = True
            while len(s.blocks) * self.runner.info.block_size < s.computed + length:
                table.append((s.slot, len(s.blocks), self.next_block))
                s.blocks.append(self.next_block)
                self.next_block += 1
        samples = [not s.pooling and s.computed + n == len(s.tokens) for s, n in zip(rows, lens, strict=True)]
        plan = StepPlan(
            self.step_id,
            np.array([s.slot for s in rows], np.intp),
            np.array([s.computed for s in rows], np.int32),
            np.array(lens, np.int32),
            np.array(samples, np.bool_),
            tuple(new_requests),
            table=int_table(table, 3),
        )
        result = self._run(plan)
        for i, s in enumerate(rows):
            s.computed += lens[i]
            s.fault = bool(result.faults[i])
            s.pooled = result.pooled.get(i)
            if i in result.prompt_logprobs:
                s.prompt_logprobs.append(result.prompt_logprobs[i])
            assert (result.tokens[i] >= 0) == samples[i]
            if samples[i]:
                s.tokens.append(int(result.tokens[i]))
                if i in result.logprobs:
                    s.logprobs.append(result.logprobs[i])
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        after = self.step_id - 1 if self.after is None else self.after
        self.step_id += 1
        result = self.runner.launch(replace(plan, after=after)).wait()
        if self.runner.wants_capture(1):  # on a GPU: what follows runs from graphs, as far as there are any
            self.runner.launch(StepPlan(self.step_id, *NO_ROWS, captures=True)).wait()
            self.step_id += 1
        return result

    def run(
        self,
        sequences: Sequence[DrivenSequence],
        chunk: int = 1 << 30,
        between: Callable[[int], None] = lambda _step: None,
    ) -> list[list[int]]:
        """Steps until all are done; the outputs."""
        step = 0
        while not all(s.done for s in sequences):
            self.step(sequences, chunk)
            between(step)
            step += 1
        return [s.output for s in sequences]
