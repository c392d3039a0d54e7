"""A scripted model with a tokenizer: prompts that start with a chosen token are answered with a chosen text or ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.tokenizers_for_tests import byte_level, write_folder

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
