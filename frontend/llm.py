"""LLM: offline generation, close to vLLM's class of that name. Always talks to an engine process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client import utilities
from wavecore.frontend.client.batch import run_batch, stream_deltas
from wavecore.frontend.client.embeddings import EMBEDDING_PARAMS, pooled
from wavecore.frontend.client.heat_map import write_heat_map
from wavecore.frontend.client.service import Service
from wavecore.frontend.compat import engine_config, refuse_method
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from wavecore.frontend.progress_bars import StartBar
from wavecore.frontend.prompts import Prompt, PromptType, as_prompt, as_prompts
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import ConfigError, NotSupportedError, ValidationError

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in an engine process of its own, ended with this object.

    Works from plain scripts (no main guard needed) and notebooks. Use it as a context manager, or call `shutdown`; at
    the latest the end of the program ends the engine.

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

    # --- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        prompt_token_ids: None = None,
        priority: int | Sequence[int] | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; all are checked before the first is sent.

        Args:
            prompts: text, token ids, or vLLM's dictionaries ("prompt", "prompt_token_ids", "prompt_embeds"); or a list.
            sampling_params: for all, or one each; None takes the model's recommended ones.
            use_tqdm: a progress bar, or a function that makes one.
            priority: for all or one each; lower runs first under scheduling_policy="priority".
            timeout: seconds for each request; then it ends with finish_reason "timeout" and what it had.
            queue_timeout: seconds until it must have begun; first_token_timeout: until its first token.
            resume: let greedy or seeded requests go on after the death of an engine.

        Returns:
            One output a prompt, in order. A request that failed alone has finish_reason "error" and `.error`.

        Raises:
            ValidationError: a value out of bounds.
            EngineDead: the engine died under requests that had begun; with the cause.
        """
        _no_lora(lora_request)
        if prompt_token_ids is not None:
            raise NotSupportedError('prompt_token_ids: give prompts=[{"prompt_token_ids": [...]}, ...]')
        asked = as_prompts(prompts)
        deadlines = _deadlines(timeout, queue_timeout, first_token_timeout)
        return self._run(asked, sampling_params, use_tqdm, priority, resume=resume, **deadlines)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        first_token_timeout: float | None = None,
        resume: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        The text of special tokens inside contents stays text. Otherwise as `generate`.
        """
        _no_lora(lora_request)
        if not isinstance(messages, Sequence) or not messages:
            raise ValidationError("messages", "must be a conversation or a list of conversations")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        asked = [
            self._service.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        deadlines = _deadlines(timeout, queue_timeout, first_token_timeout)
        return self._run(asked, sampling_params, use_tqdm, priority, resume=resume, **deadlines)

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
    ) -> Iterator[RequestOutput]:
        """Deltas of one request, sent when the first is asked for; leaving the loop aborts it.

        Raises:
            WavecoreError: the request failed, after what it had was given.
        """
        params = sampling_params or self.get_default_sampling_params()
        deadlines = _deadlines(timeout, queue_timeout, first_token_timeout)
        request = self._service.prepare(as_prompt(prompt), params, priority=priority, resume=resume, **deadlines)
        return stream_deltas(self, self._service, request)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling: str = "mean",
        timeout: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts: the last hidden states, pooled, of length 1 in the Euclidean norm.

        Args:
            pooling: "mean" over the prompt's tokens, or "last".
        """
        requests = [
            self._service.prepare(p, EMBEDDING_PARAMS, pooling=pooling, timeout=timeout) for p in as_prompts(prompts)
        ]
        return [pooled(m, o) for m, o in run_batch(self._service, requests, use_tqdm)]

    # --- facts and control ---------------------------------------------------------------------------------------

    @property
    def runtime_dir(self) -> Path:
        """What other processes give to `connect`."""
        return self._service.runtime_dir

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self._service.resolved["vocab_size"])

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; NotSupportedError where there is none (skip_tokenizer_init)."""
        return self._service.need_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """The model authors' recommendation (generation_config.json), else the defaults."""
        return self._service.default_params()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, for instance after a change of weights."""
        return utilities.reset_prefix_cache(self._service.client)

    def print_memory_stats(self) -> None:
        """Print a table of what the engine's memory holds."""
        utilities.print_memory_stats(self._service.client)

    def debug_requests(self) -> list[dict[str, Any]]:
        """State, age and progress of every request in the engine."""
        return utilities.debug_requests(self._service.client)

    debug_sequence_states = debug_requests

    def visualize_attention(
        self, prompt: PromptType, layer: int, head: int, path: str | Path = "attention.png"
    ) -> npt.NDArray[np.float32]:
        """Attention of one head over a prompt, as a PNG heat map and as numbers.

        Args:
            path: the file to write; rows are queries, columns keys.

        Returns:
            float32 [n, n] of probabilities; row i sums to 1 over columns 0..i.
        """
        request = self._service.prepare(as_prompt(prompt), SamplingParams(max_tokens=1))
        weights = utilities.attention_map(self._service.client, request.prompt.tolist(), layer, head)
        write_heat_map(path, weights)
        return weights

    def step_stats(self) -> list[dict[str, Any]]:
        """Counters of each engine since its start: steps, tokens, seconds in each phase of a step."""
        return utilities.step_stats(self._service.client)

    def has_engine(self) -> bool:
        """Whether an engine takes requests, or is being started again and will."""
        return self._service.client.has_hope()

    def shutdown(self) -> None:
        """End the engine (or let go of an attached one). Idempotent; requests that run fail."""
        self._detach()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        if error := refuse_method(name):
            raise error
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- inside --------------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        **options: Any,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        requests = [
            self._service.prepare(prompt, p, priority=rank, **options)
            for prompt, p, rank in zip(prompts, params, priorities, strict=True)
        ]
        return [output for _, output in run_batch(self._service, requests, use_tqdm)]


def _deadlines(total: float | None, queue: float | None, first_token: float | None) -> dict[str, Any]:
    return {"timeout": total, "queue_timeout": queue, "first_token_timeout": first_token}


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValidationError(name, f"{len(value)} given for {count} prompts; give one, or one each")
    return value


def _no_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise NotSupportedError("lora_request: merge the adapter into the weights first")
