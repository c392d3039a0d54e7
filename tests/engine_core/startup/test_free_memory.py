"""What is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from wavecore.engine_core.startup import free_memory


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
