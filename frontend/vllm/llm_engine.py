"""LLMEngine: what programs read of an engine under `llm.llm_engine`, and vLLM's loop of `add_request` and `step`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend.base import BaseLLM
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.service import Service
from wavecore.frontend.client.utilities import Inspection
from wavecore.frontend.compat import engine_config
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.prompts import PromptType, as_prompt
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.vllm.engine_args import OWN_DEFAULTS, EngineArgs
from wavecore.frontend.vllm.metrics import Metric, read_metrics
from wavecore.frontend.vllm.model_config import TASKS, VllmConfig
from wavecore.frontend.vllm.params import OUTPUT_KINDS, SamplingParams, refuse_extras
from wavecore.transport.errors import ValidationError


class LLMEngine(BaseLLM, Inspection):
    """Requests come in one by one, outputs go out step by step, in one thread."""

    def _attach(self, service: Service) -> None:
        super()._attach(service)
        self._own(service)

    @classmethod
    def of(cls, service: Service) -> Self:
        """Over the engine of an `LLM`, which ends it."""
        engine = cls.__new__(cls)
        engine._service = service
        engine._own(service)
        return engine

    def _own(self, service: Service) -> None:
        self.vllm_config = VllmConfig(service.resolved)
        self.model_config = self.vllm_config.model_config
        self._notifier = ThreadNotifier()
        self._running: dict[str, Mailbox] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:  # type: ignore[override]
        return cls.from_config(engine_config({**OWN_DEFAULTS, **engine_args.settings()}))

    from_vllm_config = from_engine_args

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._service.need_tokenizer("get_tokenizer")

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,  # when it was made is measured here
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,  # only told to tracing systems
        priority: int = 0,
    ) -> str:
        refuse_extras(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        del arrival_time, trace_headers
        options = RequestOptions(priority=priority)
        request = self._service.prepare(as_prompt(prompt), params.checked(), options, request_id=request_id)
        if request_id in self._running:
            raise ValidationError("request_id", f"{request_id!r:.60} is the id of a request that runs")
        mailbox = self._service.mailbox(request, self._notifier, OUTPUT_KINDS[params.output_kind])
        self._running[request_id] = mailbox
        self._service.client.submit(mailbox)
        return request_id

    def step(self) -> list[RequestOutput]:
        """What is new, after a wait for the first of it; nothing where no request runs.

        Raises:
            WavecoreError: a request failed.
        """
        found: list[RequestOutput] = []
        timeout = None
        while self._running and (mailbox := self._notifier.wait(timeout)) is not None:
            timeout = 0.0
            output = mailbox.take()
            if output is None or output.request_id not in self._running:
                continue
            if output.finished:
                del self._running[output.request_id]
            if output.error is not None:
                raise output.error
            found.append(output)
        return found

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    def get_metrics(self) -> list[Metric]:
        return read_metrics(self.step_stats())

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; nothing more of them is told."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if mailbox := self._running.pop(request_id, None):
                self._service.client.abort(mailbox)
