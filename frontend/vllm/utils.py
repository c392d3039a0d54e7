"""vLLM's small helpers that scripts import."""

import gc
import logging
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

init_logger = logging.getLogger


def random_uuid() -> str:
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Of a program that dropped its `LLM`: the engine ends with it."""
    del shutdown_ray
    gc.collect()


def get_open_port() -> int:
    """A TCP port that is free in this moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """The first four numbers, and how many there are."""
    more = ", ..." if len(embeds) > 4 else ""
    sys.stdout.write(f"{prefix}: [{', '.join(map(str, embeds[:4]))}{more}] (size={len(embeds)})\n")


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


class Platform:
    """What programs ask of the machine: its `device_type`, "cuda" or "cpu"; is_cuda(), is_rocm() and the like."""

    @property
    def device_type(self) -> str:
        return "cuda" if import_module("torch").cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda: self.device_type == name[3:].removesuffix("_alike")


current_platform = Platform()
