"""What programs read of a running engine under vLLM's names: `llm.llm_engine.model_config` and its siblings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import Any

TASKS = ("generate", "embed")


@dataclass(frozen=True)
class ModelConfig:
    """Facts of the model, as the engine resolved them."""

    resolved: Mapping[str, Any]
    runner_type = "generate"
    trust_remote_code = False
    is_encoder_decoder = False
    is_multimodal_model = False
    multimodal_config = None
    quantization = None
    max_logprobs = 64

    @property
    def model(self) -> str:
        return str(self.resolved.get("model_path") or self.resolved["model"])

    @property
    def tokenizer(self) -> str:
        return str(self.resolved.get("tokenizer") or self.model)

    @property
    def max_model_len(self) -> int:
        return int(self.resolved["max_model_len"])

    @property
    def dtype(self) -> Any:
        """As torch's."""
        return getattr(import_module("torch"), self.resolved["dtype"])

    @property
    def skip_tokenizer_init(self) -> bool:
        return bool(self.resolved["skip_tokenizer_init"])

    @property
    def served_model_name(self) -> str:
        return str(self.resolved["served_model_name"] or self.model)

    @cached_property
    def hf_config(self) -> Any:
        """transformers' config of the model's folder."""
        from transformers import AutoConfig  # loads torch

        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return int(self.resolved["vocab_size"])

    def get_hidden_size(self) -> int:
        return int(self.resolved["hidden_size"])


@dataclass(frozen=True)
class VllmConfig:
    """The parts of vLLM's configuration that programs read."""

    resolved: Mapping[str, Any]
    lora_config = None
    speculative_config = None

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(self.resolved)

    @property
    def cache_config(self) -> SimpleNamespace:
        return self._part(block_size="block_size", num_gpu_blocks="num_blocks")

    @property
    def scheduler_config(self) -> SimpleNamespace:
        return self._part(**{name: name for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")})

    @property
    def parallel_config(self) -> SimpleNamespace:
        return SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, world_size=1)

    def _part(self, **names: str) -> SimpleNamespace:
        return SimpleNamespace(**{name: self.resolved[ours] for name, ours in names.items()})
