"""A step's plan as bytes for the other ranks of its group, and back.

    int64 [13]      rows, tokens, longest query and eagerness agreed in lockstep, all 0 without; step id, after,
                    captures, rows, entries of swap_out, swap_in, copies and table, bytes of msgpack
    int32           slots, starts, query_lens, samples, swap_out, swap_in, copies, table
    msgpack         what new requests have besides arrays, and the shapes of these
    int32, float32  of each new request the token ids and prompt embeddings

A steady step is four numbers a row. Both sides run the same program, so nothing is checked.
"""

import math
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import TABLES, LeastSize, NewRequest, StepPlan

Buffer = bytes | memoryview
HEADER = struct.Struct("=13q")
AGREED = 4  # of its numbers
NONE_NEW = msgpack.packb([])


def encode(plan: StepPlan, least: LeastSize | None = None) -> list[Buffer]:
    """The bytes of a plan, and of the least size of its step in lockstep, in pieces."""
    rows = plan.slots, plan.starts, plan.query_lens, plan.samples
    tables = [getattr(plan, name) for name in TABLES]
    new = msgpack.packb([_plain(request) for request in plan.new_requests]) if plan.new_requests else NONE_NEW
    agreed = (0,) * AGREED if least is None else least
    sizes = plan.num_rows, *map(len, tables), len(new)
    header = HEADER.pack(*agreed, plan.step_id, plan.after, plan.captures, *sizes)
    flat = [table.ravel() for table in tables if len(table)]
    columns = np.concatenate([*rows, *flat], dtype=np.int32, casting="unsafe")
    arrays: list[Buffer] = []
    for request in plan.new_requests:
        arrays.append(request.token_ids.data.cast("B"))
        if request.prompt_embeds is not None:
            arrays.append(request.prompt_embeds.data.cast("B"))
    return [header, columns.tobytes(), new, *arrays]


def decode(data: bytes | bytearray) -> tuple[StepPlan, LeastSize | None]:
    """What `encode` was given; the plan's arrays are views of these bytes."""
    header = HEADER.unpack_from(data)
    least_rows, least_tokens, longest, eager = header[:AGREED]
    step_id, after, captures, rows, *entries, new_bytes = header[AGREED:]
    sizes = [rows] * 4 + [n * width for n, width in zip(entries, TABLES.values(), strict=True)]
    columns = np.frombuffer(data, np.int32, sum(sizes), HEADER.size)
    slots, starts, query_lens, samples, *flat = (columns[a:b] for a, b in pairwise(accumulate(sizes, initial=0)))
    tables: dict[str, Any] = {name: table.reshape(-1, TABLES[name]) for name, table in zip(TABLES, flat, strict=True)}
    row_columns = slots.astype(np.intp), starts, query_lens, samples.astype(np.bool_)
    at = HEADER.size + columns.nbytes
    arrays = _Arrays(data, at + new_bytes)
    new = tuple(map(arrays.request, msgpack.unpackb(data[at : at + new_bytes], strict_map_key=False)))
    plan = StepPlan(step_id, *row_columns, new, **tables, after=after, captures=bool(captures))
    return plan, LeastSize(least_rows, least_tokens, longest, bool(eager)) if least_rows else None


def _plain(request: NewRequest) -> tuple[Any, ...]:
    """What msgpack takes of a request: its fields, and shapes in place of arrays."""
    embeds = None if request.prompt_embeds is None else request.prompt_embeds.shape
    ids, params = len(request.token_ids), request.params.to_wire()
    return request.slot, ids, request.num_prompt, params, request.choice, embeds, request.pooling


class _Arrays:
    """Reads arrays one after the other."""

    def __init__(self, data: bytes | bytearray, at: int) -> None:
        self._data, self._at = data, at

    def request(self, fields: Sequence[Any]) -> NewRequest:
        slot, ids, num_prompt, params, choice, embeds, pooling = fields
        tokens, checked = self._next(np.int32, ids), SamplingParams.from_wire(params)
        given = None if embeds is None else self._next(np.float32, math.prod(embeds)).reshape(embeds)
        return NewRequest(slot, tokens, num_prompt, checked, choice, given, pooling)

    def _next(self, kind: Any, count: int) -> Any:
        array = np.frombuffer(self._data, kind, count, self._at)
        self._at += array.nbytes
        return array
