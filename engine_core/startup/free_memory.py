"""What a device has free, and who holds the rest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import torch

CGROUPS = (  # versions 2 and 1: the limit, and what is used of it
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device that this process may still take, and all."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else host_memory()


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
    """nvidia-smi's lines of "pid, memory" without this process; in a container its pids may be the host's."""
    holders = dict(line.split(", ", 1) for line in output.strip().splitlines() if ", " in line)
    if not holders:
        return "(none listed)"
    inside = holders.pop(str(own), None) is not None
    others = ", ".join(f"{pid} ({size})" for pid, size in holders.items()) or "(none)"
    return others if inside else f"{others}, this one among them by its pid outside of the container"
