"""A program, not a test: `kernel_compiler` for Hopper on a machine without a GPU, and without machine code.

Standard input is the settings, with dtype and block_size; the length is the model's. As `start_for_hopper` it sums over
two ranks, which share nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tests.kernels.compile_only import no_machine_code

from wavecore.engine_core.startup import kernel_compiler
from wavecore.kernels.device import STANDS_FOR

if __name__ == "__main__":
    no_machine_code()
    STANDS_FOR["capability"] = 90
    stand_ins = {
        "find_device": lambda _: torch.device("cpu"),
        "CudaDriver": lambda: SimpleNamespace(launcher_cls=lambda *_: None),
        "ALONE": kernel_compiler.AllRanks(2),
    }
    vars(kernel_compiler).update(stand_ins)
    assert not kernel_compiler.main(), "a fork failed"
    assert isinstance(sys.modules["torch._dynamo"], SimpleNamespace), "torch's compiler was imported"
    real = [name for name in kernel_compiler.LATE if not isinstance(sys.modules[name], kernel_compiler.Late)]
    assert not real, "something was asked of these modules that nobody knows"
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process that forks has threads"
