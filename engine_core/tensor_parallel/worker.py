"""A rank above 0: runs the plans that rank 0 sends, on its share of the model, until its process is ended."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Never

import msgpack

from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.plan import F32, UPDATE_SECONDS, LeastSize, OutOfMemory, PendingStep, StepPlan
from wavecore.engine_core.tensor_parallel.group_runner import Record, WorkerWords
from wavecore.engine_core.tensor_parallel.plan_codec import decode
from wavecore.engine_core.tensor_parallel.step_check import StepCheck, digest
from wavecore.transport.errors import WavecoreError
from wavecore.transport.processes.step_ring import StepChannel

logger = logging.getLogger(__name__)

IN_FLIGHT = 2  # steps, as in rank 0


class Worker:
    """Args:
    runner: of this rank.
    channel: to rank 0.
    checks: whether rank 0 tells what its steps did, to compare.
    """

    def __init__(self, runner: ModelRunner, channel: StepChannel, checks: bool = False) -> None:
        self._runner, self._progress = runner, channel.progress
        self._checks: dict[int, StepCheck] | None = {} if checks else None  # by step
        self._records, self._words = channel, WorkerWords(channel)
        self._in_flight: deque[tuple[int, PendingStep]] = deque()
        self._received = 0  # steps
        # By slot, with the step that begins: the runner holds no array, and here no request does
        self._embeds: dict[int, tuple[int, F32 | None]] = {}

    def run(self) -> Never:
        while True:
            while self._in_flight and (len(self._in_flight) == IN_FLIGHT or not self._records.has_more):
                self._land()
            self._progress.busy(False)
            kind, data = self._records.read()
            self._progress.busy(True)
            match Record(kind):
                case Record.PLAN:
                    self._launch(*decode(data))
                case Record.PROFILE:
                    self._profile(bool(data[0]))
                case Record.CHECK:
                    self._compare(StepCheck.from_bytes(data))
                case Record.MEMORY:
                    self._words.tell_memory(self._runner.memory_stats())
                case Record.WEIGHTS:
                    self._progress.expect(UPDATE_SECONDS)
                    self._runner.update_weights(data.decode())
                    self._progress.expect(0.0)
                case Record.ATTENTION:
                    with suppress(WavecoreError):  # rank 0 meets the same, and has a caller to tell
                        self._runner.attention_map(*msgpack.unpackb(data, strict_map_key=False))
            self._progress.beat()

    def _profile(self, on: bool) -> None:
        """What is refused here rank 0 refuses, too, and its caller hears of that; no profile is worth an engine."""
        try:
            self._runner.profile(on)
        except Exception as error:  # of torch's profiler, or of a full disk
            logger.warning("no profile of this rank: %s", error)

    def _launch(self, plan: StepPlan, least: LeastSize | None) -> None:
        number, self._received = self._received, self._received + 1
        if plan.new_requests:
            used, unbegun = self._runner.state.embeds, [step for step, _ in self._in_flight]  # on a CPU
            self._embeds = {slot: held for slot, held in self._embeds.items() if slot in used or held[0] in unbegun}
            self._embeds |= {new.slot: (number, new.prompt_embeds) for new in plan.new_requests}
        if self._checks is not None:
            self._checks[number] = StepCheck(number, digest(plan))
        self._words.tell(WorkerWords.BEGUN, number)
        with self._told(number):
            self._in_flight.append((number, self._runner.launch(plan, least)))
        if self._runner.device.type == "cuda":
            self._words.tell(WorkerWords.LAUNCHED, number)

    def _land(self) -> None:
        """Wait for the oldest step; on a CPU it is computed now."""
        step, pending = self._in_flight.popleft()
        with self._told(step):
            result = pending.wait()
            self._words.tell(WorkerWords.TRANSFERRED, result.transferred)
            if self._checks is not None:
                self._checks[step] = self._checks[step].with_tokens(result.tokens)
        self._words.tell(WorkerWords.LAUNCHED, step)

    def _compare(self, first: StepCheck) -> None:
        """With what rank 0 did in this step. Of steps that failed there it says nothing.

        Raises:
            WavecoreError: this rank did something else, which ends the group.
        """
        assert self._checks is not None
        while self._in_flight and self._in_flight[0][0] <= first.step:
            self._land()
        if difference := self._checks[first.step].difference(first):
            raise WavecoreError(f"check_ranks: {difference}")
        self._checks = {step: check for step, check in self._checks.items() if step > first.step}

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """A step that does not fit is rolled back by rank 0, which hears of it."""
        try:
            yield
        except OutOfMemory as error:
            logger.warning("%s", error)
            self._words.tell(WorkerWords.FAILED + step % 2, step)
