"""vLLM's AsyncLLM, also known as AsyncLLMEngine: its signatures and defaults over our own `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from wavecore.frontend import async_llm as own
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.prompts import PromptType, as_prompt
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.vllm.engine_args import OWN_DEFAULTS, EngineArgs
from wavecore.frontend.vllm.llm import encoded
from wavecore.frontend.vllm.model_config import TASKS, ModelConfig, VllmConfig
from wavecore.frontend.vllm.params import OUTPUT_KINDS, RequestOutputKind, SamplingParams, checked, refuse_extras
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
        return _output(await self._queue.get())

    def get_nowait(self) -> RequestOutput | None:
        return None if self._queue.empty() else _output(self._queue.get_nowait())

    def close(self) -> None:
        """Aborts the request where it runs."""
        self._filling.cancel()

    async def _fill(self, outputs: AsyncGenerator[RequestOutput]) -> None:
        try:
            async for output in outputs:
                self._queue.put_nowait(output)
        except WavecoreError as error:
            self._queue.put_nowait(error)


def _output(taken: RequestOutput | Exception) -> RequestOutput:
    if isinstance(taken, Exception):
        raise taken
    return taken


class AsyncLLM(own.AsyncLLM):
    """As vLLM's class of that name; streams are cumulative unless `SamplingParams.output_kind` says otherwise."""

    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        super().__init__(model, **{**OWN_DEFAULTS, **settings})

    def _attach(self, service: Service) -> None:
        super()._attach(service)
        self.vllm_config = VllmConfig(service.resolved)
        self.model_config = self.vllm_config.model_config

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:  # type: ignore[override]
        """Started with these settings; further arguments of vLLM's are about its logs."""
        return cls(**engine_args.settings())

    from_vllm_config = from_engine_args

    def generate(
        self,
        prompt: PromptType,
        sampling_params: Any = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        **ours: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """As `wavecore.AsyncLLM.generate`.

        Args:
            prompt_text: shown in outputs where the prompt is token ids.
            trace_headers: not used; they are for tracing systems.
            **ours: more arguments of `wavecore.AsyncLLM.generate`, such as timeout.
        """
        refuse_extras(
            lora_request=lora_request,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        del trace_headers
        given: Any = prompt
        if tokenization_kwargs:
            [given] = encoded(self._service, [prompt], tokenization_kwargs)
        if prompt_text is not None:
            given = _with_text(given, prompt_text)
        kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
        ours = {"output_kind": OUTPUT_KINDS[kind], **ours}
        return super().generate(given, checked(sampling_params), request_id, priority=priority, **ours)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,  # when it was made is measured here
        **arguments: Any,
    ) -> RequestOutputCollector:
        """Start a request, whose outputs gather until they are asked for.

        Args:
            **arguments: as of `generate`.
        """
        del arrival_time
        return RequestOutputCollector(request_id, self.generate(prompt, params, request_id, **arguments))

    async def abort(self, request_id: str | Sequence[str], internal: bool = False) -> None:
        """End requests by their ids, which are the caller's own."""
        del internal
        await super().abort(request_id)

    def get_tokenizer(self) -> Tokenizer:  # type: ignore[override]
        return self._service.need_tokenizer("get_tokenizer")

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Statistics are logged by the engine, with log_stats=True."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine; how long it may drain is the setting shutdown_timeout."""
        del timeout
        super().shutdown()

    @property
    def is_running(self) -> bool:
        return self.has_engine()

    @property
    def is_stopped(self) -> bool:
        return not self.has_engine()

    @property
    def errored(self) -> bool:
        return not self.has_engine()

    @property
    def dead_error(self) -> BaseException | None:
        """Why no engine takes requests; None while one does."""
        try:
            self._service.client.check_health()
        except WavecoreError as error:
            return error
        return None


def _with_text(prompt: Any, text: str) -> Any:
    found = as_prompt(prompt)
    return (
        prompt if found.ids is None else {"prompt_token_ids": found.ids, "prompt": text, "cache_salt": found.cache_salt}
    )
