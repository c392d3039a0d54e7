"""What a device has free: a GPU, or the host within the limits of a container."""

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
