"""Seconds of each phase of an engine's start, with empty compile caches and then with what the first start left.

    python scripts/bench_start.py FOLDER ... [--repeats 1] [--settings JSON]

`make_checkpoint.py` makes the folders. "ready" is from the call of LLM() until it returns, "first token" from there to
the answer of a request of 128 tokens. A phase that alternates with another, as "compile" does with "warm_up", is the
sum of its parts; in a group of ranks the phases are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_gpu import SETTINGS

from wavecore import LLM, SamplingParams
from wavecore.transport.processes import deployment

COLUMNS = ("model", "caches", "ready", "first token", "phases")
VARIABLE = "TRITON_CACHE_DIR"


def start(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Start an engine and ask it for a token: the cells from "ready" on."""
    begin = time.perf_counter()
    with LLM(str(folder), **settings) as llm:
        ready = time.perf_counter()
        llm.generate([[5] * 128], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        answered = time.perf_counter()
        seconds = deployment.read(llm.runtime_dir).engines[0].ranks[0].seconds
    phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    return [f"{ready - begin:.2f}", f"{answered - ready:.2f}", phases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the engine beside bench_gpu's")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|---:|---:|---|")
    for folder in args.folders * args.repeats:
        with tempfile.TemporaryDirectory(prefix="bench-caches-") as caches:
            os.environ[VARIABLE] = caches
            for state in ("empty", "filled"):
                cells = [folder.name, state, *start(folder, {**SETTINGS, **args.settings})]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
