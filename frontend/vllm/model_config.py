"""What programs read of a running engine under vLLM's names: `llm.llm_engine.model_config` and its siblings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple


class ModelConfig(NamedTuple):
    """Facts of the model, as the engine resolved them."""

    resolved: Mapping[str, Any]
    model: str
    tokenizer: str
    max_model_len: int
    trust_remote_code: bool = False
    is_encoder_decoder: bool = False
    runner_type: str = "generate"

    @property
    def dtype(self) -> Any:
        """As torch's."""
        return getattr(import_module("torch"), self.resolved["dtype"])

    @property
    def hf_config(self) -> Any:
        """transformers' config of the model's folder."""
        return import_module("transformers").AutoConfig.from_pretrained(self.model, trust_remote_code=False)

    def get_vocab_size(self) -> int:
        return int(self.resolved["vocab_size"])

    def get_hidden_size(self) -> int:
        return int(self.resolved["hidden_size"])


class VllmConfig(NamedTuple):
    """The parts of vLLM's configuration that programs read."""

    model_config: ModelConfig
    cache_config: SimpleNamespace
    scheduler_config: SimpleNamespace
    parallel_config: SimpleNamespace

    @classmethod
    def of(cls, resolved: Mapping[str, Any], dp: int) -> VllmConfig:
        model, tp = str(resolved.get("model_path") or resolved["model"]), int(resolved["tensor_parallel_size"])
        own = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        return cls(
            ModelConfig(resolved, model, str(resolved.get("tokenizer") or model), int(resolved["max_model_len"])),
            SimpleNamespace(block_size=resolved["block_size"], num_gpu_blocks=resolved["num_blocks"]),
            SimpleNamespace(**{name: resolved[name] for name in own}),
            SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1, data_parallel_size=dp, world_size=tp),
        )
