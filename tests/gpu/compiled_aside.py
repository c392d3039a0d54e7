"""A program, not a test: what a start compiles itself, and what its helper has compiled.

Prints JSON: the files in Triton's cache when the warm-up begins, the kernels that the engine compiled itself, the files
of its idle turns, once the helper has ended, and processes left over.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import triton
from tests.support.waiting import until

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

    own: list[str] = []
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: None if cache_hit else own.append(src.name)
    runner: Any = make_runner(config, progress)
    until(lambda: not psutil.Process().children(), seconds=120)
    before = compiled()
    while runner.unmet:
        runner.meet()
    later = list((Counter(compiled()) - Counter(before)).elements())
    processes = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    json.dump({"aside": aside, "own": own, "later": later, "processes": processes}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
