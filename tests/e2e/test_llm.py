"""LLM on an engine process: what a newcomer from vLLM does on the first day."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import HELLO
from tests.support.scripted_model import ids_of, write_model

from wavecore import (
    LLM,
    ConfigError,
    ModelError,
    NotSupportedError,
    RequestOutput,
    SamplingParams,
    ValidationError,
    connect,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def test_every_form_of_prompt(llm: LLM) -> None:
    prompts: list[Any] = ["The capital", {"prompt": "of France"}, {"prompt_token_ids": [HELLO]}, [HELLO, 7]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["The capital", "of France", None, None]
    assert [o.prompt_token_ids for o in outputs][2:] == [[HELLO], [HELLO, 7]]
    assert all(o.finished for o in outputs)
    assert outputs[2].outputs[0].text == "Hello world"
    assert outputs[2].outputs[0].finish_reason == "stop"
    assert outputs[2].outputs[0].stop_reason is None
    assert outputs[0].outputs[0].finish_reason == "length"
    assert len(outputs[0].outputs[0].token_ids) == 16


def test_results_keep_their_order_and_repeat(llm: LLM) -> None:
    prompts = [[10 + i, 11, 12 + i] for i in range(40)]  # more than the engine's queue takes at once
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in prompts[::13]]
    assert [o.prompt_token_ids for o in first] == prompts
    assert [o.outputs[0].token_ids for o in first[::13]] == [o.outputs[0].token_ids for o in alone]


def test_one_params_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate([[5]] * 3, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(ValidationError, match="2 given for 3 prompts"):
        llm.generate([[5]] * 3, params[:2], use_tqdm=False)


def test_stream_gives_deltas(llm: LLM) -> None:
    deltas = list(llm.stream({"prompt_token_ids": [HELLO]}, GREEDY))
    assert "".join(d.outputs[0].text for d in deltas) == "Hello world"
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    [whole] = llm.generate([HELLO], GREEDY, use_tqdm=False)
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.outputs[0].token_ids


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    for _ in llm.stream([9, 9], SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert llm._service.client.num_live == 0


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(messages, GREEDY, use_tqdm=False)
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "x"}]], GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == two[0].outputs[0].token_ids
    assert one.prompt_token_ids == llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_seeds_are_reported_and_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    [first] = llm.generate([7, 8], params, use_tqdm=False)
    seed = first.outputs[0].seed
    assert isinstance(seed, int)
    assert first.num_cached_tokens is not None


def test_metrics(llm: LLM) -> None:
    [output] = llm.generate([4, 4], GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics.num_generation_tokens == 16
    assert metrics.first_token_latency is not None
    assert metrics.last_token_latency is not None
    assert 0 < metrics.first_token_latency <= metrics.last_token_latency


def test_progress_bar(llm: LLM) -> None:
    class Bar:
        steps = closed = 0

        def __init__(self, **options: Any) -> None:
            self.format_dict = {"elapsed": 1.0}
            assert options["total"] == 3

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert "tok/s" in text

        def update(self, count: int) -> None:
            Bar.steps += count

        def close(self) -> None:
            Bar.closed += 1

    llm.generate([[5], [6], [7]], GREEDY, use_tqdm=Bar)
    assert (Bar.steps, Bar.closed) == (3, 1)


def test_a_second_client_in_the_same_process(llm: LLM) -> None:
    with connect(llm.runtime_dir) as other:
        a = other.generate([HELLO], GREEDY, use_tqdm=False)
        assert a[0].outputs[0].text == "Hello world"
    assert llm.generate([HELLO], GREEDY, use_tqdm=False)[0].outputs[0].text == "Hello world"


def test_clients_in_other_processes(llm: LLM) -> None:
    code = (
        "import sys; from wavecore import connect, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=16)\n"
        f"out = connect(sys.argv[1]).generate([[{HELLO}]], params, use_tqdm=False)\n"
        "print(out[0].outputs[0].text)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(llm.runtime_dir)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=60)[0].strip() for run in runs] == ["Hello world"] * 2
    assert [run.returncode for run in runs] == [0, 0]


def test_cache_and_debug_calls(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [3] * 64
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.debug_requests() == []
    assert llm.step_stats()[0]["steps"] > 0
    llm.print_memory_stats()
    assert "MiB" in capsys.readouterr().out
    llm.check_health()


def test_what_debug_requests_and_step_stats_say_is_documented(llm: LLM) -> None:
    stream = llm.stream(list(range(5, 20)), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    [row] = llm.debug_sequence_states()
    stream.close()
    assert len(row["last_token_ids"]) == 10
    for documented, found in ((LLM.debug_requests, row), (LLM.step_stats, llm.step_stats()[0])):
        words = set(re.findall(r"\w+", inspect.getdoc(documented) or ""))
        assert {name for name in found if not name.endswith("_share")} <= words


def test_a_chrome_trace(llm: LLM, tmp_path: Path) -> None:
    llm.generate([5, 6], GREEDY, use_tqdm=False)
    found = llm.export_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == found
    phases = {event["name"] for event in found["traceEvents"] if event["ph"] == "X"}
    assert phases == {"schedule", "launch", "wait", "update"}
    assert {event["pid"] for event in found["traceEvents"]} == {0}


def test_embed(llm: LLM) -> None:
    outputs = llm.embed([[5, 6], [7]], use_tqdm=False)
    for output in outputs:
        assert output.outputs.embedding.dtype == np.float32
        assert output.outputs.embedding.shape == (8,)
    assert np.array_equal(llm.embed([5, 6], use_tqdm=False)[0].outputs.embedding, outputs[0].outputs.embedding)
    with pytest.raises(ValidationError, match="pooling"):
        llm.embed([5], pooling="max")


def test_without_tokenizer(hello_model: dict[str, str]) -> None:
    with LLM(hello_model["model"], skip_tokenizer_init=True) as llm:
        [output] = llm.generate({"prompt_token_ids": [HELLO]}, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids[:-1] == ids_of("Hello world")
        assert output.outputs[0].text == ""
        with pytest.raises(NotSupportedError, match="prompt_token_ids"):
            llm.generate("text")
        with pytest.raises(NotSupportedError, match="stop"):
            llm.generate([HELLO], SamplingParams(stop="x"))


def test_shutdown_is_final(hello_model: dict[str, str]) -> None:
    llm = LLM(**hello_model)
    runtime_dir = llm.runtime_dir
    llm.shutdown()
    llm.shutdown()
    assert not runtime_dir.exists()
    with pytest.raises(Exception, match="closed"):
        llm.generate([HELLO], use_tqdm=False)


def test_plain_script_without_main_guard(hello_model: dict[str, str], tmp_path: Path) -> None:
    """Also: the script just ends, without shutdown."""
    script = tmp_path / "script.py"
    script.write_text(
        "from wavecore import LLM, SamplingParams\n"
        f"llm = LLM(**{hello_model!r})\n"
        f"print(llm.generate([[{HELLO}]], SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text)\n"
        "print(llm.runtime_dir)\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    text, runtime_dir = run.stdout.splitlines()
    assert text == "Hello world"
    assert not Path(runtime_dir).exists()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"max_model_lenn": 5}, ConfigError, "did you mean max_model_len"),
        ({"enable_lora": True}, NotSupportedError, "merge the adapter"),
        ({"quantization": "awq"}, NotSupportedError, "GGUF"),
        ({"enable_lora": True}, NotSupportedError, "merge the adapter"),
        ({"max_num_seqs": "8"}, ConfigError, "max_num_seqs must be a whole number"),
        ({"max_num_seqs": 1.5}, ConfigError, "max_num_seqs"),
        ({"max_model_len": 10**12}, ConfigError, "max_model_len must be a whole number from 1 to 16777216"),
        ({"disable_tqdm": "yes"}, ConfigError, "disable_tqdm must be true or false"),
        ({"dtype": "int3"}, ConfigError, "dtype must be one of auto"),
        ({"gpu_memory_utilization": float("nan")}, ConfigError, "gpu_memory_utilization"),
        ({"tokenizer": "/nowhere"}, ModelError, "nowhere"),
    ],
)
def test_settings_are_refused_before_an_engine_starts(
    hello_model: dict[str, str], settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LLM(**{**hello_model, **settings})


def test_names_of_vllm(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="beam_search"):
        llm.beam_search(["a"])
    with pytest.raises(NotSupportedError, match="lora_request"):
        llm.generate([5], lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute"):
        llm.no_such_thing  # noqa: B018
    assert isinstance(llm.generate([5], use_tqdm=False)[0], RequestOutput)
    assert llm.get_default_sampling_params() == SamplingParams()


def test_failed_start_tells_the_cause(tmp_path: Path) -> None:
    files = write_model(tmp_path, faults={"load_error": "the weights are cursed"})
    with pytest.raises(ModelError, match="cursed"):
        LLM(**files)


def test_recommended_sampling(tmp_path: Path) -> None:
    files = write_model(tmp_path, tokenizer=str(tmp_path / "tokenizer"))
    recommended = tmp_path / "tokenizer" / "generation_config.json"
    recommended.write_text('{"temperature": 0.6, "top_p": 0.9}')
    with LLM(files["model"]) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.6, top_p=0.9)
        longer = params.clone(max_tokens=3, ignore_eos=True)
        assert len(llm.generate([5], longer, use_tqdm=False)[0].outputs[0].token_ids) == 3
        assert llm.get_default_sampling_params().max_tokens == 16
    recommended.write_text('{"top_k": 50.5}')
    with LLM(files["model"]) as llm, pytest.raises(ModelError, match=r"generation_config\.json: top_k"):
        llm.generate([5], use_tqdm=False)
