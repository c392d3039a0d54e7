"""LLM: offline generation, close to vLLM's class of that name; and `connect`, to an engine that others started."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from wavecore.engine_core.api.request_options import RequestOptions, embedding_options
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.base import BaseLLM
from wavecore.frontend.client.mailbox import EMBEDDING_PARAMS, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.offline import raise_if_all, run_batch
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.client.utilities import Inspection
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput, shown
from wavecore.frontend.progress_bars import UseTqdm
from wavecore.frontend.prompts import Prompt, PromptType, as_prompt, as_prompts
from wavecore.frontend.text.messages import ChatOptions, Tools
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import NotSupportedError, ValidationError
from wavecore.transport.wire.checks import OF_REQUEST

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None
Messages = Sequence[Mapping[str, Any]]


class LLM(BaseLLM, Inspection):
    """A model in an engine process of its own, ended with this object.

    Works from plain scripts (no main guard needed) and notebooks. Use it as a context manager, or call `shutdown`; the
    end of the program ends the engine in any case.

    Args:
        model: a folder in Hugging Face form, a `.gguf` file, a hub id, or "default" (SmolLM2-135M-Instruct).
        **settings: fields of `EngineConfig`, or vLLM's names for them.

    Raises:
        ConfigError, ModelError, NotSupportedError, StartError: the engine did not become ready; with the cause.

    Example:
        with LLM("default") as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
            print(output.outputs[0].text)
    """

    # --- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        prompt_token_ids: None = None,
        priority: Priority = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
        raise_on_error: bool = False,
        data_parallel_rank: int | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; all are checked before the first is sent.

        Args:
            prompts: text, token ids, or vLLM's dictionaries ("prompt", "prompt_token_ids", "prompt_embeds"); or a list.
            sampling_params: for all, or one each; None takes the model's recommended ones.
            use_tqdm: a progress bar, or a function that makes one.
            priority: for all or one each; lower runs first under scheduling_policy="priority".
            timeout: seconds for each request; then it ends with finish_reason "timeout" and what it had.
            queue_timeout: seconds until it must have begun; first_token_timeout: until its first token.
            resume: let greedy or seeded requests go on, once, after the death of an engine.
            raise_on_error: raise the first error of any request, and abort the others.
            data_parallel_rank: the engine to use, from 0; None takes the best for each request.

        Returns:
            One output a prompt, in order. Where some fail, because the engine died under them, say, these have
            finish_reason "error", `.error` and what they had; the others go on and finish.

        Raises:
            ValidationError: a value out of bounds.
            EngineDead, Overloaded, NumericalError, ...: every request failed; the first one's error.
        """
        _no_lora(lora_request)
        if prompt_token_ids is not None:
            raise NotSupportedError('prompt_token_ids: give prompts=[{"prompt_token_ids": [...]}, ...]')
        options = RequestOptions(0, timeout, queue_timeout, first_token_timeout, data_parallel_rank)
        requests = self._requests(as_prompts(prompts), sampling_params, priority, resume, options)
        return run_batch(self._service, requests, use_tqdm, OF_REQUEST.flag("raise_on_error", raise_on_error))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Priority = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
        raise_on_error: bool = False,
        data_parallel_rank: int | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        The text of special tokens inside contents stays text. Otherwise as `generate`.
        """
        _no_lora(lora_request)
        several = isinstance(messages, Sequence) and messages and isinstance(messages[0], Sequence)
        conversations: Any = messages if several else [messages]
        chat = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        asked = [self._service.chat_prompt(conversation, chat) for conversation in conversations]
        options = RequestOptions(0, timeout, queue_timeout, first_token_timeout, data_parallel_rank)
        requests = self._requests(asked, sampling_params, priority, resume, options)
        return run_batch(self._service, requests, use_tqdm, OF_REQUEST.flag("raise_on_error", raise_on_error))

    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
        data_parallel_rank: int | None = None,
    ) -> Iterator[RequestOutput]:
        """Deltas of one request, sent when the first is asked for; leaving the loop aborts it.

        Raises:
            WavecoreError: the request failed, after what it had was given.
        """
        options = RequestOptions(priority, timeout, queue_timeout, first_token_timeout, data_parallel_rank)
        request = self._service.prepare(as_prompt(prompt), sampling_params, options, resume=resume)
        return self._deltas(request)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling: Literal["mean", "last"] = "mean",
        timeout: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts: the last hidden states, pooled, of length 1 in the Euclidean norm.

        Args:
            pooling: "mean" over the prompt's tokens, or "last".

        Returns:
            One a prompt, in order. Where some fail, these have `.error` and an empty embedding.

        Raises:
            WavecoreError: every request failed; the first one's error.
        """
        options = embedding_options(pooling, timeout)
        requests = [self._service.prepare(prompt, EMBEDDING_PARAMS, options) for prompt in as_prompts(prompts)]
        outputs = [EmbeddingRequestOutput.of(output) for output in run_batch(self._service, requests, use_tqdm)]
        raise_if_all([output.error for output in outputs])
        return outputs

    # --- facts and control ---------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; NotSupportedError where there is none (skip_tokenizer_init)."""
        return self._service.need_tokenizer("get_tokenizer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _deltas(self, request: EngineRequest) -> Iterator[RequestOutput]:
        notifier = ThreadNotifier()
        mailbox = self._service.mailbox(request, notifier, OutputKind.DELTA)
        try:
            self._service.client.submit(mailbox)
            finished = False
            while not finished:
                if not mailbox.ended:  # else there is nothing to wait for, in the child of a fork also nobody
                    notifier.wait()
                for output in shown(mailbox.take()):
                    finished = output.finished
                    yield output
        finally:
            self._service.client.abort(mailbox)

    def _requests(
        self, prompts: list[Prompt], params: Params, priority: Priority, resume: bool, options: RequestOptions
    ) -> list[EngineRequest]:
        each = _one_each("sampling_params", params, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        requests = []
        for prompt, p, rank in zip(prompts, each, priorities, strict=True):
            if rank is not options.priority:  # mostly all have the same, which is checked once
                options = replace(options, priority=rank)
            requests.append(self._service.prepare(prompt, p, options, resume=resume))
        return requests


connect = LLM.connect
"""A client of an engine that runs already; `AsyncLLM.connect` for asyncio programs."""


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    listed = value.ndim == 1 if isinstance(value, np.ndarray) else isinstance(value, Sequence)
    if not listed or isinstance(value, str | bytes):
        return [value] * count
    if len(value) != count:
        raise ValidationError(name, f"{len(value)} given for {count} prompts; give one, or one each")
    return list(value)


def _no_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise NotSupportedError("lora_request: merge the adapter into the weights first")
