"""What is free, and who holds the rest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wavecore.engine_core.startup import free_memory


@pytest.mark.parametrize(
    ("output", "others"),
    [
        ("7, 600 MiB\n12, 70000 MiB\n", "12 (70000 MiB)"),
        ("7, 600 MiB\n", "(none)"),
        ("", "(none listed)"),
        ("No running processes found\n", "(none listed)"),
        ("31, [N/A]\n7, [N/A]\n32, 5 MiB", "31 ([N/A]), 32 (5 MiB)"),
        ("99, 5 MiB\n", "99 (5 MiB), this one among them by its pid outside of the container"),
    ],
)
def test_other_processes_are_listed(output: str, others: str) -> None:
    assert free_memory.listed(output, own=7) == others


def test_only_the_engines_own_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID: numbers of devices are the driver's, not those that CUDA_VISIBLE_DEVICES leaves."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        if len(asked) > 1:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout=f"{os.getpid()}, 600 MiB\n12, 70000 MiB\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="4a-b1"))
    monkeypatch.setattr(subprocess, "run", run)
    assert free_memory.processes(torch.device("cuda:0")) == "12 (70000 MiB)"
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-4a-b1"]
    assert free_memory.processes(torch.device("cuda:0")) == "(unknown)"


@pytest.mark.parametrize(("folder", "names"), [(".", free_memory.CGROUPS[0]), ("memory", free_memory.CGROUPS[1])])
def test_a_container_limits_the_hosts_memory(tmp_path: Path, folder: str, names: tuple[str, str]) -> None:
    free, total = free_memory.host_memory(tmp_path)
    assert 0 < free < total
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in zip(names, ("5000000\n", "3000000\n"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / folder / "memory.stat").write_text("anon 2000000\nactive_file 300000\ninactive_file 700000\n")
    assert free_memory.host_memory(tmp_path) == (3_000_000, 5_000_000)
    (tmp_path / names[0]).write_text("max\n")
    assert free_memory.host_memory(tmp_path)[1] == total
