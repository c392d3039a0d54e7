"""Recounts everything that the scheduler keeps twice. Tests call it after every step; an idle engine may, too."""

from __future__ import annotations

from collections import Counter

from wavecore.engine_core.kv_cache.manager import KVEvents
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.requests import Lifecycle


def check(life: Lifecycle, in_flight: list[KVEvents]) -> None:
    """AssertionError names the first difference. `in_flight`: the events of steps that did not come back yet."""
    requests = life.all()
    _check_blocks(life, requests, [*in_flight, life.kv.events])
    _check_slots(life, requests)
    _check_queue(life, requests)


def _check_blocks(life: Lifecycle, requests: list[Request], events: list[KVEvents]) -> None:
    device: Counter[int] = Counter()
    host: Counter[int] = Counter()
    for request in requests:
        device.update(request.blocks)
        host.update(request.host_blocks)
    for owner in (*events, *life.kv.transfers):
        for pool, block in owner.owned:
            (device if pool is life.kv.device else host)[block] += 1
    life.kv.device.check_integrity(device)
    life.kv.host.check_integrity(host)


def _check_slots(life: Lifecycle, requests: list[Request]) -> None:
    s = life.slots
    taken = {slot for slot, request in enumerate(s.requests) if request is not None}
    assert taken.isdisjoint(s.free) and len(taken) + len(s.free) == s.num_slots, "slots lost or held twice"
    for request in requests:
        holds = request.state in (State.LOADING, State.RUNNING, State.DRAINING)
        assert holds == (request.slot >= 0), f"{request.state} with slot {request.slot}"
        if not holds:
            assert not request.blocks, f"{request.state} with device blocks"
            continue
        slot = request.slot
        assert s.requests[slot] is request and s.live[slot], f"slot {slot} is not its request's"
        assert s.computed[slot] <= s.length[slot] <= s.limit[slot], f"slot {slot}: counters out of order"
        assert s.known[slot] <= s.length[slot], f"slot {slot}: more tokens known than exist"
        if request.state is State.DRAINING:
            assert not s.runs[slot] and s.in_flight[slot] and not request.blocks, f"slot {slot}: not drained well"
            continue
        if request.state is State.LOADING:
            assert not s.runs[slot] and not s.in_flight[slot], f"slot {slot} runs before its blocks are there"
            assert sum(request in t.loading for t in life.kv.transfers) == 1, f"slot {slot}: nothing is on its way"
        else:
            assert s.runs[slot] or s.in_flight[slot], f"slot {slot} will never move"
        assert s.capacity[slot] == len(request.blocks) * life.kv.block_size, f"slot {slot}: capacity is wrong"
        assert s.computed[slot] <= s.capacity[slot], f"slot {slot}: tokens without blocks"
        assert len(set(request.blocks)) == len(request.blocks), f"slot {slot}: a block twice in one table"
    for slot in taken:
        request_or_none = s.requests[slot]
        if request_or_none is not None and request_or_none.state is State.ENDED:
            assert s.in_flight[slot] and not s.live[slot] and not s.runs[slot], f"slot {slot} was not freed"


def _check_queue(life: Lifecycle, requests: list[Request]) -> None:
    waiting = [request for request in requests if request.state in (State.WAITING, State.PREEMPTED)]
    queued = life.waiting.requests()
    assert len(queued) == len(life.waiting), "length of the queue is wrong"
    assert {id(r) for r in waiting} == {id(r) for r in queued}, "waiting requests and the queue differ"
    assert sum(len(r.tokens) for r in queued) == life.waiting.num_tokens, "tokens of the queue are wrong"
    forking = [request for request in requests if request.state is State.FORKING]
    assert sum(len(r.forks) for r in requests) == len(forking), "a further choice is lost"
    assert sum(len(r.timers) for r in requests) == len(life.timers), "timers and requests differ"
