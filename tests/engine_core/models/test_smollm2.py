"""The default model, real and from the cache: equal to transformers' load of the same GGUF file, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.checkpoints import assert_greedy
from tests.support.model_engine import ModelEngine
from transformers import PreTrainedModel

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.models.files import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "List three colours.",
    "Why is the sky blue?",
    "Who wrote Hamlet?",
    "Explain what a prime number is.",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("default")


def prompts_of(path: Path) -> tuple[Any, list[list[int]]]:
    """The tokenizer, and the questions through the chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return tokenizer, [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]


def reference(path: Path, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation=attention
    ).eval()


def test_ten_prompts_equal_to_transformers(path: Path) -> None:
    tokenizer, prompts = prompts_of(path)
    engine = ModelEngine(path, block_size=16, num_gpu_blocks_override=200, max_num_batched_tokens=64)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert "Paris" in tokenizer.decode(outputs[0])
    model = reference(path, torch.float32)
    for question, prompt, ours in zip(QUESTIONS, prompts, outputs, strict=True):
        assert len(ours) == 48
        assert_greedy(model, prompt, ours, question)


@torch.inference_mode()
def test_bfloat16_agrees_as_well_as_two_attentions_of_transformers(path: Path) -> None:
    """Teacher-forced on float32's answers: argmax agreement at least that of sdpa with eager, minus one point."""
    _, prompts = prompts_of(path)
    writer = ModelEngine(path, block_size=16, num_gpu_blocks_override=200)
    answers = writer.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    sdpa, eager = (
        [model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1].argmax(-1).numpy() for text in texts]
        for model in (reference(path, torch.bfloat16, kind) for kind in ("sdpa", "eager"))
    )
    engine = ModelEngine(path, dtype="bfloat16", block_size=16, num_gpu_blocks_override=200, max_num_batched_tokens=100)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, prompt_logprobs=1)
    handles = [engine.add(text, params) for text in texts]
    outputs = engine.run()
    ours = [np.concatenate([ids[:, 1] for ids, _, _ in outputs[handle].prompt_logprobs]) for handle in handles]
    theirs, between = (float(np.mean(np.concatenate(a) == np.concatenate(b))) for a, b in ((ours, sdpa), (eager, sdpa)))
    assert theirs >= between - 0.01, (theirs, between)
