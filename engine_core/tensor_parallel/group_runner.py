"""Runs step plans on every rank of a group: rank 0 sends each plan to its workers and runs it, too.

Nothing but the plan decides what a rank does, its collectives included, so ranks need no other word. What comes back
is rank 0's result, as all draw the same tokens; only the transfers between device and host are a rank's own affair:
a block is free for others when the last rank is done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum

import msgpack

from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.plan import F32, LeastSize, OutOfMemory, PendingStep, StepPlan, StepResult
from wavecore.engine_core.tensor_parallel.plan_codec import Buffer, encode
from wavecore.engine_core.tensor_parallel.step_check import StepCheck, digest
from wavecore.transport.errors import EngineDead, WavecoreError
from wavecore.transport.processes.step_ring import StepChannel, own_words


class Record(IntEnum):
    """What rank 0 sends."""

    PLAN = 0
    PROFILE = 1  # one byte: on or off
    CHECK = 2  # a `StepCheck`
    MEMORY = 3  # nothing: a worker tells its memory_stats
    WEIGHTS = 4  # a folder
    ATTENTION = 5  # msgpack: the arguments of `attention_map`


class WorkerWords:
    """How far each worker is, in words that it shows rank 0. They count steps from 1, so that 0 is none yet.

    Steps are numbered as they are sent, since dummies have no step id; but transfers have that of their plan.
    """

    BEGUN, LAUNCHED, TRANSFERRED, FAILED = 0, 1, 2, 3  # two words for failures: of even steps, and of odd ones
    MEASURED, MEMORY = 5, 6  # how often memory was told, and the bytes

    def __init__(self, channel: StepChannel) -> None:
        self._channel = channel
        self._workers = range(1, channel.ranks)

    def tell(self, word: int, step: int) -> None:
        """A worker has come to this step. Of what came earlier nobody needs to hear."""
        channel, place = self._channel, self._place(self._channel.rank, word)
        if channel.words[place] <= step:
            channel.words[place] = step + 1
            channel.ring(0)

    def wait_for(self, word: int, step: int) -> None:
        """Until every worker has come to this step."""
        for rank in self._workers:
            place = self._place(rank, word)
            self._channel.wait_until(lambda place=place: self._channel.words[place] > step, rank)  # type: ignore[misc]

    def transferred(self) -> int:
        """The last step up to which the transfers of all workers are done; -1 for none."""
        return min(self._channel.words[self._place(rank, self.TRANSFERRED)] for rank in self._workers) - 1

    def failed(self, step: int) -> list[int]:
        """The workers that ran out of memory in this step."""
        word = self.FAILED + step % 2
        return [rank for rank in self._workers if self._channel.words[self._place(rank, word)] == step + 1]

    def tell_memory(self, stats: Mapping[str, int]) -> None:
        """A worker's, in the order of its uses."""
        words, rank = self._channel.words, self._channel.rank
        for place, size in enumerate(stats.values(), self._place(rank, self.MEMORY)):
            words[place] = size
        self.tell(self.MEASURED, words[self._place(rank, self.MEASURED)])

    def most_memory(self, own: Mapping[str, int]) -> dict[str, int]:
        """By use, of the rank that holds most."""
        places = [self._place(rank, self.MEMORY) for rank in self._workers]
        return {
            name: max(size, *(self._channel.words[place + i] for place in places))
            for i, (name, size) in enumerate(own.items())
        }

    def _place(self, rank: int, word: int) -> int:
        first: int = own_words(rank, self._channel.ranks).start
        return first + word


class GroupRunner:
    """`plan.Runner` of rank 0.

    Args:
        runner: of this rank.
        channel: to the other ranks.
        checks: whether workers compare each step with this rank's.
    """

    def __init__(self, runner: ModelRunner, channel: StepChannel, checks: bool = False) -> None:
        self._runner, self.info, self.checks = runner, runner.info, checks
        self._steps, self._words = channel, WorkerWords(channel)
        self._in_flight: deque[_GroupStep] = deque()
        self._sent = 0  # steps
        self._asked = 0  # how often for their memory

    def launch(self, plan: StepPlan | None, least: LeastSize | None = None) -> PendingStep:
        found = StepPlan.empty() if plan is None else plan
        self._send(Record.PLAN, encode(found, least))
        number, self._sent = self._sent, self._sent + 1
        with self._dropped():
            check = StepCheck(number, digest(found)) if self.checks else None
            step = _GroupStep(self, number, self._runner.launch(found, least), check)
        self._in_flight.append(step)
        return step

    def is_eager(self, plan: StepPlan) -> bool:
        return self._runner.is_eager(plan)

    def finish(self, step: _GroupStep) -> StepResult:
        """The result of the oldest step in flight.

        Raises:
            OutOfMemory: some rank cannot hold it.
        """
        assert self._in_flight.popleft() is step, "steps must be waited for in launch order"
        words = self._words
        with self._dropped():
            result = self.own_result(step)
            words.wait_for(words.LAUNCHED, step.number)
            if failed := words.failed(step.number):
                raise OutOfMemory(f"rank {failed[0]}: a step does not fit; its size is in the log of that rank")
        if step.check is not None:
            self._send(Record.CHECK, [step.check.with_tokens(result.tokens).to_bytes()])
        return replace(result, transferred=min(result.transferred, words.transferred()))

    def own_result(self, step: _GroupStep) -> StepResult:
        """This rank's; on a CPU it is computed at the first call.

        Raises:
            OutOfMemory: this rank cannot hold the step.
        """
        if not step.own.done():
            self._words.wait_for(self._words.BEGUN, step.number)
            try:
                step.own.set_result(step.pending.wait())
            except OutOfMemory as error:
                step.own.set_exception(error)
        return step.own.result()

    def _send(self, kind: Record, parts: list[Buffer]) -> None:
        """Send a record; before one that has to wait for readers, compute what is in flight.

        A worker that computes a step reads nothing meanwhile, and on a CPU needs this rank, which computes its part
        when it is asked for the result: the two would wait for each other for ever.
        """
        if not self._steps.has_room(parts):
            self._compute_all()
        self._steps.write(kind, parts)

    def _compute_all(self) -> None:
        for step in self._in_flight:
            with suppress(OutOfMemory):  # told when the step is waited for
                self.own_result(step)

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        """When a step fails nobody waits for the later ones; but the workers run them, and not without this rank."""
        try:
            yield
        except OutOfMemory:
            while self._in_flight:
                with suppress(OutOfMemory):
                    self.own_result(self._in_flight.popleft())
            raise

    def wants_capture(self, uses: int) -> bool:
        return self._runner.wants_capture(uses)

    def memory_stats(self) -> dict[str, int]:
        """Of the rank that holds most, use by use: it is the first that has no more."""
        self._compute_all()  # workers answer behind their steps
        self._send(Record.MEMORY, [])
        self._words.wait_for(self._words.MEASURED, self._asked)
        self._asked += 1
        return self._words.most_memory(self._runner.memory_stats())

    def attention_map(self, prompt: list[int], layer: int, head: int) -> F32:
        self._compute_all()
        self._send(Record.ATTENTION, [msgpack.packb((prompt, layer, head))])
        try:
            return self._runner.attention_map(prompt, layer, head)
        except WavecoreError:  # alike on all ranks
            raise
        except Exception as error:
            raise EngineDead(f"rank 0 left an attention map that the other ranks go on with: {error}") from error

    def check_weights(self, folder: str) -> None:
        self._runner.check_weights(folder)

    def update_weights(self, folder: str) -> None:
        self._send(Record.WEIGHTS, [folder.encode()])
        self._runner.update_weights(folder)

    def profile(self, on: bool) -> None:
        self._send(Record.PROFILE, [bytes([on])])
        self._runner.profile(on)


@dataclass(frozen=True, slots=True, eq=False)
class _GroupStep:
    runner: GroupRunner
    number: int
    pending: PendingStep
    check: StepCheck | None
    own: Future[StepResult] = field(default_factory=Future)

    def wait(self) -> StepResult:
        return self.runner.finish(self)
