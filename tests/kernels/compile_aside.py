"""A program, not a test: `kernel_compiler` for Hopper on a machine without a GPU, and without machine code.

Standard input is the settings, with dtype and block_size; the length is the model's. As `start_for_hopper` it sums over
two ranks, which share nothing else.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from tests.kernels.compile_only import no_machine_code

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.models.files import open_model
from wavecore.engine_core.startup.kernel_compiler import AllRanks, Forks, compile_kernels, without_memory
from wavecore.kernels.device import STANDS_FOR

if __name__ == "__main__":
    no_machine_code()
    STANDS_FOR["capability"] = 90
    config = EngineConfig.from_json(sys.stdin.read())
    source = open_model(config.model, lambda *_: None)
    runner = without_memory(config, source, torch.device("cpu"))
    runner.model.group = AllRanks(2)
    compile_kernels(runner, config, Forks(4, lambda: SimpleNamespace(launcher_cls=lambda *_: None)))
