"""What a device has free, and who holds the rest."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import psutil
import torch

from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.startup.memory_budget import GIB, Settings, no_room

CGROUPS = (  # versions 2 and 1: the limit, and what is used of it
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def check_weights(spec: ModelSpec, path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose weights cannot fit, before any of them is read.

    Raises:
        ConfigError: with the bytes that they take and the bytes that are free, where half of them would fit.
        ResourceError: likewise, where no setting makes room.
    """
    need = weight_bytes(spec, dtype)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else host_memory()
    if need <= free:
        return
    holders = f" (others: processes {processes(device)})" if device.type == "cuda" else ""
    ways: list[Settings] = [{"dtype": "bfloat16"}] if weight_bytes(spec, torch.bfloat16) <= free else []
    raise no_room(
        f"the weights of {path} take {gib(need)} as {str(dtype).removeprefix('torch.')}, and of {device}'s "
        f"{gib(total)} only {gib(free)} are free{holders}",
        ways,
    )


def host_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes of the host's memory that this process may still take, and all: the container's where that is less."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for limit, usage in CGROUPS:
        try:
            most, used = int((root / limit).read_text()), int((root / usage).read_text())
            counts = dict(line.split() for line in (root / limit).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such version of cgroups, or no limit
            continue
        cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))  # given back when needed
        free, total = min(free, most - used + cached), min(total, most)
    return max(free, 0), total


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in spec.shapes().values()) * dtype.itemsize


def gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"


def fitting_gib(size: int) -> float:
    """A little more than `size` bytes, in GiB with few digits."""
    scale: int = 10 ** max(3 - math.floor(math.log10(size / GIB)), 0)
    return (size * scale // GIB + 1) / scale


def processes(device: torch.device) -> str:
    """Other processes on the device and what they hold, as nvidia-smi tells, for messages only."""
    uuid = torch.cuda.get_device_properties(device).uuid  # the only name of a device that CUDA_VISIBLE_DEVICES keeps
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "(unknown)"
    return listed(done.stdout, os.getpid())


def listed(output: str, own: int) -> str:
    """nvidia-smi's lines of "pid, memory" in words, without this process; in a container its pids may be the host's."""
    holders = dict(line.split(", ", 1) for line in output.strip().splitlines() if ", " in line)
    if not holders:
        return "(none listed)"
    inside = holders.pop(str(own), None) is not None
    words = ", ".join(f"{pid} ({size})" for pid, size in holders.items()) or "(none)"
    return words if inside else f"{words}, this one among them by its pid outside of the container"
