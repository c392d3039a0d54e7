"""A program, not a test: an engine's warm-up and then every kind of request, with kernels that are only compiled.

The runner is one of a CPU that takes the kernels of a GPU. Nothing is computed, matrix products included: all values
and tokens are zeros. Machine code is not made either: `compile_for_hopper` shows that it can be. Another process has
compiled meanwhile, as in the start of an engine (`kernel_compiler`). Prints JSON: the kernels of the warm-up, those of
them that were not in Triton's cache, and what each kind of request after it compiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from tests.kernels.compile_for_hopper import two_ranks
from tests.kernels.compile_only import compile_only, no_machine_code
from tests.support.checkpoints import make_config, save_model
from tests.support.every_request import every_request
from tests.support.model_driver import load
from torch import Tensor

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.step_shape import Buckets
from wavecore.engine_core.startup.warm_up import warm_up
from wavecore.kernels import ops
from wavecore.kernels.device import STANDS_FOR
from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.linear import FEW_ROWS
from wavecore.parallel.collectives import Collectives

ROWS, TOKENS = 40, 2304


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear.kernel(x, weight, bias) if len(x) <= FEW_ROWS else x.new_zeros(len(x), len(weight))


def draw(count: int) -> None:
    """As a rank alone does, from 16 bits: two ranks gather logits of 32 to truncate them."""
    rows = sampling_rows(count, 4096, "cpu", edits=False)
    ops.draw(torch.zeros(count, 4096, dtype=torch.bfloat16), rows)


class OneOfTwo(Collectives):
    """A rank whose sums are our kernel's, as are all that fit into its buffers; the other rank does not exist."""

    rank, size, calls = 0, 2, 0
    peers = two_ranks(1 << 16)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.peers.all_reduce(x)
        return x

    def add_rms_norm(self, x: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
        return self.peers.add_rms_norm(x, *norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])

    def least(self, value: int) -> int:
        return value


def main(folder: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
    shared = {"shared_expert_intermediate_size": 40, "use_sliding_window": False, "hidden_size": 64}
    model = save_model(folder, make_config("Qwen2Moe", head_dim=128, max_position_embeddings=2400, **experts, **shared))
    limits: dict[str, Any] = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": TOKENS,
        "dtype": "bfloat16",
        "block_size": 16,
    }
    runner: Any = load(model, **limits)
    STANDS_FOR["capability"] = 90
    aside = [sys.executable, str(Path(__file__).with_name("compile_aside.py"))]
    settings = EngineConfig(model=str(model), **limits).to_json()
    subprocess.run(aside, input=settings, text=True, check=True, stdout=subprocess.DEVNULL)
    compile_only(90)
    no_machine_code()
    compiled: list[str] = []
    missing: list[str] = []
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: None if cache_hit else missing.append(src.name)
    triton.knobs.runtime.jit_post_compile_hook = lambda *_args, **details: compiled.append(details["fn"].name)
    for operation in ops.OPERATIONS.values():
        operation.replace(operation.kernel)
    runner.model.group = OneOfTwo()
    ops.linear.replace(linear)
    torch.empty = torch.zeros  # type: ignore[assignment]
    runner.buckets = Buckets(TOKENS, ROWS)
    warm_up(runner, EngineConfig(model=str(model), device="cpu", **limits))
    while runner.unmet:
        runner.meet()
    found = {"warm-up": [name.rsplit(".", 1)[-1] for name in compiled], "missing": list(missing)}
    for kind, run in every_request(runner, ROWS, TOKENS):
        compiled.clear()
        run()
        found[kind] = list(compiled)
    draw(ROWS)  # what a warm-up draws
    compiled.clear()
    for count in range(1, ROWS):
        draw(count)
    found["draws of one rank"] = list(compiled)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
