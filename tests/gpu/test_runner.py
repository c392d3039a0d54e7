"""The runner on CUDA: every family equal to transformers, every sampling option equal to the CPU's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.checkpoints import assert_greedy, load_reference, make_config, save_model
from tests.models.driver import Driver, Sequence_, load
from tests.models.test_equality_families import CASES, make, prompts

from wavecore.engine_core.model_files import resolve_model
from wavecore.engine_core.sampling_params import SamplingParams

LLAMA_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "head_dim 96": {"head_dim": 96},
    "head_dim 128, group 8": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim 256": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def check_greedy(folder: Path, label: str, **settings: Any) -> None:
    """Whole prompts, chunked prompts and a prefix hit, as on a CPU."""
    model = load_reference(folder)
    asked = prompts(12)
    driver = Driver(load(folder, device="cuda", dtype="float32", block_size=16, **settings))
    whole = driver.run([driver.add(p, 24, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, whole, strict=True):
        assert_greedy(model, prompt, ours, label)
    chunked = driver.run([driver.add(p, 24, 31 - i) for i, p in enumerate(asked)], chunk=7)
    for prompt, ours in zip(asked, chunked, strict=True):
        assert_greedy(model, prompt, ours, f"{label}, in chunks")
    first = driver.add(asked[0] * 2, 4, 0)
    driver.run([first])
    shared = driver.add(first.tokens, 12, 1)
    hits = (len(first.tokens) - 1) // 16
    shared.blocks, shared.computed = first.blocks[:hits], hits * 16
    assert_greedy(model, first.tokens, driver.run([shared])[0], f"{label}, prefix hit")


@pytest.mark.parametrize("case", CASES)
def test_families_equal_to_transformers(tmp_path: Path, case: str) -> None:
    check_greedy(make(tmp_path / "model", case), case)


@pytest.mark.parametrize("shape", LLAMA_SHAPES)
def test_shapes_equal_to_transformers(tmp_path: Path, shape: str) -> None:
    check_greedy(save_model(tmp_path / "model", make_config("Llama", **LLAMA_SHAPES[shape])), shape)


def test_memory_is_measured_when_no_number_of_blocks_is_given(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner = load(
        folder,
        device="cuda:0",
        dtype="bfloat16",
        block_size=16,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=0.5,
    )
    rows = 32 * -(-256 // 16) + 1  # all slots full, and the null block
    assert runner.info.num_blocks == rows
    assert runner.info.device == "cuda:0" and runner.info.dtype == "bfloat16"


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {3: 10.0, 5: -100.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 90]},
    {"temperature": 0.0, "bad_words_token_ids": [[7], [1, 2]]},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": [1, 2, 3]},
    {"temperature": 1.0, "logprobs": 4},
    {"temperature": 0.0, "prompt_logprobs": 2},
]


def sampled(folder: Path, device: str) -> list[Sequence_]:
    driver = Driver(load(folder, device=device, dtype="float32", block_size=16))
    asked = prompts(len(OPTIONS))
    sequences = [
        driver.add(prompt, 16, i, SamplingParams(seed=11 * i, max_tokens=16, **options))
        for i, (prompt, options) in enumerate(zip(asked, OPTIONS, strict=True))
    ]
    driver.run(sequences, chunk=16)
    return sequences


def test_sampling_options_draw_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """The same noise on the same logits up to rounding, so the same tokens but for near ties."""
    folder = save_model(tmp_path / "model", make_config("Llama"), scale=0.1)
    on_cpu, on_gpu = sampled(folder, "cpu"), sampled(folder, "cuda")
    differing = [
        options for options, want, got in zip(OPTIONS, on_cpu, on_gpu, strict=True) if want.output != got.output
    ]
    assert len(differing) <= 1, differing
    for want, got in zip(on_cpu, on_gpu, strict=True):
        for left, right in zip(want.prompt_logprobs, got.prompt_logprobs, strict=True):
            assert (left.token_ids == right.token_ids).all()
            torch.testing.assert_close(
                torch.from_numpy(right.logprobs), torch.from_numpy(left.logprobs), atol=1e-3, rtol=0
            )


def test_two_launches_in_flight(tmp_path: Path) -> None:
    """Launching a decode step before the last one's tokens have been read gives the same tokens."""
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner = load(folder, device="cuda", dtype="float32", block_size=16)
    asked = prompts(6)
    driver = Driver(runner)
    want = driver.run([driver.add(p, 12, i) for i, p in enumerate(asked)])

    plans = []
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign, func-returns-value]
    driver.run([driver.add(p, 12, i) for i, p in enumerate(asked)])
    runner.launch = launch  # type: ignore[method-assign]
    runner.pages.zero_()  # type: ignore[attr-defined]
    pending, tokens = [], []
    for plan in plans:
        pending.append(launch(plan))
        if len(pending) == 2:
            tokens.append(pending.pop(0).wait().tokens)
    tokens += [step.wait().tokens for step in pending]
    got = [[int(step[i]) for step in tokens] for i in range(len(asked))]
    assert got == want


def test_smollm2_answers_as_on_the_cpu() -> None:
    try:
        path = resolve_model("default")
    except Exception as error:
        pytest.skip(f"the default model is not here: {error}")
    folder, name = Path(path).parent, Path(path).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    questions = ("What is the capital of France?", "Why is the sky blue?", "Who wrote Hamlet?")
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for q in questions
    ]
    outputs = []
    for device in ("cpu", "cuda"):
        driver = Driver(load(path, device=device, dtype="float32", block_size=16, num_gpu_blocks_override=200))
        outputs.append(driver.run([driver.add(p, 32, i) for i, p in enumerate(asked)]))
    assert outputs[0] == outputs[1]
    assert "Paris" in tokenizer.decode(outputs[1][0])
