"""Drives an EngineCore by hand: builds requests, steps, collects what clients would see, and knows the right tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scripted_runner import POISON, Script, ScriptedRunner
from tests.support.scripted_model import scripted_output

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.plan import LeastSize, StepPlan, StepResult
from wavecore.transport.wire.messages import Add, FinishReason, StepTokens, TensorFrame

CLIENT = b"c" * 16


class PoisoningRunner(ScriptedRunner):
    """Overwrites, after each step, the blocks that nobody owned and nobody could find when it was launched."""

    pools: Any = None  # the core's KVCacheManager, set by the driver

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.swapped_out: list[int] = []
        self.uses, self.captures = 0, 0  # of a part without a graph; graphs made

    def wants_capture(self, uses: int) -> bool:
        return self.uses >= uses

    def launch(self, plan: StepPlan | None, least: LeastSize | None = None) -> Any:
        if plan is None:
            return super().launch(None, least)
        for events in (plan.swap_out, plan.swap_in, plan.copies):
            assert len(set(events[:, 1].tolist())) == len(events), "one step copies twice to the same block"
        assert set(plan.copies[:, 0].tolist()).isdisjoint(plan.copies[:, 1].tolist()), "a chain of copies"
        places = [(slot, index) for slot, index, _ in plan.table.tolist()]
        assert len(set(places)) == len(places), "one step writes an entry of the block table twice"
        assert len(set(plan.slots.tolist())) == plan.num_rows and (plan.query_lens > 0).all()
        assert np.diff(plan.query_lens > 1, prepend=False).sum() <= 1, "rows with one query token come first"
        events = len(plan.swap_out) or len(plan.swap_in) or plan.new_requests
        assert plan.num_rows or events or plan.captures, "a plan of nothing"
        if plan.captures:
            assert not self.queue and not plan.num_rows, "a graph is captured while nothing else runs"
            self.uses, self.captures = 0, self.captures + 1
        assert plan.after < plan.step_id
        self.swapped_out += plan.swap_out[:, 0].tolist()
        pending = super().launch(plan, least)
        kv = self.pools
        pending.poison = [
            b for b in range(1, kv.device.num_blocks) if not kv.device.refs(b) and not kv.device.hash_of(b)
        ]
        pending.poison_host = [
            b - 1 for b in range(1, kv.host.num_blocks) if not kv.host.refs(b) and not kv.host.hash_of(b)
        ]
        run = self.run

        def wait() -> StepResult:
            self.queue.popleft()
            result = run(plan)
            self.blocks[pending.poison] = POISON
            self.host_blocks[pending.poison_host] = POISON
            return result

        pending.wait = wait
        return pending


class Clock:
    """Time that moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SchedulerDriver:
    """An EngineCore with a scripted runner. `outputs[handle]`, `finish[handle]`, `extras[handle]` are what came out.

    Without a clock of the test's own each turn takes 10 ms of made-up time.
    """

    def __init__(
        self, script: Script | None = None, clock: Callable[[], float] | None = None, check: bool = True, **config: Any
    ) -> None:
        self.config = EngineConfig(model="scripted:", **config)
        self.runner = PoisoningRunner(self.config, script=script or Script())
        self.clock = Clock()
        self.core = self.make_core(clock or self.clock)
        self.runner.pools = self.core.requests.kv
        self._start_urgent = self.core.scheduler._start_urgent
        self.core.scheduler._start_urgent = self.start_urgent  # type: ignore[method-assign]
        self.check = check
        self.outputs: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.extras: dict[int, dict[str, Any]] = {}
        self.frames: dict[int, dict[str, list[TensorFrame]]] = {}
        self.sent: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.first_step: dict[int, int] = {}
        self.steps = 0

    def make_core(self, clock: Callable[[], float]) -> EngineCore:
        return EngineCore(self.config, self.runner, clock)

    def add(
        self,
        handle: int,
        prompt: Sequence[int],
        options: dict[str, Any] | None = None,
        client: bytes = CLIENT,
        embeds: TensorFrame | None = None,
        **params: Any,
    ) -> None:
        request = self.core.admit(make_add(handle, prompt, options, client, embeds, **params))
        self.core.add(request)
        params["seed"] = request.params.seed
        for choice in range(params.get("n", 1)):
            self.sent[handle + choice] = (list(prompt), {**params, "choice": choice})

    def start_urgent(self) -> None:
        """Nobody more urgent than a running request is left waiting without need."""
        self._start_urgent()
        requests = self.core.requests
        head = requests.waiting.peek()
        if head is not None and len(victims := self.core.scheduler._outranked(head)):
            comes_free = not requests.slots.free and requests.slots.in_flight[~requests.slots.runs].any()
            held = Counter(block for slot in victims.tolist() for block in requests.slots.at(slot).blocks)
            freed = sum(requests.kv.device.refs(block) == count for block, count in held.items())
            room = (requests.kv.device.num_free + freed) * requests.kv.block_size
            room += requests.kv.leaving * requests.kv.block_size
            assert comes_free or room < len(head.tokens) or requests.kv.leaving, "an urgent request was passed over"

    def step(self) -> dict[bytes, StepTokens]:
        outputs, _ = self.core.step()
        self.steps += 1
        self.clock.now += 0.01
        if self.check:
            self.core.utilities.check_integrity()
        for output in outputs.values():
            self._take(output)
        return outputs

    def run(self, limit: int = 20_000) -> None:
        """Step until all is done; then nothing may be left anywhere."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine did not come to rest"
        requests = self.core.requests
        assert (
            requests.kv.device.num_free == requests.kv.device.usable
            and requests.kv.host.num_free == requests.kv.host.usable
        )
        assert (
            len(requests.slots.free) == requests.slots.max_num_seqs
            and not len(requests.timers)
            and not len(requests.waiting)
        )
        assert not requests._number_of and len(requests._free_numbers) == len(requests.clients), (
            "a client number is lost"
        )
        assert (
            requests.queued_out_reqs == self.core._admitted_reqs
            and requests.queued_out_bytes == self.core._admitted_bytes
        )

    def _take(self, output: StepTokens) -> None:
        assert len(output.handles) == len(set(output.handles.tolist())), "a handle twice in one step"
        ends = np.cumsum(output.counts)
        assert (ends[-1] if len(ends) else 0) == len(output.tokens)
        for i, handle in enumerate(output.handles.tolist()):
            assert handle not in self.finish, f"output of {handle} after its end"
            tokens = output.tokens[ends[i] - output.counts[i] : ends[i]].tolist()
            if tokens and handle not in self.outputs:
                self.first_step[handle] = self.steps
            self.outputs.setdefault(handle, []).extend(tokens)
            extra = dict(output.extras.get(i, {}))
            for name in ("logprobs", "prompt_logprobs", "pooled"):
                if name in extra:
                    frames = [output.frames[k] for k in extra.pop(name)]
                    self.frames.setdefault(handle, {}).setdefault(name, []).extend(frames)
            self.extras.setdefault(handle, {}).update(extra)
            if output.finish[i]:
                self.finish[handle] = FinishReason(int(output.finish[i]))

    def expected(self, handle: int) -> tuple[list[int], FinishReason]:
        """What the request must give if nobody disturbs it."""
        prompt, params = self.sent[handle]
        info = self.core.runner.info
        return scripted_output(
            prompt,
            limit=min(info.max_model_len, (info.num_blocks - 1) * info.block_size),
            vocab_size=info.vocab_size,
            eos=info.eos_token_ids,
            **params,
        )

    def check_all(self) -> None:
        """Every request ended exactly once, with exactly the tokens it must give."""
        assert self.finish.keys() == self.sent.keys()
        for handle in self.sent:
            assert (self.outputs.get(handle, []), self.finish[handle]) == self.expected(handle), f"handle {handle}"


def make_add(
    handle: int,
    prompt: Sequence[int],
    options: dict[str, Any] | None = None,
    client: bytes = CLIENT,
    embeds: TensorFrame | None = None,
    **params: Any,
) -> Add:
    ids = np.array(prompt, np.int32)
    frame = TensorFrame("int32", ids.shape, ids.tobytes())
    return Add(b"e" * 16, client, handle + 1, handle, frame, params, options or {}, embeds)
