"""vLLM's small helpers that scripts import."""

import gc
import logging
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from importlib import import_module

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
