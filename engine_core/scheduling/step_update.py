"""Takes what a step produced: appends tokens, finds the ends, caches blocks, hands out. Whole columns at a time; single
requests are touched only when something happens to them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.plan import RowLogprobs, StepResult
from wavecore.engine_core.request import Request
from wavecore.engine_core.scheduling.requests import Lifecycle
from wavecore.engine_core.scheduling.scheduler import Rows, Scheduled
from wavecore.engine_core.scheduling.step_output import frame, join_logprobs, logprob_frames
from wavecore.transport.errors import NumericalError
from wavecore.transport.wire.messages import FinishReason

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


def update(life: Lifecycle, step: Scheduled, result: StepResult) -> None:
    """Apply a step's result. Rows of requests that ended meanwhile are ignored; those of preempted ones count."""
    s = life.slots
    slots = step.slots
    life.kv.settle(step.events)
    life.land(result.transferred)
    s.in_flight[slots] -= 1
    if result.faults.any():
        _fail(life, slots[np.flatnonzero(result.faults)])
    live = s.live[slots]
    for i, values in result.prompt_logprobs.items():
        if live[i]:
            _keep_prompt_logprobs(s.at(int(slots[i])), int(step.plan.starts[i]), values)
    got = (live & step.samples).nonzero()[0]
    rows, tokens = (slots, result.tokens) if len(got) == len(slots) else (slots[got], result.tokens[got])
    known = s.known[rows]
    s.tokens[rows, known] = tokens
    known += 1
    s.known[rows] = known
    finish = _finish(life, rows, tokens, known)
    _cache_blocks(life, slots, step.ends, live)
    life.totals.output_tokens += len(rows)
    if len(rows):
        _report(life, rows, tokens, finish, got, result)
    for slot in rows[finish > 0].tolist():
        life.close(s.at(slot))
    if len(got) < len(slots):
        _end_unsampled(life, step, result)
    life.settle(slots[(s.in_flight[slots] == 0) & ~s.runs[slots]].tolist())


def _finish(life: Lifecycle, rows: Rows, tokens: I32, known: I32) -> U8:
    s = life.slots
    stop = (s.stop_ids[rows] == tokens[:, None]).any(axis=1) & (known > s.stop_from[rows])
    full = known >= s.limit[rows]
    finish = np.where(full, np.uint8(FinishReason.LENGTH), np.uint8(FinishReason.NONE))
    finish[stop] = FinishReason.STOP
    return finish


def _cache_blocks(life: Lifecycle, slots: Rows, ends: I32, live: npt.NDArray[np.bool_]) -> None:
    """Blocks of output tokens enter the prefix map only now that their ids are known."""
    s = life.slots
    for i in (live & (ends >= s.next_cache[slots])).nonzero()[0].tolist():
        slot = int(slots[i])
        s.next_cache[slot] = life.kv.register_next(s.at(slot), s.tokens[slot], int(s.next_cache[slot]))


def _report(life: Lifecycle, rows: Rows, tokens: I32, finish: U8, got: Rows, result: StepResult) -> None:
    s = life.slots
    extras = life.outputs.rows(s.client[rows], s.handle[rows], tokens, finish)
    for i in s.first[rows].nonzero()[0].tolist():
        request = s.at(int(rows[i]))
        extras[i] = _first_words(request)
        request.reported = True
        life.stop_timer(request, "first_token_timeout")
        if request.prompt_logprobs:
            life.outputs.row_logprobs(i, "prompt_logprobs", join_logprobs(request.prompt_logprobs))
            request.prompt_logprobs = []
    s.first[rows] = False
    for i in (finish == FinishReason.STOP).nonzero()[0].tolist():
        token = int(tokens[i])
        if token in (s.at(int(rows[i])).params.stop_token_ids or ()):
            extras.setdefault(i, {})["stop_token"] = token
    if result.logprobs:
        place = {row: i for i, row in enumerate(got.tolist())}
        for row, values in result.logprobs.items():
            if row in place:
                life.outputs.row_logprobs(place[row], "logprobs", values)


def _first_words(request: Request) -> dict[str, int | None]:
    """Told once a choice: the seed in use, and (with the first choice) how much of the prompt was cached."""
    words: dict[str, int | None] = {"seed": request.params.seed}
    if request.choice == 0:
        words["cached_tokens"] = request.cached_tokens
    return words


def _end_unsampled(life: Lifecycle, step: Scheduled, result: StepResult) -> None:
    """Embeddings and max_tokens=0 end with their prompt."""
    s = life.slots
    slots = step.slots
    done = s.live[slots] & ~s.samples[slots] & (step.ends == s.length[slots])
    for i in done.nonzero()[0].tolist():
        request = s.at(int(slots[i]))
        tensors = {}
        if request.options.pooling:
            tensors["pooled"] = [frame("float32", result.pooled[i])]
        if request.prompt_logprobs:
            tensors["prompt_logprobs"] = logprob_frames(join_logprobs(request.prompt_logprobs))
        life.close(request)
        finish = FinishReason.STOP if request.options.pooling else FinishReason.LENGTH
        life.outputs.end(request.client, request.handle, finish, _first_words(request), tensors)


def _fail(life: Lifecycle, slots: Rows) -> None:
    for slot in slots[life.slots.live[slots]].tolist():
        request = life.slots.at(slot)
        life.kv.forget(request)
        message = "the model's output for this request held NaN or no finite value; its cached blocks were dropped"
        life.end(request, FinishReason.ERROR, NumericalError(message))


def _keep_prompt_logprobs(request: Request, start: int, values: RowLogprobs) -> None:
    """`values` are those of prompt positions start + 1 on; after a preemption some come again."""
    known = request.prompt_logprobs_done - start
    fresh = RowLogprobs(values.token_ids[known:], values.logprobs[known:], values.ranks[known:])
    if len(fresh.ranks):
        request.prompt_logprobs.append(fresh)
        request.prompt_logprobs_done += len(fresh.ranks)
