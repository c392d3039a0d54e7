"""Dispatch, and replacing an operation by a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.check import compare
from wavecore.kernels.examples import EXAMPLES
from wavecore.kernels.reference import layers

CPU = torch.empty(0)
pytestmark = pytest.mark.usefixtures("own_ops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(ops.OPERATIONS))
def test_an_op_is_its_twin_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    assert compare(getattr(ops, name), ops.OPERATIONS[name].twin, EXAMPLES[name](torch.empty(0, dtype=dtype))) is None


@pytest.mark.parametrize("name", list(ops.OPERATIONS))
def test_register(name: str) -> None:
    calls = []
    twin = ops.OPERATIONS[name].twin

    def counting(*args: Any) -> Any:
        calls.append(name)
        return twin(*args)

    ops.register_op(name, counting, CPU)
    calls.clear()
    getattr(ops, name)(*EXAMPLES[name](torch.empty(0)))
    assert calls == [name]


def wrong_value(gate_up: Tensor) -> Tensor:
    return layers.gelu_tanh_mul(gate_up)


def wrong_shape(gate_up: Tensor) -> Tensor:
    return layers.silu_mul(gate_up)[:-1]


def wrong_dtype(gate_up: Tensor) -> Tensor:
    return layers.silu_mul(gate_up).double()


def broken(gate_up: Tensor) -> Tensor:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    "fn, words",
    [
        (wrong_value, "differs by up to"),
        (wrong_shape, r"\[2, 96\], not"),
        (wrong_dtype, "float64"),
        (broken, "no such luck"),
        (lambda gate_up: None, "is missing"),
    ],
)
def test_a_function_that_differs_is_refused(fn: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.register_op("silu_mul", fn, CPU)
    args = EXAMPLES["silu_mul"](torch.empty(0))
    torch.testing.assert_close(ops.silu_mul(*args), layers.silu_mul(*args))


def test_a_change_of_arguments_that_the_twin_does_not_make_is_refused() -> None:
    def greedy(gate_up: Tensor) -> Tensor:
        out = layers.silu_mul(gate_up)
        gate_up[0] = 1
        return out

    with pytest.raises(ValueError, match=r"result\[1\] differs"):
        ops.register_op("silu_mul", greedy, CPU)


def test_a_function_is_judged_in_the_dtype_that_it_will_be_used_in() -> None:
    """What is right in float32 may be wrong in bfloat16."""

    def careless(gate_up: Tensor) -> Tensor:
        if gate_up.dtype == torch.bfloat16:
            return layers.gelu_tanh_mul(gate_up)
        return layers.silu_mul(gate_up)

    ops.register_op("silu_mul", careless, CPU)
    with pytest.raises(ValueError, match=r"bfloat16 on cpu: result\[0\] differs"):
        ops.register_op("silu_mul", careless, torch.empty(0, dtype=torch.bfloat16))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="the names are prepare_batch"):
        ops.register_op("flash", lambda x: x, CPU)
