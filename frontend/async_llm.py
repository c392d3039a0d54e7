"""AsyncLLM: streams of many requests in one event loop, close to vLLM's class of that name."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from wavecore.engine_core.api.request_options import RequestOptions, embedding_options
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.base import BaseLLM
from wavecore.frontend.client.mailbox import EMBEDDING_PARAMS, Mailbox, OutputKind
from wavecore.frontend.client.notifiers import LoopNotifiers
from wavecore.frontend.client.service import MAX_ID, Service, make_supervisor
from wavecore.frontend.client.utilities import Inspection, beside_loop
from wavecore.frontend.compat import engine_config
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput, shown
from wavecore.frontend.progress_bars import StartBar
from wavecore.frontend.prompts import Prompt, PromptType, as_prompt
from wavecore.frontend.text.messages import ChatOptions, Tools
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import ValidationError, WavecoreError
from wavecore.transport.processes.supervisor import Supervisor
from wavecore.transport.wire.checks import OF_REQUEST

MAX_IDS = 1 << 20
Started = TypeVar("Started", Service, contextlib.ExitStack)


class AsyncLLM(BaseLLM):
    """A model in an engine process of its own, for asyncio programs.

    The constructor blocks until the engine is ready; `await AsyncLLM.start(...)` leaves the loop free meanwhile.

    Args:
        model: as in `LLM`.
        **settings: as in `LLM`.
    """

    @classmethod
    async def start(cls, model: str | Path = "default", **settings: Any) -> Self:
        """The constructor beside the loop. Cancelling it ends the engine that was starting."""
        config = engine_config({"model": str(model), **settings})
        llm = cls.__new__(cls)
        with StartBar(config.disable_tqdm) as bar:
            supervisor = make_supervisor(config)
            llm._attach(await start_beside_loop(supervisor, partial(Service.start, config, bar, supervisor)))
        return llm

    def _attach(self, service: Service) -> None:
        service.start_text_threads()
        super()._attach(service)
        self._notifiers = LoopNotifiers()
        self._by_id: dict[str, Mailbox] = {}

    # --- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
        output_kind: OutputKind | str = OutputKind.DELTA,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request as they come. Cancelling the task, or leaving the loop, aborts the request.

        Args:
            prompt: text, token ids, or vLLM's dictionaries.
            sampling_params: None takes the model's recommended ones.
            request_id: shown in outputs; None numbers them.
            priority: lower runs first under scheduling_policy="priority".
            timeout: seconds; then it ends with finish_reason "timeout" and what it had.
            queue_timeout: seconds until it must have begun; first_token_timeout: until its first token.
            resume: let a greedy or seeded request go on, once, after the death of an engine.
            output_kind: "delta" (what is new, merged for a slow reader), "cumulative" or "final".
            data_parallel_rank: the engine to use, from 0; None takes the best one.

        Raises:
            ValidationError: a value out of bounds.
            EngineDead, Overloaded, NumericalError, ...: the request failed; what it had was given before.
        """
        options = RequestOptions(priority, timeout, queue_timeout, first_token_timeout, data_parallel_rank)
        encode = partial(self._encode, prompt, options)
        return self._outputs(encode, sampling_params, options, request_id, resume, output_kind)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
        output_kind: OutputKind | str = OutputKind.DELTA,
        data_parallel_rank: int | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """`generate` for a conversation, through the chat template as in `LLM.chat`."""
        options = RequestOptions(priority, timeout, queue_timeout, first_token_timeout, data_parallel_rank)
        chat = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        render = partial(self._service.beside_loop, partial(self._service.chat_prompt, messages, chat), options)
        return self._outputs(render, sampling_params, options, request_id, resume, output_kind)

    async def embed(
        self, prompt: PromptType, *, pooling: Literal["mean", "last"] = "mean", timeout: float | None = None
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt; as `LLM.embed`."""
        options = embedding_options(pooling, timeout)
        encode = partial(self._encode, prompt, options)
        outputs = self._outputs(encode, EMBEDDING_PARAMS, options, kind=OutputKind.FINAL)
        [output] = [EmbeddingRequestOutput.of(output) async for output in outputs]
        if output.error is not None:
            raise output.error
        return output

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End one request or several by id; each stream ends with finish_reason "abort". Unknown ids are no error."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        for known in OF_REQUEST.texts("request_id", ids, MAX_IDS, MAX_ID):
            if mailbox := self._by_id.get(known):
                self._service.client.abort(mailbox)

    # --- facts and control ---------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests of this object that have not ended."""
        return self._service.client.num_live

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; NotSupportedError where there is none (skip_tokenizer_init)."""
        return self._service.need_tokenizer("get_tokenizer")

    check_health = beside_loop(Inspection.check_health)
    reset_prefix_cache = beside_loop(Inspection.reset_prefix_cache)
    pause = beside_loop(Inspection.pause)
    resume = beside_loop(Inspection.resume)
    update_weights = beside_loop(Inspection.update_weights)
    debug_requests = debug_sequence_states = beside_loop(Inspection.debug_requests)
    step_stats = beside_loop(Inspection.step_stats)
    print_memory_stats = beside_loop(Inspection.print_memory_stats)
    export_trace = beside_loop(Inspection.export_trace)
    start_profile = beside_loop(Inspection.start_profile)
    stop_profile = beside_loop(Inspection.stop_profile)
    visualize_attention = beside_loop(Inspection.visualize_attention)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _outputs(
        self,
        make_prompt: Callable[[], Awaitable[Prompt]],
        params: SamplingParams | None,
        options: RequestOptions,
        request_id: str | None = None,
        resume: bool = False,
        kind: OutputKind | str = OutputKind.DELTA,
    ) -> AsyncGenerator[RequestOutput]:
        kind = OutputKind(OF_REQUEST.one_of("output_kind", kind, tuple(OutputKind)))
        request = self._service.prepare(await make_prompt(), params, options, request_id=request_id, resume=resume)
        # From here to the end there is one `try`, and no await before it: a cancelled task leaves nothing.
        if request.request_id in self._by_id:
            raise ValidationError("request_id", f"{request.request_id!r:.60} is the id of a request that runs")
        notifier = self._notifiers.here()
        mailbox = self._service.mailbox(request, notifier, kind)
        try:
            self._by_id[request.request_id] = mailbox
            news = notifier.news(mailbox)
            self._service.client.submit(mailbox)
            finished = False
            while not finished:
                if not mailbox.ended:  # else there is nothing to wait for, in the child of a fork also nobody
                    await news
                news = notifier.news(mailbox)
                for output in shown(mailbox.take()):
                    finished = output.finished
                    yield output
        finally:
            notifier.forget(mailbox)
            self._by_id.pop(request.request_id, None)
            self._service.client.abort(mailbox)

    async def _encode(self, prompt: PromptType, options: RequestOptions) -> Prompt:
        [encoded] = await self._service.encode_for_loop([as_prompt(prompt)], options)
        return encoded


async def start_beside_loop(supervisor: Supervisor, start: Callable[[], Started]) -> Started:
    """What `start` gives, in a thread; cancelling ends the start, and only returns when nothing is left of it.

    Args:
        supervisor: that `start` starts.
    """
    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        supervisor.request_stop()
        with contextlib.suppress(WavecoreError):
            (await starting).close()
        raise
