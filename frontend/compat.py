"""What users of vLLM type on the first day: names that map to ours, and names that are refused with the way out."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from wavecore.engine_core.api import custom_ops
from wavecore.engine_core.api.config import EngineConfig, fault
from wavecore.transport.errors import ConfigError, NotSupportedError

# vLLM's (or SGLang's) spelling -> ours
RENAMED = {
    "swap_space": "swap_space_gib",
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "scheduler_policy": "scheduling_policy",
}
ENVIRONMENT = "WAVECORE_"
DTYPES = {"half": "float16", "float": "float32"}
# Settings of vLLM that may be given with a value that asks for nothing: name -> those values
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors", "gguf"),
    "quantization": (None, "gguf"),
    "kv_cache_dtype": ("auto",),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "enable_lora": (False,),
    "enforce_eager": (True, False),
    "pipeline_parallel_size": (1,),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "speculative_config": (None,),
    "generation_config": ("auto",),
    "compilation_config": (None, 0, {}),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True,),
    "disable_log_stats": (True,),
    "enable_log_requests": (False,),
    "max_seq_len_to_capture": (None,),
    "cpu_offload_gb": (0, 0.0),
    "distributed_executor_backend": (None, "mp"),
    "enable_expert_parallel": (False,),
    "limit_mm_per_prompt": (None, {}),
    "use_v2_block_manager": (True, None),
    "num_scheduler_steps": (1,),
}
WAYS_OUT = {
    "trust_remote_code": "code that comes with a model is never run; only built-in architectures are supported",
    "quantization": "weights in float32, float16, bfloat16 and GGUF are supported",
    "enable_lora": "merge the adapter into the weights first",
    "pipeline_parallel_size": "only one rank is supported",
    "speculative_config": "speculative decoding is not supported",
    "kv_cache_dtype": "the cache has the model's dtype",
    "generation_config": "give SamplingParams to each call instead",
    "hf_overrides": "edit a copy of config.json instead",
    "disable_log_stats": "log_stats=True turns statistics on",
    "revision": "download that revision and give its folder",
}
METHODS = {
    "beam_search": "use generate() with n and temperature",
    "encode": "use embed()",
    "classify": "classification models are not supported",
    "score": "score models are not supported; use embed() and compare",
    "reward": "reward models are not supported",
    "sleep": "use shutdown() and a new LLM",
    "wake_up": "use shutdown() and a new LLM",
    "collective_rpc": "code is never sent to an engine",
    "apply_model": "code is never sent to an engine",
    "llm_engine": "LLM and AsyncLLM are the whole interface; see connect() for other processes",
    "get_metrics": "use step_stats() of LLM, or log_stats=True",
    "is_sleeping": "an engine never sleeps; use shutdown() and a new LLM",
    "set_tokenizer": "give tokenizer=FOLDER at start",
    "start_profile": "run the engine under a profiler instead",
    "stop_profile": "run the engine under a profiler instead",
}
CLASSES = {
    "AsyncLLMEngine": "use AsyncLLM",
    "LLMEngine": "use LLM",
    "EngineArgs": "use EngineConfig, or keywords of LLM",
    "AsyncEngineArgs": "use EngineConfig, or keywords of AsyncLLM",
    "RequestOutputKind": 'use OutputKind, as output_kind="delta", "cumulative" or "final" of AsyncLLM.generate',
    "PoolingParams": "use keywords of LLM.embed",
    "BeamSearchParams": "beam search is not supported",
}


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keywords, vLLM's names included; `WAVECORE_<SETTING>` where there is none.

    Raises:
        NotSupportedError: a setting of vLLM that this engine lacks; with the way out.
        ConfigError: an unknown or impossible setting.
    """
    known = {f.name for f in fields(EngineConfig)}
    settings = from_environment()
    for given, value in values.items():
        name = RENAMED.get(given, given)
        if name in known:
            settings[name] = DTYPES.get(value, value) if name == "dtype" and isinstance(value, str) else value
        elif not asks_for_nothing(name, value):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; see EngineConfig for all settings"
            raise ConfigError(f"unknown setting {name}{hint}")
    if custom_ops.registered:
        settings["custom_ops"] = {**custom_ops.registered, **(settings.get("custom_ops") or {})}
    plain: dict[str, Any] = {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}
    return EngineConfig(**plain)


def from_environment() -> dict[str, Any]:
    """Settings that variables named WAVECORE_<SETTING> give; an empty one means "not set".

    Raises:
        ConfigError: naming the variable.
    """
    variables = {f.name: ENVIRONMENT + f.name.upper() for f in fields(EngineConfig)}
    return {
        name: checked(name, typed(name, text), f"{variable} in the environment")
        for name, variable in variables.items()
        if (text := os.environ.get(variable))
    }


def typed(name: str, text: str) -> Any:
    """The value that a setting's text stands for; the text itself where it stands for none."""
    if fault(name, None) is None and text.lower() in ("null", "none"):
        return None
    if fault(name, text) is None:
        return text
    value = plain(text)
    with contextlib.suppress(ValueError):  # 1e9, a text by YAML's rules
        value = float(text) if isinstance(value, str) and fault(name, 0.5) is None else value
    return value


def plain(text: str) -> Any:
    """What a text says as YAML; itself where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def checked(name: str, value: Any, where: str) -> Any:
    """A setting's value, with vLLM's names of dtypes.

    Raises:
        ConfigError: of the wrong kind; says `where` it came from.
    """
    value = DTYPES.get(value, value) if name == "dtype" and isinstance(value, str) else value
    if words := fault(name, value):
        raise ConfigError(f"{where} {words}")
    return value


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a setting of vLLM may be dropped, because what it asks for is so anyway; False for a name nobody knows.

    Raises:
        NotSupportedError: it asks for more.
    """
    if name not in HARMLESS and name not in WAYS_OUT:
        return False
    if any(value is v or value == v for v in HARMLESS.get(name, ())):
        return True
    raise NotSupportedError(f"{name}={value!r:.60}: {WAYS_OUT.get(name, 'not supported in this version')}")


def is_switch(name: str) -> bool:
    """Whether a setting of vLLM is a flag without a value on the command line."""
    return name in HARMLESS and all(isinstance(v, bool) for v in HARMLESS[name])


def refuse_method(name: str) -> NotSupportedError | None:
    """The error for a method of vLLM's LLM that is not here; None for a name nobody knows."""
    return NotSupportedError(f"{name}: {METHODS[name]}") if name in METHODS else None
