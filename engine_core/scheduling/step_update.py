"""Takes what a step produced: appends tokens, finds the ends, caches blocks, hands out.

Works on whole columns; single requests are touched only when something happens to them. `slots` and `sampled` hold
slots, one for each row of the step and one for each row that drew a token.
"""

from typing import Any

import numpy as np

from wavecore.engine_core.plan import I32, U8, Flags, Index, RowLogprobs, StepPlan, StepResult
from wavecore.engine_core.request import Request
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.step_output import join_logprobs, logprob_frames
from wavecore.transport.errors import NumericalError
from wavecore.transport.wire.messages import FinishReason
from wavecore.transport.wire.tensors import from_numpy


def update(requests: Requests, plan: StepPlan, result: StepResult) -> None:
    """Apply a step's result. Rows of requests that ended meanwhile are ignored; those of preempted ones count."""
    s = requests.slots
    slots, ends = plan.slots, plan.ends
    requests.kv.step_done(plan.step_id)
    requests.land(result.transferred)
    s.in_flight[slots] -= 1
    if result.faults.any():
        _fail(requests, slots[np.flatnonzero(result.faults)])
    live = s.live[slots]
    for row, values in result.prompt_logprobs.items():
        if live[row]:
            _keep_prompt_logprobs(s.at(int(slots[row])), int(plan.starts[row]), values)
    rows = (live & plan.samples).nonzero()[0]
    sampled, tokens = (slots, result.tokens) if len(rows) == len(slots) else (slots[rows], result.tokens[rows])
    known = s.known[sampled]
    s.tokens[sampled, known] = tokens
    known += 1
    s.known[sampled] = known
    finish = _finish(requests, sampled, tokens, known)
    _cache_blocks(requests, slots, ends, live)
    requests.totals.output_tokens += len(sampled)
    if len(sampled):
        _report(requests, sampled, tokens, finish, rows, result)
    for row in finish.nonzero()[0].tolist():
        requests.close(s.at(int(sampled[row])), FinishReason(int(finish[row])))
    if len(rows) < len(slots):
        _end_unsampled(requests, slots, ends, result)
    requests.free_slots(slots[(s.in_flight[slots] == 0) & ~s.runs[slots]].tolist())


def _finish(requests: Requests, sampled: Index, tokens: I32, known: I32) -> U8:
    s = requests.slots
    stop = (s.stop_ids[sampled] == tokens[:, None]).any(axis=1) & (known > s.stop_from[sampled])
    full = known >= s.limit[sampled]
    finish = np.where(full, np.uint8(FinishReason.LENGTH), np.uint8(FinishReason.NONE))
    finish[stop] = FinishReason.STOP
    return finish


def _cache_blocks(requests: Requests, slots: Index, ends: I32, live: Flags) -> None:
    """Blocks of output tokens enter the prefix map only now that their ids are known."""
    s = requests.slots
    for row in (live & (ends >= s.next_cache[slots])).nonzero()[0].tolist():
        slot = int(slots[row])
        s.next_cache[slot] = requests.kv.register_next(s.at(slot), s.tokens[slot], int(s.next_cache[slot]))


def _report(requests: Requests, sampled: Index, tokens: I32, finish: U8, rows: Index, result: StepResult) -> None:
    s, now = requests.slots, requests.clock()
    extras = requests.outputs.rows(s.client[sampled], s.handle[sampled], tokens, finish)
    first, before = s.first[sampled], s.last_token_at[sampled]
    begins = first.nonzero()[0].tolist()
    for i in begins:
        request = s.at(int(sampled[i]))
        extras[i] = _first_extras(request)
        request.reported, request.first_token_at = True, now
        requests.stop_timer(request, "first_token_timeout")
        requests.histograms.first_token(request)
    if begins:
        s.first[sampled] = False
        before = before[~first]
    requests.histograms.next_tokens(before, now)
    s.last_token_at[sampled] = now
    for i in (finish == FinishReason.STOP).nonzero()[0].tolist():
        token, request = int(tokens[i]), s.at(int(sampled[i]))
        told = len(request.params.stop_token_ids or ())
        if request.stop_ids.index(token) >= len(request.stop_ids) - told:  # the model's own, which come first, are none
            extras.setdefault(i, {})["stop_token"] = token
    if result.logprobs:
        place = {row: i for i, row in enumerate(rows.tolist())}
        for row, values in result.logprobs.items():
            if row in place:
                extras.setdefault(place[row], {})["logprobs"] = logprob_frames(values)


def _first_extras(request: Request) -> dict[str, Any]:
    """Told once a choice: the seed in use, its prompt's log-probabilities, and (with the first choice) how much of the
    prompt was cached."""
    extras: dict[str, Any] = {"seed": request.params.seed}
    if request.choice == 0:
        extras["cached_tokens"] = request.cached_tokens
    if request.prompt_logprobs:
        extras["prompt_logprobs"] = logprob_frames(join_logprobs(request.prompt_logprobs))
        request.prompt_logprobs = []
    return extras


def _end_unsampled(requests: Requests, slots: Index, ends: I32, result: StepResult) -> None:
    """Embeddings and max_tokens=0 end with their prompt."""
    s = requests.slots
    for row in (s.live[slots] & ~s.samples[slots] & (ends == s.length[slots])).nonzero()[0].tolist():
        request = s.at(int(slots[row]))
        extras = _first_extras(request)
        if request.options.pooling:
            extras["pooled"] = [from_numpy(result.pooled[row])]
        finish = FinishReason.STOP if request.options.pooling else FinishReason.LENGTH
        requests.close(request, finish)
        requests.outputs.end(request.client, request.handle, finish, extras)


def _fail(requests: Requests, slots: Index) -> None:
    """These rows held what is no number: their requests end, and nobody finds their blocks any more; nor those of a
    request that has ended since, which keeps its slot until its last step is back."""
    for slot in slots.tolist():
        request = requests.slots.at(slot)
        requests.kv.forget(request)
        if requests.slots.live[slot]:
            message = "the model's output for this request held NaN or no finite value; its cached blocks were dropped"
            requests.end(request, FinishReason.ERROR, NumericalError(message))


def _keep_prompt_logprobs(request: Request, start: int, values: RowLogprobs) -> None:
    """`values` are those of prompt positions start + 1 on; after a preemption some come again."""
    known = request.prompt_logprobs_done - start
    fresh = RowLogprobs(values.token_ids[known:], values.logprobs[known:], values.ranks[known:])
    if len(fresh.ranks):
        request.prompt_logprobs.append(fresh)
        request.prompt_logprobs_done += len(fresh.ranks)
