"""AsyncLLM: streams of many requests in one event loop, close to vLLM's class of that name."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.embeddings import EMBEDDING_PARAMS, pooled
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.service import Service, start_beside_loop
from wavecore.frontend.client.wakers import LoopWaker
from wavecore.frontend.compat import engine_config, refuse_method
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput, shown
from wavecore.frontend.progress_bars import StartBar
from wavecore.frontend.prompts import Prompt, PromptType, as_prompt
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import ConfigError, ValidationError

LONG_TEXT = 20_000  # characters; encoding more would hold the event loop up for milliseconds


class AsyncLLM:
    """A model in an engine process of its own, for asyncio programs.

    The constructor blocks until the engine is ready; `await AsyncLLM.start(...)` leaves the loop free meanwhile.

    Args:
        model: as in `LLM`.
        **settings: as in `LLM`.
    """

    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        self._start(engine_config({"model": str(model), **settings}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same from a whole config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    from_engine_args = from_config  # vLLM's name

    @classmethod
    async def start(cls, model: str | Path = "default", **settings: Any) -> Self:
        """The constructor beside the loop. Cancelling it ends the engine that was starting."""
        config = engine_config({"model": str(model), **settings})
        llm = cls.__new__(cls)
        with StartBar(config.disable_tqdm) as bar:
            llm._attach(await start_beside_loop(config, bar))
        return llm

    @classmethod
    def connect(cls, runtime_dir: str | Path, timeout: float = 30.0) -> Self:
        """Attach to a running engine; `shutdown` only lets go of it."""
        llm = cls.__new__(cls)
        llm._attach(Service(Path(runtime_dir), None, timeout))
        return llm

    def _start(self, config: EngineConfig) -> None:
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, not {type(config).__name__}")
        with StartBar(config.disable_tqdm) as bar:
            self._attach(Service.start(config, bar))

    def _attach(self, service: Service) -> None:
        self._service = service
        self._detach = service.close_when_dropped(self)
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = weakref.WeakKeyDictionary()
        self._by_id: dict[str, Mailbox] = {}

    # --- generation ----------------------------------------------------------------------------------------------

    async def generate(
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
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request as they come. Cancelling the task, or leaving the loop, aborts the request.

        Args:
            prompt: text, token ids, or vLLM's dictionaries.
            sampling_params: None takes the model's recommended ones.
            request_id: shown in outputs; None numbers them.
            priority: lower runs first under scheduling_policy="priority".
            timeout: seconds; then it ends with finish_reason "timeout" and what it had.
            queue_timeout: seconds until it must have begun; first_token_timeout: until its first token.
            resume: let a greedy or seeded request go on after the death of an engine.
            output_kind: "delta" (what is new, merged for a slow reader), "cumulative" or "final".

        Raises:
            ValidationError: a value out of bounds.
            EngineDead, Overloaded, NumericalError, ...: the request failed; what it had was given before.
        """
        outputs = self._outputs(
            await self._encode(as_prompt(prompt)),
            sampling_params,
            output_kind,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            queue_timeout=queue_timeout,
            first_token_timeout=first_token_timeout,
            resume=resume,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def chat(
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
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """`generate` for a conversation, through the chat template as in `LLM.chat`."""
        prompt = await asyncio.to_thread(
            self._service.chat_prompt,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        outputs = self._outputs(
            prompt,
            sampling_params,
            output_kind,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            queue_timeout=queue_timeout,
            first_token_timeout=first_token_timeout,
            resume=resume,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self, prompt: PromptType, *, pooling: str = "mean", timeout: float | None = None
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt; as `LLM.embed`."""
        encoded = await self._encode(as_prompt(prompt))
        request = self._service.prepare(encoded, EMBEDDING_PARAMS, pooling=pooling, timeout=timeout)
        waker = self._waker()
        mailbox = self._service.submit(request, waker, OutputKind.FINAL)
        try:
            await waker.event(mailbox).wait()
            output = mailbox.take()
            assert output is not None
            return pooled(mailbox, output)
        finally:
            waker.forget(mailbox)
            self._service.client.abort(mailbox)

    async def abort(self, request_id: str) -> None:
        """End a request by its id; its stream ends with finish_reason "abort". Unknown ids are no error."""
        mailbox = self._by_id.get(request_id)
        if mailbox is not None:
            self._service.client.abort(mailbox)

    # --- facts and control ---------------------------------------------------------------------------------------

    @property
    def runtime_dir(self) -> Path:
        """What other processes give to `connect`."""
        return self._service.runtime_dir

    @property
    def num_unfinished(self) -> int:
        """Requests of this object that have not ended."""
        return self._service.client.num_live

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; NotSupportedError where there is none (skip_tokenizer_init)."""
        return self._service.need_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """The model authors' recommendation (generation_config.json), else the defaults."""
        return self._service.default_params()

    async def check_health(self) -> None:
        """Raises:
        EngineDead: no engine takes requests; with the cause.
        """
        self._service.client.check_health()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, for instance after a change of weights."""
        client = self._service.client
        calls = [asyncio.wrap_future(client.call("reset_prefix_cache", engine=index)) for index in client.engines]
        return all(answer.value for answer in await asyncio.gather(*calls))

    def shutdown(self) -> None:
        """End the engine (or let go of an attached one). Idempotent; streams that run fail."""
        self._detach()
        self._service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def __getattr__(self, name: str) -> Any:
        if error := refuse_method(name):
            raise error
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- inside --------------------------------------------------------------------------------------------------

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams | None, kind: OutputKind | str, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """From sending to the end there is one `try`, and no await before it: a cancelled task leaves nothing."""
        kind = _kind(kind)
        request = self._service.prepare(prompt, params or self.get_default_sampling_params(), **options)
        if request.request_id in self._by_id:
            raise ValidationError("request_id", f"{request.request_id!r:.60} is the id of a request that runs")
        waker = self._waker()
        mailbox = self._service.submit(request, waker, kind)
        try:
            self._by_id[request.request_id] = mailbox
            event = waker.event(mailbox)  # before any turn of the loop, so no call of the IO thread comes too early
            finished = False
            while not finished:
                await event.wait()
                event.clear()
                for output in shown(mailbox.take()):
                    finished = output.finished
                    yield output
        finally:
            waker.forget(mailbox)
            del self._by_id[request.request_id]
            self._service.client.abort(mailbox)

    async def _encode(self, prompt: Prompt) -> Prompt:
        if prompt.text is not None and len(prompt.text) > LONG_TEXT:
            return await asyncio.to_thread(self._service.encode, prompt)
        return self._service.encode(prompt)

    def _waker(self) -> LoopWaker:
        loop = asyncio.get_running_loop()
        if loop not in self._wakers:
            self._wakers[loop] = LoopWaker(loop)
        return self._wakers[loop]


def _kind(kind: OutputKind | str) -> OutputKind:
    try:
        return OutputKind(kind)
    except ValueError:
        names = ", ".join(k.value for k in OutputKind)
        raise ValidationError("output_kind", f"must be one of {names}, not {kind!r:.40}") from None
