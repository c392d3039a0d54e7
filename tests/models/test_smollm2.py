"""The default model, real and from the cache: equal to transformers' load of the same GGUF file, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.models.checkpoints import assert_greedy
from tests.models.engine import Engine

from wavecore.engine_core.model_files import resolve_model
from wavecore.engine_core.sampling_params import SamplingParams

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


@pytest.mark.slow
def test_ten_prompts_equal_to_transformers() -> None:
    path = resolve_model("default")
    folder, name = Path(path).parent, Path(path).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    engine = Engine(path, block_size=16, num_gpu_blocks_override=200, max_num_batched_tokens=64)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert "Paris" in tokenizer.decode(outputs[0])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    for question, prompt, ours in zip(QUESTIONS, prompts, outputs, strict=True):
        assert len(ours) == 48
        assert_greedy(reference, prompt, ours, question)
