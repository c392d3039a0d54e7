"""vLLM's LLM: offline generation with its signatures and defaults, over our own `LLM`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from wavecore.frontend import llm as own
from wavecore.frontend.outputs import EmbeddingRequestOutput, RequestOutput
from wavecore.frontend.prompts import as_prompts
from wavecore.frontend.vllm.arguments import as_in_vllm, encoded
from wavecore.frontend.vllm.beam_search import BeamSearchOutput, beam_search
from wavecore.frontend.vllm.engine_args import EngineArgs, own_defaults, shows_settings
from wavecore.frontend.vllm.llm_engine import LLMEngine
from wavecore.frontend.vllm.metrics import Metric, read_metrics
from wavecore.frontend.vllm.params import BeamSearchParams, SamplingParams, checked
from wavecore.transport.errors import ValidationError


@dataclass
class ScoringOutput:
    """Attributes:
    score: from -1 to 1.
    """

    score: float


@dataclass
class ScoringRequestOutput:
    """Of one pair of prompts; the ids are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True

    @classmethod
    def of(cls, one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> Self:
        cosine = float(np.dot(one.outputs.embedding, other.outputs.embedding))  # they are of length 1
        ids = [*one.prompt_token_ids, *other.prompt_token_ids]
        return cls(f"{one.request_id}_{other.request_id}", ScoringOutput(cosine), ids)


class LLM(own.LLM):
    """As vLLM's class of that name. Its calls take vLLM's arguments and those of `wavecore.LLM`, such as timeout.

    Args:
        model: as in `wavecore.LLM`.
        **settings: vLLM's, or fields of `EngineConfig`.

    Raises:
        NotSupportedError: a setting or an argument asks for what is not here; with the way out.
    """

    @shows_settings
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

    @as_in_vllm
    def generate(
        self, prompts: Any = None, sampling_params: Any = None, tokenization_kwargs: Any = None, **more: Any
    ) -> list[RequestOutput]:
        """As `wavecore.LLM.generate`, but a request that fails raises its error.

        Args:
            tokenization_kwargs: {"add_special_tokens": False} leaves out what the tokenizer puts around a text.
        """
        prompts = encoded(self._service, prompts, tokenization_kwargs)
        return super().generate(prompts, checked(sampling_params), **{"raise_on_error": True, **more})

    @as_in_vllm
    def chat(self, messages: Any, sampling_params: Any = None, chat_template: Any = None, **more: Any) -> Any:  # type: ignore[override]
        """As `wavecore.LLM.chat`, but as `generate`; contents go to the template as they are."""
        more = {"raise_on_error": True, "chat_template": chat_template, **more}
        return super().chat(messages, checked(sampling_params), **more)

    @as_in_vllm
    def beam_search(self, prompts: Any, params: BeamSearchParams, **more: Any) -> list[BeamSearchOutput]:
        """The `beam_width` most likely texts of each prompt that a search by beams finds; see `beam_search`."""
        more.pop("priority", None)  # decides nothing between the beams of one call
        return beam_search(self._service, as_prompts(prompts), params, **more)

    @as_in_vllm
    def embed(self, prompts: Any, tokenization_kwargs: Any = None, **more: Any) -> list[EmbeddingRequestOutput]:
        """Embeddings, by default of the last token as in vLLM, as lists of numbers."""
        outputs = super().embed(encoded(self._service, prompts, tokenization_kwargs), **{"pooling": "last", **more})
        for output in outputs:
            output.outputs.embedding = output.outputs.embedding.tolist()
        return outputs

    @as_in_vllm
    def score(self, data_1: Any, data_2: Any, **more: Any) -> list[ScoringRequestOutput]:
        """How alike prompts are: the cosine of their embeddings, of one with each of many, or pair by pair.

        Raises:
            ValidationError: as many as that cannot be paired.
        """
        first, second = as_prompts(data_1), as_prompts(data_2)
        if len(first) not in (1, len(second)):
            raise ValidationError("data_1", f"has {len(first)} entries, data_2 {len(second)}; give one, or as many")
        found = self.embed([*first, *second], **more)
        ones, others = found[: len(first)] * (len(second) // len(first)), found[len(first) :]
        return [ScoringRequestOutput.of(one, other) for one, other in zip(ones, others, strict=True)]

    reset_prefix_cache = as_in_vllm(own.LLM.reset_prefix_cache)
    start_profile = as_in_vllm(own.LLM.start_profile)

    def get_default_sampling_params(self) -> SamplingParams:  # type: ignore[override]
        return SamplingParams.of(super().get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges under vLLM's names, of each engine."""
        return read_metrics(self.step_stats())
