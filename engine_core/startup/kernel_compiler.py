"""The program that compiles an engine's kernels while it loads its weights; `kernel_process` is its process.

The warm-up runs here, too, on torch's "meta" device: tensors have shapes but no memory, and nothing is computed. So it
launches what the engine will launch. Each launch of a new kind is compiled by a fork of this process and lands in
Triton's cache, where the engine finds it. A fork asks for the GPU's properties, too: CUDA would leave threads here, and
a process that forks has best none. No process makes a context on the GPU.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.cache import triton_key

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.models.files import open_model
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.models.weights import fill
from wavecore.engine_core.plan import StepPlan
from wavecore.engine_core.startup.compilation import FIRST_DONE
from wavecore.engine_core.startup.loader import DTYPES, find_device, make_runner, resolve
from wavecore.engine_core.startup.warm_up import warm_up
from wavecore.kernels import device, ops
from wavecore.kernels.all_reduce import PeerBuffers
from wavecore.parallel.collectives import ALONE, Alone
from wavecore.parallel.peer_memory import AREA, MOST_BYTES
from wavecore.transport.processes.child import die_with_parent

META = torch.device("meta")
BOOLS = ["expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"]
LATE: dict[str, dict[str, Any]] = {
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(BOOLS, bool),
        **dict.fromkeys(("has_hint", "has_guarding_hint"), lambda _: True),
        **dict.fromkeys(("size_hint", "guarding_hint_or_throw"), lambda size, **_: size),
        "is_nested_int": lambda _: False,
        "sym_eq": lambda x, y: x == y if isinstance(x, int) else [*x] == [*y],
        "sym_and": lambda *x: all(x),
        "sym_or": lambda *x: any(x),
    },
    "torch.utils._sympy.functions": {"Max": max},
    "sympy": {"Basic": type("Basic", (), {})},
}
"""What operations that torch decomposes for "meta" import, for two seconds, to ask about sizes, which may be symbols;
here they are numbers. Which names are asked for depends on torch's version."""
NOT_LAUNCHED: Any = SimpleNamespace(
    launch_metadata=lambda *_: None, run=lambda *_: None, function=None, packed_metadata=None
)


class Late(ModuleType):
    """Stands in for a module that takes long to import, and knows what is asked of it as a rule. Whatever else is asked
    brings the real ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks
            raise AttributeError(name)
        for module in [module for module in LATE if isinstance(sys.modules.get(module), Late)]:
            del sys.modules[module]
        return getattr(import_module(self.__name__), name)


class AllRanks(Alone):
    """Launches what each rank of a group would; nothing is summed."""

    def __init__(self, size: int) -> None:
        self.size = size
        buffers = (torch.empty(PeerBuffers.num_bytes(AREA) // 8, dtype=torch.int64, device=META),) * size
        self._peers = [PeerBuffers(buffers, rank, AREA, MOST_BYTES.get(size, 0)) for rank in range(size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        for peers in self._peers:
            if peers.hold(x):
                peers.all_reduce(x)
        return x

    def add_rms_norm(self, x: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
        for peers in self._peers:
            if peers.hold(x):
                peers.add_rms_norm(x, *norm)
        return super().add_rms_norm(x, *norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)


class Forks:
    """Triton's hooks: each new kind of launch is compiled by a fork, of which there are at most `most` at a time.

    Args:
        make_driver: Triton's driver; where there is none in the cache yet, its making compiles C code.

    Attributes:
        failed: one of them did.
    """

    def __init__(self, most: int, make_driver: Callable[[], Any]) -> None:
        self._most, self._running, self._make_driver, self.failed = most, 0, make_driver, False

    def begin(self) -> bool:
        """Fork. True in the fork, which is to end by `os._exit`."""
        self.wait(self._most - 1)
        if os.fork() == 0:
            die_with_parent()
            return True
        self._running += 1
        return False

    def wait(self, most: int = 0) -> None:
        """Until so many run at most."""
        while self._running > most:
            _, status = os.wait()
            self._running, self.failed = self._running - 1, self.failed or status != 0

    def before(self, *, fn: Any, compile: Any, **_: Any) -> bool:
        """Whether the launch is done with; in the fork it is compiled."""
        # Here, and not only in the fork: a function's hash depends on whether those that it calls were hashed before
        # (Triton 3.6 and 3.7, `DependenciesFinder`), and the engine hashes in the order of launches.
        _ = fn.jit_function.cache_key
        if self.begin():
            return False
        fn.jit_function.device_caches[0][0][compile["key"]] = NOT_LAUNCHED
        return True

    def after(self, *, fn: Any, compile: Any, **_: Any) -> None:
        """The fork has compiled its kernel, and ends with the C code that launches it."""
        kernel = fn.jit_function.device_caches[0][0][compile["key"]]
        driver.set_active(self._make_driver())
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        os._exit(0)


def compile_kernels(runner: ModelRunner, config: EngineConfig, forks: Forks) -> None:
    """Compile all kernels that such a runner, on the "meta" device, launches on a GPU like `device.STANDS_FOR`."""
    target = GPUTarget("cuda", device.STANDS_FOR["capability"], 32)
    no_driver = {"get_current_device": lambda: 0, "get_current_stream": int, "get_current_target": lambda: target}
    driver.set_active(SimpleNamespace(**no_driver))
    # They import its compiler, too, for a second, to ask that it leave them alone.
    asked: Any = SimpleNamespace(disable=lambda fn, *_, **__: fn)
    sys.modules.setdefault("torch._dynamo", asked)
    for name, known in LATE.items():
        late = sys.modules[name] = Late(name)
        vars(late).update(known)
    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = forks.before, forks.after
    warm_up(runner, replace(config, dp_lockstep=False))
    forks.wait()
    sys.stdout.write(FIRST_DONE)
    sys.stdout.flush()
    os.nice(10)  # the engine serves
    for step in runner.unmet:
        if isinstance(step, StepPlan):  # sizes launch what others have launched
            runner.start(step)
    forks.wait()


def main() -> int:
    """Compile what rank 0 of an engine will launch; its settings are standard input. Returns 1 where a fork failed."""
    config = EngineConfig.from_json(sys.stdin.read())
    source = open_model(config.model, lambda *_: None, config.tokenizer, need_weights=False)
    ranks = config.tensor_parallel_size
    shard = Shard(source.spec, ranks, 0, config.expert_ranks)
    forks = Forks(len(os.sched_getaffinity(0)), CudaDriver)
    heard, told = os.pipe()
    if forks.begin():
        gpu = find_device(config.device)
        dtype, *lengths = resolve(config, shard.spec, gpu)
        properties = {name: getattr(device, name)(gpu) for name in device.STANDS_FOR}
        os.write(told, json.dumps([properties, str(dtype).removeprefix("torch."), *lengths]).encode())
        CudaDriver()
        os._exit(0)
    os.close(told)
    torch.cuda.is_available = lambda: False  # else `torch.cuda.stream(None)` would start CUDA in this process, too
    triton_key()  # once, and not in each fork
    for operation in ops.OPERATIONS.values():
        operation.replace(operation.kernel)
    properties, name, block_size, length = json.loads(os.read(heard, 4096))
    device.STANDS_FOR.update(properties)
    parameters = fill([], shard, DTYPES[name], META, lambda *_: None)
    group = AllRanks(ranks) if ranks > 1 else ALONE
    runner = make_runner(config, source, shard, parameters, block_size, length, group)
    runner.allocate(2)
    compile_kernels(runner, config, forks)
    return int(forks.failed)
