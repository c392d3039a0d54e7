"""vLLM's functions around tokenizers, which give transformers' own."""

from importlib import import_module
from pathlib import Path
from typing import Any


def get_tokenizer(tokenizer_name: str | Path, *args: Any, **kwargs: Any) -> Any:
    """The tokenizer of a model's folder or hub id as transformers has it, for text outside of an engine.

    Args:
        **kwargs: vLLM's tokenizer_mode, revision, download_dir, and trust_remote_code, though no code of a model is
            run; others go to `transformers.AutoTokenizer.from_pretrained`.
    """
    given = {name: value for name, value in kwargs.items() if value is not None and name != "trust_remote_code"}
    given |= {"use_fast": given.pop("tokenizer_mode", "auto") != "slow", "cache_dir": given.pop("download_dir", None)}
    make = import_module("transformers").AutoTokenizer.from_pretrained  # loads torch
    return make(str(tokenizer_name), *args, trust_remote_code=False, **given)


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, **_: Any) -> str | None:
    """The template that a chat with these tools goes through: the given one, else the tokenizer's if it has one."""
    if chat_template is not None or not getattr(tokenizer, "chat_template", None):
        return chat_template
    found: str | None = tokenizer.get_chat_template(chat_template, tools=tools)
    return found
