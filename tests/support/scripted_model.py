"""A scripted model with a tokenizer: prompts that start with a chosen token are answered with a chosen text or ids.

All others are answered by a rule, which `scripted_output` follows without blocks, slots or steps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.tokenizers_for_tests import byte_level, write_folder

from wavecore.transport.wire.messages import FinishReason

VOCAB = 512
EOS = 2  # <|im_end|>


def ids_of(*texts: str) -> list[int]:
    """Token ids of texts that are encoded apart, so that a stop string can cross their borders."""
    return [i for text in texts for i in byte_level().encode(text).ids]


def write_model(folder: Path, scripts: Mapping[int, Sequence[int]] | None = None, **options: Any) -> dict[str, str]:
    """Write the files; returns `LLM`'s arguments."""
    write_folder(folder / "tokenizer")
    values = {
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "max_model_len": 256,
        "scripts": {str(first): list(ids) for first, ids in (scripts or {}).items()},
        **options,
    }
    (folder / "script.json").write_text(json.dumps(values))
    return {"model": f"scripted:{folder / 'script.json'}", "tokenizer": str(folder / "tokenizer")}


def scripted_output(
    prompt: Sequence[int],
    *,
    limit: int = 1 << 20,
    vocab_size: int = VOCAB,
    eos: Sequence[int] = (),
    choice: int = 0,
    max_tokens: int = 16,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int | None = None,
    **_: Any,
) -> tuple[list[int], FinishReason]:
    """The tokens that a request must give if nobody disturbs it, and its end; see scripts/scripted_runner.py.

    Args:
        limit: tokens of prompt and output together.
    """
    sums, value = bytearray(), 0
    for token in prompt:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        sums += value.to_bytes(4, "little")
    output: list[int] = []
    stops = {*stop_token_ids, *(() if ignore_eos else eos)}
    while len(output) < max_tokens and (length := len(sums) // 4) < limit:
        key = 0 if temperature == 0 else zlib.crc32(f"{seed} {choice} {length}".encode())
        token = zlib.crc32(sums, key) % vocab_size
        output.append(token)
        if token in stops and len(output) > min_tokens:
            return output, FinishReason.STOP
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        sums += value.to_bytes(4, "little")
    return output, FinishReason.LENGTH
