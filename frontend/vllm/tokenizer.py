"""vLLM's functions around tokenizers, which give transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,  # a permission: no code of a model is run
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """The tokenizer of a model's folder or hub id as transformers has it, for text outside of an engine.

    Args:
        *args, **kwargs: go to `transformers.AutoTokenizer.from_pretrained`.
    """
    from transformers import AutoTokenizer  # loads torch

    del trust_remote_code
    kwargs.setdefault("use_fast", tokenizer_mode != "slow")
    return AutoTokenizer.from_pretrained(
        str(tokenizer_name),
        *args,
        trust_remote_code=False,
        revision=revision or "main",
        cache_dir=download_dir,
        **kwargs,
    )


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, **_: Any) -> str | None:
    """The template that a chat with these tools goes through: the given one, else the tokenizer's."""
    if chat_template is not None:
        return chat_template
    choose = getattr(tokenizer, "get_chat_template", None)
    try:
        return None if choose is None else choose(chat_template, tools=tools)
    except ValueError:  # it has none
        return None
