"""A program, not a test: what a start compiles itself, and what its helper has compiled.

Prints JSON: the files in Triton's cache when the warm-up begins, those that came later, and processes left over.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.startup.factory import make_runner

KINDS = (".cubin", ".so")


def compiled() -> list[str]:
    return [path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*") if path.suffix in KINDS]


def main(folder: str) -> None:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "num_gpu_blocks_override": 1000}
    config = EngineConfig(model=folder, device="cuda", dtype="bfloat16", **limits)
    aside: list[str] = []

    def progress(phase: str, _fraction: float) -> None:
        if phase == "warm_up" and not aside:
            aside.extend(compiled())

    make_runner(config, progress)
    later = compiled()
    for name in aside:
        later.remove(name)
    processes = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    json.dump({"aside": aside, "later": later, "processes": processes}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
