"""What counts as out of memory, whoever says so, and what then becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_driver import load

from wavecore.engine_core.execution import runner
from wavecore.engine_core.execution.out_of_memory import is_out_of_memory
from wavecore.engine_core.execution.pinned_copies import pinned_zeros
from wavecore.transport.errors import ConfigError


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul(...)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_short_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("out of resource: shared memory, Required: 320000, Hardware limit: 232448"),
        ValueError("the file names a device that is out of memory"),
    ],
)
def test_other_faults(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory (2)")])
def test_swap_space_that_the_host_cannot_give_is_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    zeros = runner.zeros

    def failing(*shape: int, **more: Any) -> torch.Tensor:
        if len(shape) > 2 and shape[0] != 2000:  # blocks, and not those on the device
            raise error
        return zeros(*shape, **more)

    monkeypatch.setattr(runner, "zeros", failing)
    with pytest.raises(ConfigError, match=r"give 0\.0078\d* GiB .*out of memory.*; it would fit with swap_space_gib 0"):
        load(tiny_llama, swap_space_gib=0.00785, num_gpu_blocks_override=2000)


class Cudart:
    """Pins memory, or says no."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_memory_is_pinned_to_the_byte_and_until_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = pinned_zeros((3, 1001), torch.bfloat16)
    assert not pinned_zeros((0, 7), torch.bfloat16).nbytes
    assert cudart.pinned == {memory.data_ptr(): 6006}
    del memory
    assert not cudart.pinned


def test_pinning_that_fails_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaError(RuntimeError):
        def __init__(self, code: int) -> None:
            super().__init__(f"out of memory ({code})")  # as torch words it

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    monkeypatch.setattr(torch.cuda, "CudaError", CudaError)
    with pytest.raises(RuntimeError) as caught:
        pinned_zeros((4,), torch.int32)
    assert is_out_of_memory(caught.value)
