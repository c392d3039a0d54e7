"""Tiny random checkpoints, written by transformers itself, and its logits as the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCAB = 211
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def make_config(family: str, **changes: Any) -> PretrainedConfig:
    """`family` is the transformers prefix: Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3Text, Phi3."""
    kind = getattr(transformers, f"{family}Config")
    config: PretrainedConfig = kind(**{**BASE, **changes})
    return config


def save_model(folder: Path, config: PretrainedConfig, *, seed: int = 0, scale: float = 0.3, **save: Any) -> Path:
    """A random model of this config; weights wide enough that tokens differ, norms and biases not trivial."""
    torch.manual_seed(seed)
    name = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, scale)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    model.save_pretrained(folder, **save)
    return folder


def prompts(count: int, longest: int = 60, *, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Random token ids of prompts of 1 to `longest` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], label: str = "") -> None:
    """`ours` are the reference's greedy tokens, or the first difference is its second choice, within 1e-4 of the first.

    One forward pass over prompt and output: up to the first difference both have seen the same tokens.
    """
    ids = torch.tensor([[*prompt, *ours]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2)
    for i, token in enumerate(ours):
        first, second = best.indices[i].tolist()
        if token != first:
            gap = float(best.values[i, 0] - best.values[i, 1])
            said = f"{label}: token {i} is {token}, the reference's best are {first} and {second}, {gap} apart"
            assert token == second and gap < 1e-4, said
            return
