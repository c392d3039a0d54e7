"""vLLM's LLM: offline generation with its signatures and defaults, over our own `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from wavecore.frontend import llm as own
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from wavecore.frontend.progress_bars import UseTqdm
from wavecore.frontend.prompts import PromptType, as_prompts, token_ids
from wavecore.frontend.text.messages import Tools
from wavecore.frontend.vllm.beam_search import BeamSearchOutput, beam_search
from wavecore.frontend.vllm.engine_args import OWN_DEFAULTS, EngineArgs
from wavecore.frontend.vllm.llm_engine import LLMEngine
from wavecore.frontend.vllm.metrics import Metric, read_metrics
from wavecore.frontend.vllm.params import BeamSearchParams, SamplingParams, checked, refuse_extras
from wavecore.transport.errors import ConfigError, NotSupportedError

Params = Any  # SamplingParams of either kind, one or one each, or None


class LLM(own.LLM):
    """As vLLM's class of that name.

    Args:
        model: as in `wavecore.LLM`.
        chat_template: for `chat`, in place of the model's; a template or the path of one.
        **settings: vLLM's, or fields of `EngineConfig`.

    Raises:
        NotSupportedError: a setting asks for what is not here; with the way out.
    """

    def __init__(
        self, model: str | Path = "default", *, chat_template: str | Path | None = None, **settings: Any
    ) -> None:
        super().__init__(model, **{**OWN_DEFAULTS, **settings})
        self._chat_template: str | None = _template(chat_template)

    def _attach(self, service: Service) -> None:
        super()._attach(service)
        self._chat_template = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:  # type: ignore[override]
        return cls(**engine_args.settings())

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """What programs read of the engine; it is this object's own."""
        return LLMEngine.of(self._service)

    model_config = property(lambda self: self.llm_engine.model_config)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: own.Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **ours: Any,
    ) -> list[RequestOutput]:
        """As `wavecore.LLM.generate`, but a request that fails raises its error.

        Args:
            tokenization_kwargs: {"add_special_tokens": False} leaves out what the tokenizer puts around a text.
            **ours: more arguments of `wavecore.LLM.generate`, such as timeout.
        """
        refuse_extras(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        given: Any = encoded(self._service, prompts, tokenization_kwargs)
        ours = {"raise_on_error": True, **ours}
        return super().generate(given, checked(sampling_params), use_tqdm=use_tqdm, priority=priority, **ours)

    def chat(
        self,
        messages: own.Messages | Sequence[own.Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: own.Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **ours: Any,
    ) -> list[RequestOutput]:
        """As `wavecore.LLM.chat`; special tokens in a chat come from its template alone."""
        refuse_extras(
            lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs, tokenization_kwargs=tokenization_kwargs
        )
        if chat_template_content_format not in ("auto", "string"):
            raise NotSupportedError("chat_template_content_format: contents go to the template as text")
        return super().chat(
            messages,
            checked(sampling_params),
            use_tqdm,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            priority=priority,
            **{"raise_on_error": True, **ours},
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely texts of each prompt that a search by beams finds; see `beam_search`."""
        refuse_extras(lora_request=lora_request)
        return beam_search(self._service, as_prompts(prompts), params, use_tqdm, concurrency_limit)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **ours: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings, by default of the last token as in vLLM, as lists of numbers."""
        refuse_extras(lora_request=lora_request, pooling_params=pooling_params)
        given: Any = encoded(self._service, prompts, tokenization_kwargs)
        outputs = super().embed(given, use_tqdm=use_tqdm, **{"pooling": "last", **ours})
        for output in outputs:
            output.outputs.embedding = output.outputs.embedding.tolist()
        return outputs

    def get_default_sampling_params(self) -> SamplingParams:  # type: ignore[override]
        return SamplingParams.of(super().get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges under vLLM's names, summed over engines."""
        return read_metrics(self.step_stats())


def encoded(service: Service, prompts: Any, tokenization_kwargs: Mapping[str, Any] | None) -> Any:
    """Prompts as they are, or as token ids where an argument says how to make them.

    Raises:
        NotSupportedError: an argument besides add_special_tokens.
    """
    wanted = dict(tokenization_kwargs or {})
    add_special_tokens = wanted.pop("add_special_tokens", True)
    refuse_extras(tokenization_kwargs=wanted)
    if add_special_tokens:
        return prompts
    encode = service.need_tokenizer("tokenization_kwargs").encode
    return [
        replace(prompt, ids=token_ids(encode(prompt.text, False, prompt.parse_special)))
        if prompt.text is not None and prompt.ids is None
        else prompt
        for prompt in as_prompts(prompts)
    ]


def _template(given: str | Path | None) -> str | None:
    """A chat template, or what stands in its file."""
    if given is None or "{" in str(given):
        return None if given is None else str(given)
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template {str(given)!r:.80} is neither a template nor a file: {error}") from error
