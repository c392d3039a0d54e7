"""ModelPipeline: several models in one deployment, each of which reads what the ones before it wrote.

A *run* is one prompt on its way through the stages. `_Run` knows where it stands, and never waits; two loops drive
runs, one for threads and one for tasks: they make prompts, wait for news, and hand on what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from wavecore.engine_core.api.config import OF_SETTING, EngineConfig
from wavecore.engine_core.api.devices import stage_places
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.async_llm import start_beside_loop
from wavecore.frontend.client.mailbox import Mailbox, Notifier, OutputKind
from wavecore.frontend.client.notifiers import LoopNotifiers, ThreadNotifier
from wavecore.frontend.client.service import Service, check_tokenizer, make_supervisor, settled
from wavecore.frontend.compat import engine_config, our_name
from wavecore.frontend.outputs import FinishName, RequestOutput, shown
from wavecore.frontend.progress_bars import StartBar
from wavecore.frontend.prompts import Prompt, PromptType, as_prompt
from wavecore.frontend.text.messages import ChatOptions
from wavecore.transport.errors import (
    ConfigError,
    EngineDead,
    NotSupportedError,
    ValidationError,
    WavecoreError,
    from_code,
)
from wavecore.transport.processes.supervisor import Supervisor
from wavecore.transport.wire.checks import OF_REQUEST

INPUT = "prompt"  # what templates call the text that a run begins with
OF_DEPLOYMENT = frozenset(
    [
        *("address", "data_parallel_address", "data_parallel_rank", "data_parallel_size_local", "disable_tqdm", "keys"),
        *("log_level", "nnodes", "node_rank", "ready_timeout", "runtime_dir", "shutdown_timeout", "step_timeout"),
    ]
)
EARLY = ("abort", "timeout")  # ends of a request that end its run
# A sentence ends with the white space behind it, which is known once the next one begins. Nothing here gives back what
# it took (`*+`), so the sentences are the same however their text arrives, and the search takes linear time.
SENTENCE_END = re.compile(
    r"(?:(?<![.!?…])[.!?…]++[\"'”’)\]]*+\s++|(?<![。！？])[。！？]++[”’」』）]*+\s*+|(?<=\S)[^\S\n]*+\n\s*+)(?=\S)"
)
MakePrompt = Callable[[Mapping[str, str]], PromptType | Sequence[Mapping[str, Any]]]


@dataclass(slots=True)
class StageOutput:
    """What one stage wrote: all of it or, in a stream, what is new.

    Attributes:
        finish_reason: None while it runs; of its last request.
    """

    stage: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishName | None = None

    def add(self, new: StageOutput) -> None:
        self.text += new.text
        self.token_ids += new.token_ids
        self.finish_reason = new.finish_reason


@dataclass(slots=True, eq=False)
class _Stage:
    name: str
    config: EngineConfig
    gpus: Sequence[int]
    prompt: MakePrompt
    reads: str  # what its `prompt` reads of one sentence, with `overlap`
    params: SamplingParams | None
    overlap: bool
    service: Service | None = None  # once it runs


class ModelPipeline:
    """Models that work on the output of each other, in one deployment: engines of their own under one supervisor.

    Add the stages, then enter it (`with` or `async with`): the engines start, and end with the block. Runs may come
    from any number of threads and tasks; each engine batches what reaches it.

    Attributes:
        runtime_dir: for `wavecore status`, and `connect(..., stage=NAME)`, an `LLM` of one stage; None before it runs.

    Args:
        **settings: fields of `EngineConfig`, for all stages. Those of the deployment (runtime_dir, address, log_level,
            and the timeouts of start, step and shutdown) belong here; the others a stage may have for itself.

    Example:
        pipeline = ModelPipeline()
        pipeline.add_stage("draft", "./small", prompt="Write about {prompt}:", gpu_memory_utilization=0.3)
        pipeline.add_stage("rewrite", "./large", prompt="Say it better: {draft}", gpu_memory_utilization=0.6)
        with pipeline:
            print(pipeline.run("the sea", max_tokens=100)["rewrite"].text)
    """

    def __init__(self, **settings: Any) -> None:
        self._settings, self._config = settings, engine_config(settings)
        self.runtime_dir: Path | None = None
        self._stages: list[_Stage] = []
        self._opened = contextlib.ExitStack()
        self._notifiers = LoopNotifiers()

    def add_stage(
        self,
        name: str,
        model: str | Path,
        *,
        gpus: Sequence[int] = (0,),
        prompt: str | MakePrompt | None = None,
        sampling_params: SamplingParams | None = None,
        overlap: bool = False,
        **settings: Any,
    ) -> Self:
        """A stage behind those that are there.

        Args:
            name: an identifier, by which templates, outputs and errors call it.
            model: as in `LLM`.
            gpus: which of the visible ones, one for each of its ranks. Stages on one GPU share it by their
                gpu_memory_utilization, whose default, 0.9, is for a stage that is alone there. Not read on a CPU.
            prompt: what its model is asked. A template names what it reads in braces: {prompt}, and the output of any
                earlier stage, such as {draft}. A function gets the same texts as a mapping, in any thread, and returns
                a prompt of any form, or messages for the chat template. None takes the output of the stage before, as
                it is. What spells a special token becomes one, but in messages.
            sampling_params: None takes what the model's authors recommend.
            overlap: begin before the stage before has ended, with a request for each sentence that it finished: of that
                stage the prompt has one sentence then. The outputs are joined in order, with the white space that stood
                between the sentences. For work that needs no more than a sentence, such as translation.
            **settings: of its engines; fields of `EngineConfig`, or vLLM's names for them.

        Raises:
            ConfigError, NotSupportedError: a name, template or setting that cannot be.
        """
        known = [INPUT, *(stage.name for stage in self._stages)]
        if not str(name).isidentifier() or name in known:
            raise ConfigError(f"stage name {name!r:.80} must be an identifier, and none of {', '.join(known)}")
        if shared := sorted(OF_DEPLOYMENT & set(map(our_name, settings))):
            raise ConfigError(f"stage {name}: give {', '.join(shared)} to ModelPipeline, for all stages")
        params = sampling_params
        if params is not None and not (isinstance(params, SamplingParams) and params.n == 1 and params.detokenize):
            raise ConfigError(f"stage {name}: sampling_params must be SamplingParams of one choice, with detokenize")
        config = engine_config({**self._settings, **settings, "model": model})
        if config.data_parallel_backend == "ray":
            raise NotSupportedError(f"stage {name}: data_parallel_backend ray; leave it out, stages are on one host")
        check_tokenizer(config)
        gpus = OF_SETTING.numbers("gpus", gpus, 0, sys.maxsize)
        make = _maker(name, f"{{{known[-1]}}}" if prompt is None else prompt, known)
        self._stages.append(_Stage(name, config, gpus, make, known[-1], params, OF_SETTING.flag("overlap", overlap)))
        return self

    # --- runs ----------------------------------------------------------------------------------------------------

    def run(self, prompt: str, *, timeout: float | None = None, **sampling: Any) -> dict[str, StageOutput]:
        """One prompt through all stages.

        Args:
            timeout: seconds for all stages together.
            **sampling: fields of `SamplingParams` for each stage, such as max_tokens and temperature, in place of those
                of its own sampling_params.

        Returns:
            What each stage wrote, by its name. Where a request ended with finish_reason "timeout" or "abort", so did
            the run; stages that had not begun are missing.

        Raises:
            ValidationError: a value out of bounds.
            WavecoreError: a stage failed, which the message names, and nothing of the run goes on. The class is the
                error's own.
        """
        run = self._begin(prompt, OutputKind.FINAL, timeout, sampling)
        deque(self._drive(run), maxlen=0)
        return run.outputs

    def stream(self, prompt: str, *, timeout: float | None = None, **sampling: Any) -> Iterator[StageOutput]:
        """What is new, stage by stage, or of several at once where they overlap. Leaving the loop aborts the run.

        Args and errors as of `run`; what the run had before it failed is given.
        """
        return self._drive(self._begin(prompt, OutputKind.DELTA, timeout, sampling))

    async def arun(self, prompt: str, *, timeout: float | None = None, **sampling: Any) -> dict[str, StageOutput]:
        """`run` for asyncio programs; cancelling the task aborts the run."""
        run = self._begin(prompt, OutputKind.FINAL, timeout, sampling)
        async for _ in self._drive_beside_loop(run):
            pass
        return run.outputs

    def astream(self, prompt: str, *, timeout: float | None = None, **sampling: Any) -> AsyncGenerator[StageOutput]:
        """`stream` for asyncio programs; cancelling the task, or leaving the loop, aborts the run."""
        return self._drive_beside_loop(self._begin(prompt, OutputKind.DELTA, timeout, sampling))

    # --- start and end -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the engines. Idempotent; runs that have not ended fail."""
        self._opened.close()

    def __enter__(self) -> Self:
        self._opened = self._start(self._make_supervisor())
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        supervisor = self._make_supervisor()
        self._opened = await start_beside_loop(supervisor, partial(self._start, supervisor))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # --- inside --------------------------------------------------------------------------------------------------

    def _make_supervisor(self) -> Supervisor:
        """Refuses what cannot fit before anything loads."""
        if not self._stages or self.runtime_dir:
            raise ConfigError("a pipeline starts once, with its stages: add_stage(...), then `with pipeline:`")
        stages = stage_places({stage.name: (stage.config, stage.gpus) for stage in self._stages})
        return make_supervisor(self._config, stages=stages)

    def _start(self, supervisor: Supervisor) -> contextlib.ExitStack:
        """Returns what ends it all."""
        with StartBar(self._config.disable_tqdm) as bar, contextlib.ExitStack() as opened:
            opened.callback(supervisor.stop)
            self.runtime_dir = supervisor.start(bar)
            for stage in self._stages:
                with _naming(stage.name):
                    service = Service([self.runtime_dir], None, self._config.ready_timeout, stage=stage.name)
                    opened.callback(service.close)
                    service.need_tokenizer("a stage")
                service.start_text_threads()
                stage.service = service
            return opened.pop_all()

    def _begin(self, prompt: str, kind: OutputKind, timeout: float | None, sampling: Mapping[str, Any]) -> _Run:
        flows, its_kind = deque[_Flow](), kind
        for stage in reversed(self._stages):
            if stage.service is None:
                raise EngineDead(f"stage {stage.name} was not started: add all stages, then enter the pipeline")
            params = (stage.params or stage.service.default_params).clone(**sampling)
            if params.n > 1 or not params.detokenize:
                raise ValidationError("sampling", "must be of one choice, with detokenize, for the next stage to read")
            after = flows[0] if flows else None
            flows.appendleft(_Flow(stage, stage.service, params, its_kind, after))
            its_kind = OutputKind.DELTA if stage.overlap else kind  # of the stage before
        return _Run(OF_REQUEST.text("prompt", prompt, 1, sys.maxsize), flows, RequestOptions(timeout=timeout))

    def _drive(self, run: _Run) -> Iterator[StageOutput]:
        notifier = ThreadNotifier()
        try:
            while not run.finished:
                for flow, make in run.due():
                    with _naming(flow.stage.name):
                        run.send(flow, settled(make), notifier)
                if not run.has_ends:  # else there is nothing to wait for, in the child of a fork also nobody
                    notifier.wait()
                yield from run.take()
        finally:
            run.abort()

    async def _drive_beside_loop(self, run: _Run) -> AsyncGenerator[StageOutput]:
        notifier, news = self._notifiers.here(), asyncio.Event()
        try:
            while not run.finished:
                for flow, make in run.due():
                    with _naming(flow.stage.name):
                        prompt = await flow.service.beside_loop(make, run.options)
                        notifier.watch(run.send(flow, prompt, notifier), lambda _: news.set())
                if not run.has_ends:
                    await news.wait()
                news.clear()
                for new in run.take():
                    yield new
        finally:
            for mailbox in run.abort():
                notifier.forget(mailbox)


@dataclass(slots=True, eq=False)
class _Flow:
    """One stage in one run.

    Attributes:
        after: the next stage.
        unread: what the stage before wrote and no request of this one has.
        due: what its next requests read.
        requests: that were sent, in order, each with the white space that follows its output. What the first gives is
            handed on at once, what the others give when it is their turn.
        is_fed: the stage before has ended.
    """

    stage: _Stage
    service: Service
    params: SamplingParams
    kind: OutputKind
    after: _Flow | None
    unread: str = ""
    due: deque[str] = field(default_factory=deque)
    requests: deque[tuple[Mailbox, str]] = field(default_factory=deque)
    is_fed: bool = False

    def feed(self, text: str, is_all: bool) -> None:
        """What the stage before wrote goes on with `text`."""
        self.unread, self.is_fed = self.unread + text, is_all
        ends = [found.end() for found in SENTENCE_END.finditer(self.unread)] if self.stage.overlap else []
        ends += [len(self.unread)] if is_all else []
        self.due += [self.unread[start:end] for start, end in pairwise([0, *ends])]
        self.unread = self.unread[ends[-1] :] if ends else self.unread

    def take(self) -> RequestOutput | None:
        """What its first request gave, of one whose output is read as a whole at its end."""
        is_ready = self.requests and (self.kind is OutputKind.DELTA or self.requests[0][0].ended)
        return self.requests[0][0].take() if is_ready else None


class _Run:
    """One prompt on its way; whoever drives it waits for it.

    Attributes:
        finished: nothing is to come.
        outputs: of each stage that began, so far.
    """

    def __init__(self, prompt: str, flows: Sequence[_Flow], options: RequestOptions) -> None:
        self.finished = False
        self.outputs: dict[str, StageOutput] = {}
        self._prompt, self._flows, self._options = prompt, flows, options
        self._started, self._sent = time.monotonic(), list[Mailbox]()
        flows[0].feed(prompt, True)

    @property
    def options(self) -> RequestOptions:
        """Of a request that is sent now: the deadline is of all stages."""
        return self._options.after(time.monotonic() - self._started)

    @property
    def has_ends(self) -> bool:
        """Whether a request that is to be read next has ended."""
        return any(flow.requests and flow.requests[0][0].ended for flow in self._flows)

    def due(self) -> Iterator[tuple[_Flow, Callable[[], Prompt]]]:
        """What is to be sent: of each request what makes its prompt, in any thread."""
        for flow in self._flows:
            while flow.due:
                read = flow.due[0].strip() if flow.stage.overlap else flow.due[0]
                texts = {name: output.text for name, output in self.outputs.items()}
                yield flow, partial(_make_prompt, flow, {INPUT: self._prompt, **texts, flow.stage.reads: read})

    def send(self, flow: _Flow, prompt: Prompt, notifier: Notifier) -> Mailbox:
        """Send the first request that is due."""
        # The time that its prompt took is in that of the run.
        request = flow.service.prepare(replace(prompt, seconds=0.0), flow.params, self.options)
        mailbox, text = flow.service.mailbox(request, notifier, flow.kind), flow.due.popleft()
        self._sent.append(mailbox)
        flow.requests.append((mailbox, text[len(text.rstrip()) :] if flow.stage.overlap else ""))
        flow.service.client.submit(mailbox)
        return mailbox

    def take(self) -> Iterator[StageOutput]:
        """What has come.

        Raises:
            WavecoreError: a stage failed; names it.
        """
        for flow in self._flows:
            while not self.finished and (output := flow.take()):
                with _naming(flow.stage.name):
                    for part in shown(output):
                        yield self._took(flow, part)

    def abort(self) -> list[Mailbox]:
        """End what still runs. Returns all that was ever sent."""
        for flow in self._flows:
            for mailbox, _ in flow.requests:
                flow.service.client.abort(mailbox)
        return self._sent

    def _took(self, flow: _Flow, output: RequestOutput) -> StageOutput:
        [choice] = output.outputs
        space = flow.requests.popleft()[1] if output.finished else ""
        is_early = choice.finish_reason in EARLY
        is_end = is_early or (output.finished and flow.is_fed and not flow.requests and not flow.due)
        reason = choice.finish_reason if is_end else None
        new = StageOutput(flow.stage.name, choice.text + space, choice.token_ids, reason)
        self.outputs.setdefault(flow.stage.name, StageOutput(flow.stage.name)).add(new)
        self.finished = is_early or (is_end and flow.after is None)
        if flow.after is not None and not is_early:
            flow.after.feed(new.text, is_end)
        return new


def _maker(stage: str, prompt: str | MakePrompt, known: Sequence[str]) -> MakePrompt:
    """A function, or a template as one."""
    if callable(prompt):
        return prompt
    try:
        prompt.format_map(dict.fromkeys(known, ""))
    except (ValueError, LookupError, AttributeError) as error:
        way_out = f"it may name {', '.join(known)}, each in braces, and writes other braces twice"
        raise ConfigError(f"stage {stage}: template {prompt!r:.80} cannot be filled ({error!r}); {way_out}") from error
    return prompt.format_map


def _make_prompt(flow: _Flow, texts: Mapping[str, str]) -> Prompt:
    made: Any = flow.stage.prompt(texts)
    if isinstance(made, Sequence) and made and isinstance(made[0], Mapping):
        return flow.service.chat_prompt(made, ChatOptions())
    return flow.service.encode(as_prompt(made))


@contextlib.contextmanager
def _naming(stage: str) -> Iterator[None]:
    """An error within it says in which stage it was: a copy of it, for one death is the error of many requests."""
    try:
        yield
    except WavecoreError as error:
        named = from_code(error.code, str(error))
        named.args = (f"stage {stage}: {error}",)
        raise named from error
