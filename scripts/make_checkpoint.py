"""Write a checkpoint of random weights in the shape of a real model, for measuring. No tokenizer, no download.

    python scripts/make_checkpoint.py llama-3.1-8b /dev/shm/llama-3.1-8b

Matrices are N(0, 0.02), norms 1: activations then have the size that trained models have, and so do the clocks of the
card, which depend on the numbers that it multiplies. A tensor's values depend on the seed, its name, its shape and the
kind of device that draws them. Several files are written at once, one tensor after the other, so that memory holds
a few tensors and not the model. llama-3.1-8b takes 16 GB; a folder in memory (/dev/shm) makes loading fast.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.weights import parts_of

Shapes = Mapping[str, tuple[int, ...]]
SHARD_BYTES = 1 << 30
STD = 0.02
DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16"), "float32": (torch.float32, "F32")}

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_009,
    },
    "tiny": {  # for trying the scripts on a CPU
        **_QWEN3,
        "vocab_size": 10_240,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    },
}


def make(name: str, out: Path, dtype: str = "bfloat16", seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json, the safetensors files and their index; returns the bytes of all tensors.

    Args:
        name: one of CONFIGS.
        out: folder, made where it is missing.
        dtype: one of DTYPES.
        shard_bytes: a file grows to this size, or holds one tensor that is larger.
    """
    config = {**CONFIGS[name], "torch_dtype": dtype}
    spec = from_config(config, out / "config.json")
    shapes = {tensor: part.shape for tensor, part in parts_of(spec, "hf").items()}
    size = DTYPES[dtype][0].itemsize
    parts = shards(shapes, size, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file, part: write(out / file, part, dtype, seed), files, parts))
    total = size * sum(math.prod(shape) for shape in shapes.values())
    places = {tensor: file for file, part in zip(files, parts, strict=True) for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return total


def shards(shapes: Shapes, itemsize: int, most: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, cut into files of at most `most` bytes."""
    parts: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = itemsize * math.prod(shape)
        if not parts or size > room:
            parts.append({})
            room = most
        parts[-1][name] = shape
        room -= size
    return parts


def write(path: Path, shapes: Shapes, dtype: str, seed: int) -> None:
    """One safetensors file: the header's length (8 bytes, little-endian), the header as JSON, the tensors."""
    kind, name = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, shape in shapes.items():
        begin, end = end, end + kind.itemsize * math.prod(shape)
        header[tensor] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, shape in shapes.items():
            values = draw(tensor, shape, kind, seed).flatten().view(torch.uint8).cpu()
            file.write(values.numpy().data)


def draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """On a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.empty(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return values.fill_(1.0)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed))
    return values.normal_(0.0, STD, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    size = make(args.shape, args.folder, args.dtype, args.seed)
    print(f"{args.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
