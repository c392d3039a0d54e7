"""Recounts everything that the scheduler keeps twice. Tests call it after every step; an idle engine may, too."""

from collections import Counter

from wavecore.engine_core.kv_cache.manager import KVCacheManager
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.slots import Slots


def check(requests: Requests) -> None:
    """AssertionError names the first difference."""
    everyone = requests.all()
    _check_blocks(requests.kv, everyone)
    _check_slots(requests.slots, everyone)
    for request in everyone:
        if request.slot >= 0:
            _check_place(requests.slots, request, requests.kv)
    _check_queue(requests, everyone)


def _check_blocks(kv: KVCacheManager, everyone: list[Request]) -> None:
    device: Counter[int] = Counter()
    host: Counter[int] = Counter()
    for request in everyone:
        device.update(request.blocks)
        host.update(request.host_blocks)
    for blocks in kv.copied.values():
        device.update(blocks)
    for transfer in kv.transfers:
        for pool, block in transfer.owned:
            (device if pool is kv.device else host)[block] += 1
    kv.device.check_integrity(device)
    kv.host.check_integrity(host)


def _check_slots(s: Slots, everyone: list[Request]) -> None:
    taken = {slot: request for slot, request in enumerate(s.requests) if request is not None}
    assert taken.keys().isdisjoint(s.free), "a slot is free and taken"
    assert len(taken) + len(s.free) == s.max_num_seqs, "slots lost or held twice"
    for slot, request in taken.items():
        if request.state is State.ENDED:
            assert s.in_flight[slot] and not s.live[slot] and not s.runs[slot], f"slot {slot} was not freed"
    for request in everyone:
        holds = request.state in (State.LOADING, State.RUNNING, State.DRAINING)
        assert holds == (request.slot >= 0), f"{request.state} with slot {request.slot}"
        assert holds or not request.blocks, f"{request.state} with device blocks"


def _check_place(s: Slots, request: Request, kv: KVCacheManager) -> None:
    """A request with a slot: its counters, and its blocks."""
    slot, blocks = request.slot, request.blocks
    assert s.requests[slot] is request and s.live[slot], f"slot {slot} is not its request's"
    assert s.computed[slot] <= s.length[slot] <= s.limit[slot], f"slot {slot}: counters out of order"
    assert s.known[slot] <= s.length[slot], f"slot {slot}: more tokens known than exist"
    if request.state is State.DRAINING:
        assert not s.runs[slot] and s.in_flight[slot] and not blocks, f"slot {slot}: not drained well"
        return
    if request.state is State.LOADING:
        assert not s.runs[slot] and not s.in_flight[slot], f"slot {slot} runs before its blocks are there"
        assert sum(request in t.loading for t in kv.transfers) == 1, f"slot {slot}: nothing is on its way"
    else:
        assert s.runs[slot] or s.in_flight[slot], f"slot {slot} will never move"
    assert s.capacity[slot] == len(blocks) * kv.block_size, f"slot {slot}: capacity is wrong"
    assert s.computed[slot] <= s.capacity[slot], f"slot {slot}: tokens without blocks"
    assert len(set(blocks)) == len(blocks), f"slot {slot}: a block twice in one table"


def _check_queue(requests: Requests, everyone: list[Request]) -> None:
    queued = requests.waiting.in_order()
    waiting = {id(request) for request in everyone if request.state in (State.WAITING, State.PREEMPTED)}
    assert len(queued) == len(requests.waiting), "length of the queue is wrong"
    assert waiting == {id(request) for request in queued}, "waiting requests and the queue differ"
    assert sum(len(request.tokens) for request in queued) == requests.waiting.num_tokens, "queued tokens are wrong"
    sizes = {client: sum(request.size for request in mine.values()) for client, mine in requests.by_client.items()}
    assert requests.sizes == sizes and requests.size == sum(sizes.values()), "the load is wrong"
    forking = sum(request.state is State.FORKING for request in everyone)
    assert sum(len(request.forks) for request in everyone) == forking, "a further choice is lost"
    assert {id(request) for request, _ in requests.timers} <= {id(request) for request in everyone}, "a timer is left"
