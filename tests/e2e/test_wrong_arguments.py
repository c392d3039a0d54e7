"""Every parameter of every public call, given values of every wrong kind: a typed error that names it, or a result."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_model import write_model

from wavecore import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    EngineDead,
    ProtocolError,
    RequestError,
    SamplingParams,
    ValidationError,
    WavecoreError,
    connect,
    register_op,
)
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend.client.request import embeds_frame
from wavecore.frontend.compat import engine_config
from wavecore.transport.wire.tensors import to_numpy

VALUES: dict[str, Any] = {
    "None": None,
    "text": "x",
    "empty text": "",
    "word": "high",
    "numpy text": np.str_("x"),
    "surrogate": "\ud800",
    "nul": "\x00",
    "bytes": b"x",
    "true": True,
    "numpy true": np.bool_(True),
    "whole": 5,
    "zero": 0,
    "negative": -1,
    "huge": 10**30,
    "unprintable": 10**5000,
    "minus huge": -(10**30),
    "float": 2.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 1j,
    "numpy whole": np.int64(5),
    "numpy byte": np.uint8(5),
    "numpy float": np.float32(0.5),
    "numpy nan": np.float64("nan"),
    "array": np.array([1, 2]),
    "scalar array": np.array(5),
    "matrix": np.zeros((2, 2)),
    "tensor": torch.tensor([1, 2]),
    "scalar tensor": torch.tensor(5),
    "list": [],
    "texts": ["x"],
    "surrogates": ["\ud800"],
    "numbers": [1, 2],
    "nested": [[1], [2]],
    "deep": [[[[]]]],
    "tuple": (1,),
    "set": {1, 2},
    "dict": {},
    "text dict": {"a": "b"},
    "surrogate dict": {"\ud800": "\ud800"},
    "number dict": {1: 2.0},
    "object": object(),
    "class": int,
    "function": len,
    "path": Path("/nowhere/at/all"),
}
PARAMS = SamplingParams(temperature=0, max_tokens=2)
TURN = [{"role": "user", "content": "hi"}]
# What an error may say instead of the parameter's name.
OTHER_WORDS = {
    "prompts": ("prompt",),
    "prompt_token_ids": ("prompt: a dictionary needs",),
    "prompt_embeds": ("prompt: a dictionary needs",),
    "messages": ("message",),
    "name": ("silu_mul",),
    "fn": ("silu_mul", "cannot be imported"),
    "runtime_dir": ("deployment", "key file"),
    "timeout": ("answered within",),
    "tokenizer": ("x cannot be read", "high cannot be read"),
}


def complaint(name: str, call: Callable[[], object]) -> str:
    """What is wrong with how a call answers a value of its parameter; "" where it gives a result or a good error."""
    try:
        call()
    except WavecoreError as error:
        vague = type(error) in (WavecoreError, ProtocolError, RequestError, EngineDead)
        words = (name, *OTHER_WORDS.get(name, ()), "a scripted model has no attention")  # this engine's answer
        named = any(word in str(error) for word in words)
        return f"{type(error).__name__}: {error}" if vague or not named else ""
    except OSError as error:  # a file that cannot be written is the system's error, and names the file
        return "" if name == "path" and error.filename else repr(error)
    except Exception as error:
        return repr(error)
    return ""


def complaints(function: Callable[..., object], **others: Any) -> dict[tuple[str, str], str]:
    """By parameter and kind of value; the other parameters are `others`."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    found = {
        (name, kind): complaint(name, lambda name=name, value=value: function(**{**others, name: value}))  # type: ignore[misc]
        for name in names
        for kind, value in VALUES.items()
        if not (name == "use_tqdm" and callable(value))  # a function of the user's that makes a bar
    }
    return {place: text for place, text in found.items() if text}


@pytest.mark.parametrize("function", [SamplingParams, RequestOptions, EngineConfig])
def test_values_alone(function: Callable[..., object]) -> None:
    assert complaints(function) == {}


def test_settings() -> None:
    for name in inspect.signature(EngineConfig).parameters:
        wrong = {kind: complaint(name, lambda v=value: engine_config({name: v})) for kind, value in VALUES.items()}  # type: ignore[misc] # noqa: B023
        assert not any(wrong.values()), (name, wrong)


def test_register_op(own_ops: None) -> None:
    assert complaints(register_op, name="silu_mul", fn=write_model) == {}
    with pytest.raises(ConfigError, match="name must be text and fn a function of a module, not 'silu_mul' and None"):
        register_op("silu_mul", None)  # type: ignore[arg-type]


def test_llm(llm: LLM, tmp_path: Path) -> None:
    @wraps(llm.stream)
    def stream(*args: Any, **options: Any) -> object:
        return list(llm.stream(*args, **options))

    def attach(runtime_dir: Any, timeout: Any, tokenizer: Any) -> None:
        connect(runtime_dir, timeout, tokenizer=tokenizer).shutdown()

    assert complaints(llm.generate, prompts=[[5]], sampling_params=PARAMS, use_tqdm=False) == {}
    assert complaints(llm.chat, messages=TURN, sampling_params=PARAMS, use_tqdm=False) == {}
    assert complaints(llm.embed, prompts=[[5]], use_tqdm=False) == {}
    assert complaints(stream, prompt=[5], sampling_params=PARAMS) == {}
    assert complaints(llm.visualize_attention, prompt=[5], layer=0, head=0, path=tmp_path / "x.png") == {}
    assert complaints(llm.debug_requests) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # "x" is a good name for a file
        assert complaints(llm.export_trace) == {}
        folder = llm.runtime_dir
        assert complaints(attach, runtime_dir=folder, timeout=9.0, tokenizer=None) == {}


def test_async_llm(llm: LLM, tmp_path: Path) -> None:
    """In one thread of a loop that runs beside it, so that one table serves both classes."""
    other = AsyncLLM.connect(llm.runtime_dir)
    with asyncio.Runner() as runner:

        def blocking(method: Callable[..., Any]) -> Callable[..., object]:
            async def answer(found: Any) -> object:
                return await found if inspect.isawaitable(found) else [output async for output in found]

            return wraps(method)(lambda **given: runner.run(answer(method(**given))))

        assert complaints(blocking(other.generate), prompt=[5], sampling_params=PARAMS) == {}
        assert complaints(blocking(other.chat), messages=TURN, sampling_params=PARAMS) == {}
        assert complaints(blocking(other.embed), prompt=[5]) == {}
        assert complaints(blocking(other.abort)) == {}
        looks = blocking(other.visualize_attention)
        assert complaints(looks, prompt=[5], layer=0, head=0, path=tmp_path / "x.png") == {}
    other.shutdown()


@pytest.mark.parametrize("key", ["prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "parse_special"])
def test_keys_of_a_prompt(llm: LLM, key: str) -> None:
    for kind, value in VALUES.items():
        prompt = {**({"prompt": "a"} if key in ("cache_salt", "parse_special") else {}), key: value}
        wrong = complaint(key, lambda p=prompt: llm.generate(p, PARAMS, use_tqdm=False))  # type: ignore[misc]
        assert not wrong, (kind, wrong)


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(2), top_k=np.uint8(5), seed=np.int32(3))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, max_tokens=2, top_k=5, seed=3)
    assert all(type(value) in (int, float) for value in (params.temperature, params.max_tokens, params.top_k))
    prompts: Any = np.array([5, 6], np.int64)
    [output] = llm.generate(prompts, params, use_tqdm=False, priority=np.int16(1), timeout=np.float64(60))  # type: ignore[arg-type]
    assert output.prompt_token_ids == [5, 6]
    salted: Any = {"prompt_token_ids": [5], "cache_salt": np.str_("salt")}
    assert llm.generate(salted, params, use_tqdm=False)[0].finished
    each: Any = np.array([1, 2])
    assert len(llm.generate([[5], [6]], params, use_tqdm=False, priority=each)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": "high"}, "priority: must be a whole number"),
        ({"priority": [1, "high"]}, "priority: must be a whole number"),
        ({"priority": [1]}, "priority: 1 given for 2 prompts"),
        ({"priority": [[1], [2, 3]]}, r"priority: must be a whole number .*, not \[1\]"),  # numpy makes no array of it
        ({"sampling_params": {"n": 2}}, "sampling_params: must be SamplingParams, not dict"),
        ({"sampling_params": [PARAMS, None, PARAMS]}, "sampling_params: 3 given for 2 prompts"),
        ({"resume": 1}, "resume: must be true or false"),
    ],
)
def test_one_value_where_a_list_may_be(llm: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        llm.generate([[5], [6]], **{"sampling_params": PARAMS, "use_tqdm": False, **options})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lone_surrogates_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}: each entry must be text without lone surrogates"):
        SamplingParams(**{name: ["fine", "\ud800"]})  # type: ignore[arg-type]


def test_best_of() -> None:
    assert SamplingParams(best_of=1) == SamplingParams()
    assert SamplingParams(n=3, best_of=3).clone(n=2).n == 2
    with pytest.raises(ValidationError, match="best_of: must be n, 1, not 4; ask for that many as n"):
        SamplingParams(best_of=4)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_prompt_embeds_of_any_floats(llm: LLM, dtype: Any) -> None:
    size = int(llm._service.resolved["hidden_size"])
    embeds = np.full((3, size), 0.1, dtype)
    frame = embeds_frame(embeds, size)
    assert np.array_equal(to_numpy(frame), embeds.astype(np.float32))
    for wrong, words in (
        (np.full((3, size), 1e300), "not finite as float32"),
        (np.zeros((3, size + 1)), rf"must have the shape \[n, {size}\], not \[3, {size + 1}\]"),
        (np.zeros((3, size), int), "must be floats, not int64; convert them"),
        ([[0.5], [0.5, 0.5]], "must be an array"),
    ):
        with pytest.raises(ValidationError, match=f"prompt_embeds: .*{words}"):
            embeds_frame(wrong, size)
