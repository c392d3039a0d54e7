"""A user's own kernels: checked where they are registered, used by every engine that this program starts afterwards.

An engine is another process, so a kernel travels as "module:function" and the engine imports it. Imports no torch until
something is registered.
"""

import sys
from collections.abc import Callable
from typing import Any

from wavecore.transport.errors import ConfigError
from wavecore.transport.wire.checks import shown

registered: dict[str, str] = {}
"""Kernel name -> "module:function"; `EngineConfig.custom_ops` of engines to come."""


def register_op(name: str, fn: Callable[..., Any]) -> None:
    """Replace a kernel by name, for instance `register_op("silu_mul", my_kernels.silu_mul)`.

    Args:
        name: an operation of `wavecore.kernels.ops`.
        fn: a function of a module (not of the main script, which an engine cannot import); arguments and results as
            those of its torch twin, the function of that name in `layers`, `attention` or `sampling` of
            `wavecore.kernels.reference`. It is tried against that twin: here at once, in float32 on the CPU unless it
            runs on GPUs only, and by each engine on its own device and in its own dtype.

    Raises:
        ConfigError: an unknown name, a function that an engine process could not import, or one whose results differ
            from the twin's in shape, dtype or value.
    """
    module, path = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if not isinstance(name, str) or not callable(fn):
        raise ConfigError(f"name must be text and fn a function of a module, not {shown(name)} and {shown(fn)}")
    if module == "__main__" or getattr(sys.modules.get(str(module)), path, None) is not fn:
        way_out = "put the function into a module of its own, next to the script, and import it from there"
        raise ConfigError(f"{module}.{path} cannot be imported by an engine process: {way_out}")
    import torch

    from wavecore.kernels import ops
    from wavecore.kernels.check import DidNotRun

    try:
        ops.register_op(name, fn, torch.empty(0))
    except ValueError as error:
        if not isinstance(error, DidNotRun) or not torch.cuda.is_available():
            raise ConfigError(f"register_op: {error}") from error
    registered[name] = f"{module}:{path}"
