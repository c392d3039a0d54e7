"""CPU time of all processes of an idle deployment, with a client attached, as a part of one core.

python scripts/bench_idle.py [-dp 2] [-tp 1] [--launcher wavecore] [--model scripted:] [--seconds 20]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import get_args

import psutil

from wavecore import connect
from wavecore.frontend.fixtures import Launcher, deployment

SETTLE_SECONDS = 3.0  # after the start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-dp", type=int, default=2, help="engines")
    parser.add_argument("-tp", type=int, default=1, help="ranks of an engine")
    parser.add_argument(
        "--launcher", choices=[name for name in get_args(Launcher) if name != "python"], default="wavecore"
    )
    parser.add_argument("--model", default="scripted:")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where an engine finds the scripted runner
    sizes = {"data_parallel_size": given.dp, "tensor_parallel_size": given.tp}
    with deployment(given.launcher, given.model, skip_tokenizer_init=True, **sizes) as (runtime_dir, launcher):
        assert launcher is not None
        with connect(runtime_dir):
            time.sleep(SETTLE_SECONDS)
            root = psutil.Process(launcher.pid)
            processes = [psutil.Process(), root, *root.children(recursive=True)]
            before = [cpu_seconds(process) for process in processes]
            time.sleep(given.seconds)
            used = [cpu_seconds(process) - start for process, start in zip(processes, before, strict=True)]
            names = ["a client", "launcher", *(" ".join(p.cmdline()).strip() for p in processes[2:])]
    for name, seconds in zip(names, used, strict=True):
        print(f"{name:<40.40} {seconds / given.seconds:7.2%}")
    print(f"{'all together':<40} {sum(used) / given.seconds:7.2%} of a core, over {given.seconds:g} s")


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all its threads."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
