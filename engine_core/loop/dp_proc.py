"""A data-parallel rank in lockstep with others: before each step all ranks agree, and each runs one forward pass.

For models whose ranks share collectives. Each rank is an engine with its own sockets, requests and KV cache, to which
clients talk as to any other; what they have in common are the waves of `parallel/wave.py`, whose rules stand there.
"""

import queue
from collections.abc import Callable
from typing import Any

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import CAPTURE_SECONDS, EngineCore
from wavecore.engine_core.loop.proc import EngineCoreProc, StopIn
from wavecore.engine_core.plan import LeastSize, OutOfMemory, Runner, StepPlan, StepResult
from wavecore.parallel.wave import Vote, Wave, Wish
from wavecore.transport.errors import ValidationError
from wavecore.transport.io.vote_link import VoteLink
from wavecore.transport.processes.child import SupervisedChild
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.votes import VoteBoard
from wavecore.transport.wire.messages import Utility

PAUSED_TICK_SECONDS = 0.1  # of a paused rank, to see to deadlines
_WISHES = {"pause": Wish.PAUSE, "resume": Wish.RESUME}


class DPEngineCore(EngineCore):
    """An `EngineCore` that launches when its group does.

    Args:
        board: where the ranks vote: the memory of one host, or a link between several.
        further: those of `EngineCore`.
    """

    def __init__(self, config: EngineConfig, runner: Runner, board: VoteBoard | VoteLink, **further: Any) -> None:
        super().__init__(config, runner, **further)
        self.wave = Wave()
        self.board = board
        self._dummy = StepPlan.empty()

    @property
    def has_work(self) -> bool:
        """Something to do in this turn; a paused rank has requests and nothing to do."""
        if self.in_flight or self.requests.outputs or self.wave.captures:
            return True
        return self.wave.joins(super().has_work, False, self.peer_voted())

    def peer_voted(self) -> bool:
        """Whether another rank waits for this one's vote."""
        return self.board.has_begun(self.wave.agreements + 1)

    def launch(self, plan: StepPlan | None) -> bool:
        """Launch the plan, or a dummy beside another rank's; without either, nothing."""
        if self.wave.captures:  # agreed last, and done by all ranks before they vote again
            self.wave.captures = plan is None  # not yet: steps in flight come back first
            return super().launch(plan)
        least = self.dispatch(plan)
        if least is None:
            return False
        if plan is not None:
            self._launch(plan, lambda plan: self.runner.launch(plan, least))
        if not self.in_flight or self.in_flight[-1][0] is not plan:  # there is none, or it failed and was rolled back
            self.execute_dummy_batch(least)
        return True

    def dispatch(self, plan: StepPlan | None) -> LeastSize | None:
        """Agree with the other ranks on the next forward pass.

        Returns:
            Its least size; None if there is none.

        Raises:
            EngineDead: a rank has ended.
        """
        wave, work = self.wave, plan is not None or super().has_work
        joins_peer = not wave.running and self.peer_voted()
        if not wave.joins(work, bool(self.in_flight), joins_peer):
            return None
        begins = not (wave.running or joins_peer)
        size = (0, 0, 0, False) if plan is None else (*_size(plan), self.runner.is_eager(plan))
        vote = wave.vote(work, *size, capture=self._capture_is_due())
        self.board.publish(wave.agreements, vote)
        if begins:
            self.board.ring_others()
        agreed = wave.decide([Vote(*vote) for vote in self.board.wait(wave.agreements)])
        self.draining = self.draining or wave.draining
        self.requests.totals.waves = wave.number
        return None if agreed is None else LeastSize(*agreed)

    def execute_dummy_batch(self, least: LeastSize) -> None:
        """Launch a forward pass that computes nothing and writes no block, because other ranks launch theirs."""
        self.in_flight.append((self._dummy, self.runner.launch(None, least), self._clock()))
        self.requests.totals.dummy_steps += 1

    def wait(self) -> tuple[StepPlan, StepResult] | None:
        """As of `EngineCore`; None for a dummy, too."""
        if not self.in_flight or self.in_flight[0][0] is not self._dummy:
            return super().wait()
        _, pending, _ = self.in_flight.popleft()
        self.requests.land(pending.wait().transferred)
        return None

    def update_weights(self, folder: str) -> None:
        """As of `EngineCore`, in a pause.

        Raises:
            ValidationError: the group is not paused.
        """
        if not self.wave.paused or self.wave.settling or self.in_flight:
            raise ValidationError("method", "update_weights of engines in lockstep needs a pause")
        super().update_weights(folder)

    def _plan(self) -> StepPlan | None:
        if self.wave.captures:
            return None if self.in_flight else self._capture()
        return None if self.wave.paused else self.scheduler.schedule()

    def _capture_is_due(self) -> bool:
        """Not more often without requests than beside them: the other ranks wait meanwhile, and may have some."""
        return super()._capture_is_due() and self._clock() >= self._captured_at + CAPTURE_SECONDS

    def _recover_begun(self, fault: OutOfMemory, failed: StepPlan) -> None:  # noqa: ARG002
        """The end of the group: the other ranks are inside the same forward pass, and cannot go on alone."""
        raise fault


def _size(plan: StepPlan) -> tuple[int, int, int]:
    """Of a plan without rows, that of the padding row it runs with."""
    return (plan.num_rows, plan.num_tokens, int(plan.query_lens.max())) if plan.num_rows else (1, 1, 1)


class RingingQueue(queue.SimpleQueue[Any]):
    """Whose owner sleeps on its bell, not on the queue: each `put` rings it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._ring()


class DPEngineCoreProc(EngineCoreProc):
    """An `EngineCoreProc` in a lockstep group: it sleeps when all ranks do, pauses, resumes and ends with them.

    Args:
        core: this rank.
        child: this process's tie to its supervisor.
        group: what it shares with the others.
        further: those of `EngineCoreProc`.
    """

    core: DPEngineCore

    def __init__(self, core: DPEngineCore, child: SupervisedChild, group: GroupMemory, **further: Any) -> None:
        super().__init__(core, child, input_queue=RingingQueue(lambda: group.ring(group.rank)), **further)
        self._group = group
        self._asked: list[Utility] = []  # pauses and ends of pauses that were not answered

    @property
    def _is_done(self) -> bool:
        return self.core.wave.left

    def _process_input_queue(self, moved: bool) -> None:
        wave = self.core.wave
        if wave.draining and self._stop_at is None:  # another rank was told to
            super()._stop(StopIn(drain=True))
        if not wave.wishes and not wave.settling:
            for item in self._asked:
                self._output.put_result(item.client_id, item.call)
            self._asked.clear()
        super()._process_input_queue(moved or wave.settling)

    def _sleep(self, seconds: float | None) -> None:
        """Until something came in, another rank voted, or the time is over."""
        core, is_idle = self.core, seconds is None
        if is_idle and core.requests.by_client:
            seconds = PAUSED_TICK_SECONDS
        self._group.sleep_until(
            lambda: not self.input_queue.empty() or (core.has_work if is_idle else core.peer_voted()), seconds=seconds
        )
        core.requests.expire()

    def _is_quiet(self) -> bool:
        """At once: the other ranks may have requests, and wait for this one."""
        return True

    def _call(self, item: Utility) -> None:
        wish = _WISHES.get(item.method)
        if wish is None:
            super()._call(item)
        elif item.args or (wish == Wish.RESUME and self._updater is not None):
            reason = "takes none" if item.args else "comes at the end of the update_weights that is on its way"
            error = ValidationError("args" if item.args else "method", f"{item.method} {reason}")
            self._output.put_result(item.client_id, item.call, error=error)
        else:
            self.core.wave.ask(wish)
            self._asked.append(item)

    def _end_update(self) -> None:
        """With the pause that it was in: whoever began it may have left."""
        super()._end_update()
        self.core.wave.ask(Wish.RESUME)

    def _stop(self, item: StopIn) -> None:
        super()._stop(item)
        self.core.wave.ask(Wish.LEAVE)
