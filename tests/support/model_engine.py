"""An EngineCore with a real model in this process: requests in, tokens out, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.support.model_driver import load
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.loop.dp_proc import DPEngineCore
from wavecore.engine_core.plan import LeastSize, PendingStep, StepPlan
from wavecore.transport.processes.votes import VoteBoard
from wavecore.transport.wire.messages import Add, FinishReason
from wavecore.transport.wire.tensors import from_numpy, to_numpy

CLIENT = bytes(16)


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    extras: dict[str, Any] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    pooled: Any = None


SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 4}


class ModelEngine:
    """Args:
    runner: None loads one, over so many ranks.
    board: of engines in lockstep.
    """

    def __init__(
        self, model: Any, ranks: int = 1, runner: Any = None, board: VoteBoard | None = None, **settings: Any
    ) -> None:
        settings = {**SETTINGS, **settings}
        if runner is None:
            runner = load(model, **settings) if ranks == 1 else ThreadRanks(model, ranks, **settings)
        self.runner, config = runner, EngineConfig(model=str(model), **settings)
        self.core = EngineCore(config, runner) if board is None else DPEngineCore(config, runner, board)
        self.preempted = 0
        launch = self.runner.launch

        def counting(plan: StepPlan | None, *least: LeastSize) -> PendingStep:
            new_requests = () if plan is None else plan.new_requests
            self.preempted += sum(len(a.token_ids) > a.num_prompt for a in new_requests)
            return launch(plan, *least)

        self.runner.launch = counting
        self.handle = 0
        self.outputs: dict[int, Output] = {}

    def add(self, prompt: Sequence[int], params: SamplingParams, embeds: Any = None, **options: Any) -> int:
        handle = self.handle
        self.handle += params.n
        frame = from_numpy(np.array(prompt, np.int32))
        extra = None if embeds is None else from_numpy(np.ascontiguousarray(embeds, np.float32))
        add = Add(b"", CLIENT, handle, handle, frame, params.to_wire(), options, extra)
        for i in range(params.n):
            self.outputs[handle + i] = Output()
        self.core.add(self.core.admit(add))
        return handle

    def step(self) -> None:
        outputs, _ = self.core.step()
        for columns in outputs.values():
            at = 0
            for i, handle in enumerate(columns.handles.tolist()):
                out = self.outputs[handle]
                assert out.finish == FinishReason.NONE, "an ended request speaks again"
                count = int(columns.counts[i])
                out.tokens += columns.tokens[at : at + count].tolist()
                at += count
                out.finish = FinishReason(int(columns.finish[i]))
                extras = dict(columns.extras.get(i, {}))
                for name in ("logprobs", "prompt_logprobs", "pooled"):
                    frames = [np.array(to_numpy(columns.frames[k])) for k in extras.pop(name, ())]
                    if name == "pooled":
                        out.pooled = frames[0] if frames else out.pooled
                    else:
                        getattr(out, name).extend(frames[k : k + 3] for k in range(0, len(frames), 3))
                out.extras.update(extras)
        self.core.utilities.check_integrity()

    def run(self) -> dict[int, Output]:
        while self.core.has_work:
            self.step()
        return self.outputs

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        handles = [
            self.add(prompt, params if params.seed is not None else replace(params, seed=0)) for prompt in prompts
        ]
        outputs = self.run()
        return [outputs[handle].tokens for handle in handles]
