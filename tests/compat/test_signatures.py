"""Classes and calls look to `inspect`, to dataclasses and to a caller by position as vLLM 0.33's do."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from wavecore.frontend.compat import FOREIGN_POOLING, engine_config
from wavecore.vllm import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from wavecore.vllm.lora.request import LoRARequest
from wavecore.vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from wavecore.vllm.v1.engine.async_llm import AsyncLLM

NAMES = json.loads(Path(__file__).with_name("vllm_names.json").read_text())
CLASSES = {"LLM": LLM, "AsyncLLM": AsyncLLM, "LLMEngine": LLMEngine}


@pytest.mark.parametrize("call", NAMES["signatures"])
def test_a_call_shows_the_parameters_of_vllm_in_their_order(call: str) -> None:
    owner, method = call.split(".")
    _, *found = inspect.signature(getattr(CLASSES[owner], method)).parameters.values()
    by_position = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in found if p.kind is p.KEYWORD_ONLY]
    assert [*by_position, *["*"] * bool(by_name), *by_name] == NAMES["signatures"][call]


@pytest.mark.parametrize("owner", [LLM, AsyncLLM, EngineArgs, AsyncEngineArgs])
def test_every_setting_is_shown(owner: type) -> None:
    shown = inspect.signature(owner).parameters
    assert set(NAMES["engine_args"]) <= shown.keys() and next(iter(shown)) == "model"
    assert shown["gpu_memory_utilization"].default == 0.92
    assert "self" in inspect.signature(owner.__init__).parameters  # type: ignore[misc]


@pytest.mark.parametrize(
    ("owner", "names"),
    [(SamplingParams, NAMES["sampling_params"]), (PoolingParams, NAMES["pooling_params"])],
)
def test_parameters_are_fields(owner: type, names: list[str]) -> None:
    assert set(names) <= inspect.signature(owner).parameters.keys()
    assert set(names) <= {field.name for field in fields(owner)}


def test_parameters_and_settings_are_values() -> None:
    for made in (SamplingParams(2, stop="a"), EngineArgs("there", max_num_seqs=3), PoolingParams(task="embed")):
        assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == replace(made) == made
        assert type(made)(**asdict(made)) == made
    assert (SamplingParams(2).n, SamplingParams().stop, SamplingParams().stop_token_ids) == (2, [], [])
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=0.5)


def test_an_engine_s_arguments_are_keywords_of_llm() -> None:
    args = EngineArgs("there", max_model_len=64, enforce_eager=True, seed=3)
    config = engine_config(asdict(args))
    assert (config.model, config.max_model_len, config.enforce_eager, config.seed) == ("there", 64, True, 3)


@pytest.mark.parametrize("name", FOREIGN_POOLING)
def test_a_pooling_parameter_is_taken_at_its_default_or_refused(name: str) -> None:
    PoolingParams(**{name: FOREIGN_POOLING[name]["default"]})
    if FOREIGN_POOLING[name].get("allowed") != "any":
        with pytest.raises(ValueError, match=f"^{name}=.*: .{{8}}"):
            PoolingParams(**{name: object()})


def test_what_is_refused_where_it_is_used_can_be_made() -> None:
    assert LoRARequest("a", 1, "there").lora_name == "a"
    assert BeamSearchParams(2, 3, watermarking=None).beam_width == 2
    choice = StructuredOutputsParams(choice=["yes", "no"])
    with pytest.raises(ValueError, match=r"^structured_outputs=StructuredOutputsParams\(.*allowed_token_ids"):
        SamplingParams(structured_outputs=choice)
