"""Every setting and sampling parameter of vLLM 0.33: taken, taken at its default, or refused with the way out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from wavecore import EngineConfig, NotSupportedError
from wavecore.frontend.compat import FOREIGN, FOREIGN_SAMPLING, SETTINGS, SWITCHES, engine_config
from wavecore.frontend.vllm.utils import Platform
from wavecore.vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from wavecore.vllm.utils import FlexibleArgumentParser

NAMES = json.loads(Path(__file__).with_name("vllm_names.json").read_text())
ENGINE_ARGS: list[str] = NAMES["engine_args"]
ASKS = object()  # a value that no setting has


@pytest.mark.parametrize("name", ENGINE_ARGS)
def test_every_setting_of_vllm_is_taken_at_its_default(name: str) -> None:
    default = FOREIGN[name]["default"]
    config = engine_config({name: default})
    assert default is None or name not in SETTINGS or getattr(config, name) == default


@pytest.mark.parametrize("name", ENGINE_ARGS)
def test_every_setting_of_vllm_is_taken_where_nothing_is_chosen(name: str) -> None:
    assert name == "model" or engine_config({name: None}) == EngineConfig()


@pytest.mark.parametrize("name", [name for name in ENGINE_ARGS if name not in SETTINGS])
def test_what_a_setting_of_vllm_asks_beyond_that_is_refused_with_the_way_out(name: str) -> None:
    if FOREIGN[name].get("allowed") == "any":
        assert engine_config({name: ASKS}) == EngineConfig()
        return
    with pytest.raises(NotSupportedError, match=f"^{name}=.*: .{{10}}"):
        engine_config({name: ASKS})


def test_the_table_has_no_name_that_vllm_has_not() -> None:
    assert {name for name, rule in FOREIGN.items() if "default" in rule} == set(ENGINE_ARGS)


@pytest.mark.parametrize("name", NAMES["sampling_params"])
def test_every_sampling_parameter_of_vllm_is_a_field(name: str) -> None:
    assert name in SamplingParams.__annotations__
    default = getattr(SamplingParams(), name)
    SamplingParams(**{name: default})
    SamplingParams.from_optional(**{name: None})


@pytest.mark.parametrize("name", FOREIGN_SAMPLING)
def test_a_sampling_parameter_that_is_not_here_is_refused_with_the_way_out(name: str) -> None:
    if FOREIGN_SAMPLING[name].get("allowed") == "any":
        assert SamplingParams(**{name: ASKS}).checked() == SamplingParams().checked()
        return
    with pytest.raises(NotSupportedError, match=f"^{name}=.*: .{{8}}"):
        SamplingParams(**{name: ASKS})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_num_seqs": None, "download_dir": None, "convert": "auto", "model_impl": "auto"}, {}),
        ({"enable_sleep_mode": False, "enable_prompt_embeds": True, "disable_log_stats": False}, {}),
        ({"enforce_eager": True, "compilation_config": {"level": 3}, "optimization_level": 0}, {"enforce_eager": True}),
        ({"dtype": "half", "swap_space": 4}, {"dtype": "float16", "swap_space_gib": 4.0}),
        ({"runner": "pooling", "convert": "embed", "tokenizer_mode": "slow"}, {}),
        ({"max_num_batched_tokens": 48}, {"max_num_batched_tokens": 48, "max_num_seqs": 48}),
        ({"max_num_seqs": 9000}, {"max_num_batched_tokens": 9000, "max_num_seqs": 9000}),
        ({"hf_overrides": {}, "override_generation_config": {}, "revision": "main"}, {}),
        ({"logits_processors": [], "pooler_config": None, "speculative_config": None}, {}),
        ({"use_tqdm_on_load": False}, {"disable_tqdm": True}),
        ({"profiler_config": {"profiler": "torch", "torch_profiler_dir": "a"}}, {"torch_profiler_dir": "a"}),
        ({"enable_expert_parallel": True, "profiler_config": {}}, {"enable_expert_parallel": True}),
        ({"load_format": "safetensors", "generation_config": "auto"}, {}),
        ({"load_format": "dummy", "generation_config": "vllm"}, {"load_format": "dummy", "generation_config": "vllm"}),
        ({"seed": 0, "gpu_memory_utilization": 0.92}, {"seed": 0, "gpu_memory_utilization": 0.92}),
    ],
)
def test_values_that_mean_what_we_do(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert engine_config(given) == EngineConfig(**meant)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "awq"),
        ("kv_cache_dtype", "fp8"),
        ("speculative_config", {"model": "ngram"}),
        ("hf_overrides", {"rope_scaling": {}}),
        ("enable_lora", True),
        ("enable_sleep_mode", True),
        ("pipeline_parallel_size", 2),
        ("model_impl", "transformers"),
        ("cpu_offload_gb", 4),
        ("logits_processors", ["a"]),
        ("limit_mm_per_prompt", {"image": 2}),
        ("logprobs_mode", "processed_logprobs"),
        ("guided_decoding_backend", "xgrammar"),
        ("kv_transfer_config", {"kv_connector": "a"}),
        ("profiler", "proton"),
    ],
)
def test_values_that_would_change_the_answer_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(NotSupportedError, match=name) as refused:
        engine_config({name: value})
    assert isinstance(refused.value, ValueError)


def test_trust_remote_code_is_a_permission(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert engine_config({"trust_remote_code": True}) == EngineConfig()
        assert engine_config({"trust_remote_code": False}) == EngineConfig()
    [warning] = caplog.records
    assert "never run" in warning.getMessage()


def test_all_settings_as_flags_give_the_settings_of_vllm() -> None:
    """What vLLM's examples do: `LLM(**vars(parser.parse_args()))`."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    plain = vars(parser.parse_args([]))
    assert set(plain) == set(ENGINE_ARGS)
    flags = ["--max_model_len", "128", "--max-num-seqs=4", "--no-enable-sleep-mode", "--dtype", "float32"]
    config = engine_config(vars(parser.parse_args(flags)))
    assert (config.max_model_len, config.max_num_seqs, config.dtype, config.seed) == (128, 4, "float32", 0)
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", "there", "--enforce-eager"]))
    assert (args.model, args.enforce_eager) == ("there", True)
    assert engine_config(args.settings()).model == "there"


@pytest.mark.parametrize(("negated", "value"), [("", True), ("no-", False)])
def test_switches_are_flags_without_a_value(negated: str, value: bool) -> None:
    names = SWITCHES & set(ENGINE_ARGS)
    assert {"enable_prefix_caching", "async_scheduling", "enforce_eager", "disable_cascade_attn"} <= names
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    found = vars(parser.parse_args([f"--{negated}{name.replace('_', '-')}" for name in names]))
    assert {name: found[name] for name in names} == dict.fromkeys(names, value)


def test_short_flags_are_those_of_vllm() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    found = parser.parse_args(["-tp", "1", "-dp=2", "-n", "1", "-q", "awq", "-cc", '{"level": 3}'])
    assert (found.tensor_parallel_size, found.data_parallel_size, found.nnodes) == (1, 2, 1)
    assert (found.quantization, found.compilation_config) == ("awq", {"level": 3})
    server = vars(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True).parse_args([]))
    assert server == {"enable_log_requests": False}


@pytest.mark.parametrize(("cuda", "device"), [(True, "cuda:1"), (False, "auto")])
def test_a_rank_of_a_program_s_own_has_its_gpu(cuda: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "device_type", "cuda" if cuda else "cpu")
    monkeypatch.setenv("VLLM_DP_RANK_LOCAL", "1")
    assert engine_config(EngineArgs("there").settings()).device == device
    assert engine_config(EngineArgs("there", device="cpu").settings()).device == "cpu"


def test_engine_args_are_attributes() -> None:
    args = EngineArgs("there", max_model_len=64)
    args.max_num_seqs = 3
    assert (args.max_model_len, args.enforce_eager) == (64, False)
    own = {"seed": 0, "gpu_memory_utilization": 0.92}
    assert args.settings() == {"model": "there", "max_model_len": 64, "max_num_seqs": 3, **own}
    assert args == EngineArgs("there", max_model_len=64, max_num_seqs=3) != EngineArgs("there")
    assert "max_model_len=64" in repr(args)
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs("there", max_model_length=64)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("llm", "async_llm", "llm_engine") for name in NAMES[kind]],
)
def test_every_method_of_vllm_is_there_or_refused_with_the_way_out(kind: str, name: str) -> None:
    owner = {"llm": LLM, "async_llm": AsyncLLMEngine, "llm_engine": LLMEngine}[kind]
    if name != "tokenizer" and not hasattr(owner, name):  # that one is an object's own
        with pytest.raises(NotSupportedError, match=f"^{name}: .{{8}}"):
            getattr(owner.__new__(owner), name)


def test_the_environment_is_stronger_than_vllm_s_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVECORE_SEED", "5")
    assert EngineArgs("there").settings() == {"model": "there", "seed": 5, "gpu_memory_utilization": 0.92}
    assert EngineArgs("there", seed=6).settings()["seed"] == 6
