"""vLLM's AsyncLLM, also known as AsyncLLMEngine: its signatures and defaults over our own `AsyncLLM`."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from wavecore.frontend import async_llm as own
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.vllm.arguments import as_in_vllm, one_prompt
from wavecore.frontend.vllm.engine_args import EngineArgs, own_defaults, shows_settings
from wavecore.frontend.vllm.model_config import VllmConfig
from wavecore.frontend.vllm.params import OUTPUT_KINDS, RequestOutputKind, checked
from wavecore.transport.errors import WavecoreError


class RequestOutputCollector:
    """Outputs of one request, filled beside its reader; of `AsyncLLM.add_request`."""

    def __init__(self, request_id: str, outputs: AsyncGenerator[RequestOutput]) -> None:
        self.request_id = request_id
        self._queue = asyncio.Queue[RequestOutput | Exception]()
        self._filling = asyncio.create_task(self._fill(outputs))  # the request ends with this object's task

    async def get(self) -> RequestOutput:
        """The next output.

        Raises:
            WavecoreError: the request failed.
        """
        taken = await self._queue.get()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def close(self) -> None:
        """Aborts the request where it runs."""
        self._filling.cancel()

    async def _fill(self, outputs: AsyncGenerator[RequestOutput]) -> None:
        try:
            async for output in outputs:
                self._queue.put_nowait(output)
        except WavecoreError as error:
            self._queue.put_nowait(error)


class AsyncLLM(own.AsyncLLM):
    """As vLLM's class of that name; streams are cumulative unless `SamplingParams.output_kind` says otherwise."""

    @shows_settings
    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        super().__init__(model, **{**own_defaults(), **settings})

    def _attach(self, service: Service) -> None:
        super()._attach(service)
        self.vllm_config = VllmConfig.of(service.resolved, len(service.client.numbers))
        self.tokenizer, self.model_config = service.tokenizer, self.vllm_config.model_config

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:  # type: ignore[override]
        """Started with these settings; further arguments of vLLM's are about its logs."""
        return cls(**engine_args.settings())

    from_vllm_config = from_engine_args

    @as_in_vllm
    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: Any = None,
        tokenization_kwargs: Any = None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """As `wavecore.AsyncLLM.generate`; `prompt_text` and `tokenization_kwargs` as of `one_prompt`."""
        prompt = one_prompt(self._service, prompt, more.pop("prompt_text", None), tokenization_kwargs)
        kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
        more = {"output_kind": OUTPUT_KINDS[kind], **more}
        return super().generate(prompt, checked(sampling_params), request_id, **more)

    @as_in_vllm
    async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> RequestOutputCollector:
        """Start a request, with arguments as of `generate`; its outputs gather until they are asked for."""
        return RequestOutputCollector(request_id, self.generate(prompt, params, request_id, **more))

    reset_prefix_cache = as_in_vllm(own.AsyncLLM.reset_prefix_cache)
    start_profile = as_in_vllm(own.AsyncLLM.start_profile)
    abort = as_in_vllm(own.AsyncLLM.abort)

    def get_tokenizer(self) -> Tokenizer:  # type: ignore[override]
        return self._service.need_tokenizer("get_tokenizer")

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Statistics are logged by the engine, with log_stats=True."""

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """End the engine; how long it may drain is the setting shutdown_timeout."""
        super().shutdown()

    is_running = property(own.AsyncLLM.has_engine)
    is_stopped = errored = property(lambda self: not self.has_engine())

    @property
    def dead_error(self) -> BaseException | None:
        """Why no engine takes requests; None while one does."""
        try:
            self._service.client.check_health()
        except WavecoreError as error:
            return error
        return None
