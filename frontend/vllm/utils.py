"""vLLM's small helpers that scripts import."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import uuid
from collections.abc import Sequence
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
    """What programs ask of the machine: a GPU of NVIDIA's, or a CPU."""

    @property
    def device_type(self) -> str:
        return "cuda" if import_module("torch").cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_tpu = is_xpu = is_rocm


current_platform = Platform()
