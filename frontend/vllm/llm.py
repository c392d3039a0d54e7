"""vLLM's LLM: offline generation with its signatures and defaults, over our own `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from wavecore.frontend import llm as own
from wavecore.frontend.client.service import Service
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from wavecore.frontend.progress_bars import UseTqdm
from wavecore.frontend.prompts import as_prompts, token_ids
from wavecore.frontend.vllm.beam_search import BeamSearchOutput, beam_search
from wavecore.frontend.vllm.engine_args import EngineArgs, own_defaults
from wavecore.frontend.vllm.llm_engine import LLMEngine
from wavecore.frontend.vllm.metrics import Metric, read_metrics
from wavecore.frontend.vllm.params import BeamSearchParams, SamplingParams, checked, our_arguments


class LLM(own.LLM):
    """As vLLM's class of that name. Its calls take vLLM's arguments and those of `wavecore.LLM`, such as timeout.

    Args:
        model: as in `wavecore.LLM`.
        **settings: vLLM's, or fields of `EngineConfig`.

    Raises:
        NotSupportedError: a setting or an argument asks for what is not here; with the way out.
    """

    def __init__(self, model: str | Path = "default", **settings: Any) -> None:
        super().__init__(model, **{**own_defaults(), **settings})

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:  # type: ignore[override]
        return cls(**engine_args.settings())

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """What programs read of the engine; it is this object's own."""
        return LLMEngine(self._service)

    model_config = property(lambda self: self.llm_engine.model_config)

    def generate(self, prompts: Any = None, sampling_params: Any = None, **given: Any) -> list[RequestOutput]:
        """As `wavecore.LLM.generate`, but a request that fails raises its error.

        Args:
            tokenization_kwargs: {"add_special_tokens": False} leaves out what the tokenizer puts around a text.
        """
        prompts = encoded(self._service, prompts, given.pop("tokenization_kwargs", None))
        return super().generate(prompts, checked(sampling_params), **{"raise_on_error": True, **our_arguments(given)})

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: own.Priority = None,
        chat_template: str | None = None,
        **given: Any,
    ) -> list[RequestOutput]:
        """As `wavecore.LLM.chat`; contents go to the template as they are."""
        given = our_arguments({**given, "lora_request": lora_request})
        given |= {"raise_on_error": True, "priority": priority, "chat_template": chat_template}
        return super().chat(messages, checked(sampling_params), use_tqdm, **given)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, lora_request: Any = None, use_tqdm: bool = False, **given: Any
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely texts of each prompt that a search by beams finds; see `beam_search`."""
        our_arguments({"lora_request": lora_request})
        given.pop("priority", None)  # decides nothing between the beams of one call
        return beam_search(self._service, as_prompts(prompts), params, use_tqdm, **given)

    def embed(self, prompts: Any, **given: Any) -> list[EmbeddingRequestOutput]:
        """Embeddings, by default of the last token as in vLLM, as lists of numbers."""
        prompts = encoded(self._service, prompts, given.pop("tokenization_kwargs", None))
        outputs = super().embed(prompts, **{"pooling": "last", **our_arguments(given)})
        for output in outputs:
            output.outputs.embedding = output.outputs.embedding.tolist()
        return outputs

    def get_default_sampling_params(self) -> SamplingParams:  # type: ignore[override]
        return SamplingParams.of(super().get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges under vLLM's names, of each engine."""
        return read_metrics(self.step_stats())


def encoded(service: Service, prompts: Any, tokenization_kwargs: Mapping[str, Any] | None) -> Any:
    """Prompts as they are, or as token ids where an argument says how to make them.

    Raises:
        NotSupportedError: an argument besides add_special_tokens.
    """
    wanted = dict(tokenization_kwargs or {})
    with_special = wanted.pop("add_special_tokens", True)
    our_arguments({"tokenization_kwargs": wanted})
    if with_special:
        return prompts
    encode = service.need_tokenizer("tokenization_kwargs").encode
    found = [(prompt, prompt.text if prompt.ids is None else None) for prompt in as_prompts(prompts)]
    return [p if text is None else replace(p, ids=token_ids(encode(text, False))) for p, text in found]
