"""The operations that models call: each picks the Triton kernel on CUDA, the torch twin elsewhere.

`register_op(name, fn)` puts a function of the user's in place of both, once it agrees with the twin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from wavecore.kernels.reference import attention, layers, sampling
from wavecore.kernels.reference import moe as moe_twin

P = ParamSpec("P")
R = TypeVar("R")
OPERATIONS: dict[str, Operation[..., Any]] = {}
"""All of them, by name."""


class Operation(Generic[P, R]):
    """Called as its twin is, with a tensor or the rows of a step first: where that lies, it runs.

    Args:
        twin: the torch version; its name, arguments and documentation are the operation's.
        module: of `wavecore.kernels`, with the Triton kernel under that name; imported when it is first called.
    """

    def __init__(self, twin: Callable[P, R], module: str) -> None:
        update_wrapper(self, twin)
        OPERATIONS[twin.__name__] = self
        self.twin = twin
        self.custom: Callable[P, R] | None = None
        self._module = module
        self._chosen: dict[str, Callable[P, R]] = {}  # by type of device

    @property
    def kernel(self) -> Callable[P, R]:
        """The function that launches the Triton kernel."""
        found: Callable[P, R] = getattr(import_module(f"wavecore.kernels.{self._module}"), self.twin.__name__)
        return found

    def replace(self, fn: Callable[P, R] | None) -> None:
        """Run `fn` on every device from now on; None for kernel and twin."""
        self.custom = fn
        self._chosen.clear()

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        first: Any = args[0]
        device = first.device.type
        if device not in self._chosen:
            self._chosen[device] = self.custom or (self.kernel if device == "cuda" else self.twin)
        return self._chosen[device](*args, **options)


prepare_batch = Operation(layers.prepare_batch, "prepare")
update_block_table = Operation(layers.update_block_table, "prepare")
add_rms_norm = Operation(layers.add_rms_norm, "norm")
gather_add_rms_norm = Operation(layers.gather_add_rms_norm, "norm")
qk_norm_rope_kv_write = Operation(layers.qk_norm_rope_kv_write, "kv_write")
paged_attention = Operation(attention.paged_attention, "attention.paged")
silu_mul = Operation(layers.silu_mul, "activation")
gelu_tanh_mul = Operation(layers.gelu_tanh_mul, "activation")
linear = Operation(layers.linear, "linear")
moe = Operation(moe_twin.moe, "moe.experts")
adjust = Operation(sampling.adjust, "sampling.sample")
draw = Operation(sampling.draw, "sampling.sample")
finish = Operation(sampling.finish, "sampling.sample")
copy_blocks = Operation(layers.copy_blocks, "copies")


def register_op(name: str, fn: Callable[..., Any], like: Tensor) -> None:
    """Replace an operation in this process, on every device.

    Args:
        name: one of `OPERATIONS`.
        fn: takes the arguments of the operation's twin, for instance `wavecore.kernels.reference.layers.silu_mul`. It
            is tried at once on small random inputs.
        like: an empty tensor with the dtype and the device of these inputs: where fn will be used.

    Raises:
        ValueError: unknown name, or fn's results differ from the twin's in shape, dtype or value; the message says
            which result differs and by how much.
        check.DidNotRun: fn raised; also a ValueError.
    """
    from wavecore.kernels.check import check_op

    if name not in OPERATIONS:
        raise ValueError(f"there is no operation {name!r}; the names are {', '.join(OPERATIONS)}")
    check_op(name, fn, OPERATIONS[name].twin, like)
    OPERATIONS[name].replace(fn)
