"""A step's plan as bytes for the other ranks of its group, and back: msgpack, in which an array is its dtype, its shape
and its bytes. Both sides run the same program, so nothing is checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import NewRequest, StepPlan

ARRAY = 0  # of msgpack's extension types


def encode(plan: StepPlan) -> bytes:
    data: bytes = msgpack.packb(plan, default=_packed)
    return data


def decode(data: bytes) -> StepPlan:
    step_id, slots, starts, query_lens, samples, new, *rest = msgpack.unpackb(
        data, ext_hook=_array, strict_map_key=False
    )
    requests = [
        NewRequest(slot, ids, num_prompt, SamplingParams.from_wire(params), *more)
        for slot, ids, num_prompt, params, *more in new
    ]
    return StepPlan(step_id, slots, starts, query_lens, samples, tuple(requests), *rest)


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, SamplingParams):
        return value.to_wire()
    return [getattr(value, field.name) for field in fields(value) if field.init]  # a plan, or a new request of it


def _array(_: int, data: bytes) -> Any:
    kind, shape, values = msgpack.unpackb(data)
    return np.frombuffer(values, kind).reshape(shape).copy()  # that can be written, as the plan's own
