"""LLMEngine: what programs read of an engine under `llm.llm_engine`, and vLLM's loop of `add_request` and `step`."""

from collections.abc import Iterable
from typing import Any, Self

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend import llm as own
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.service import Service
from wavecore.frontend.client.utilities import Inspection
from wavecore.frontend.compat import missing
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.vllm.arguments import as_in_vllm, one_prompt
from wavecore.frontend.vllm.engine_args import EngineArgs
from wavecore.frontend.vllm.model_config import VllmConfig
from wavecore.frontend.vllm.params import OUTPUT_KINDS, SamplingParams
from wavecore.transport.errors import ValidationError


class LLMEngine(Inspection):
    """Requests come in one by one, outputs go out step by step, in one thread.

    Args:
        owner: ends the engine when it is collected; None where that is somebody else's.
    """

    def __init__(self, service: Service, owner: own.LLM | None = None) -> None:
        self._service, self._owner = service, owner
        self.vllm_config = VllmConfig.of(service.resolved, len(service.client.numbers))
        self.tokenizer, self.model_config = service.tokenizer, self.vllm_config.model_config
        self._notifier, self._running = ThreadNotifier(), dict[str, Mailbox]()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:
        llm = own.LLM(**engine_args.settings())
        return cls(llm._service, llm)

    from_vllm_config = from_engine_args

    reset_prefix_cache = as_in_vllm(Inspection.reset_prefix_cache)
    start_profile = as_in_vllm(Inspection.start_profile)

    @as_in_vllm
    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, tokenization_kwargs: Any = None, **more: Any
    ) -> str:
        prompt = one_prompt(self._service, prompt, more.pop("prompt_text", None), tokenization_kwargs)
        request = self._service.prepare(prompt, params.checked(), RequestOptions(**more), request_id=request_id)
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
        while self._running and (mailbox := self._notifier.wait(0.0 if found else None)) is not None:
            output = mailbox.take()
            if output is None or self._running.get(output.request_id) is not mailbox:
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

    @as_in_vllm
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; nothing more of them is told."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if mailbox := self._running.pop(request_id, None):
                self._service.client.abort(mailbox)

    def get_tokenizer(self) -> Any:
        return self._service.need_tokenizer("get_tokenizer")

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name)
