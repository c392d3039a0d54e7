"""Which blocks a request holds, on the device and on the host; prefix reuse, copy-on-write, swap.

All decisions are written down as events for the next step plan. Copies within the device run before its rows; swaps
between device and host run beside this step and later ones. Four ledgers say what is under way:

    ledger       holds                                             cleared by
    events       what the plan in the making tells the runner      take_events, once that plan is complete
    _unwritten   blocks that its rows or copies will fill, so      take_events
                 that none of its copies and swaps may read them
    copied       sources of copies by step, a reference each       step_done, once that step is back
    transfers    both ends of swaps by step, a reference each      Transfers.land: the swaps are done, or all further
                                                                   plans are told to run behind them

`void` clears all four, when the steps in flight are rolled back.

The host pool holds swapped-out requests (referenced) and, as a *second tier* of the prefix cache, copies of findable
blocks (free, with their hash). A block is copied there as soon as it is full and has a hash. So evicting it costs
nothing, and pushing a request out copies little more than its last block.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from wavecore.engine_core.kv_cache import block_hash
from wavecore.engine_core.kv_cache.block_pool import BlockPool
from wavecore.engine_core.kv_cache.transfers import Transfers
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.request import Request

NEVER = (1 << 31) - 1  # a length that no sequence reaches


@dataclass(slots=True)
class KVEvents:
    """What a plan must tell the runner, named as in `StepPlan`."""

    step_id: int
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)


class Allocated(NamedTuple):
    """Tokens of a request whose KV is there, and whether a part of it is still on its way from the host."""

    tokens: int
    loading: bool


@dataclass(slots=True)
class _Prefix:
    """Reusable start of a sequence: blocks to share, then blocks to copy, one of the device or some of the host."""

    tokens: int
    shared: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    on_host: list[int] = field(default_factory=list)


class KVCacheManager:
    """KV blocks of all requests of one engine."""

    def __init__(self, info: RunnerInfo, *, prefix_caching: bool, watermark: float) -> None:
        self.block_size = info.block_size
        self.device = BlockPool(info.num_blocks)
        self.host = BlockPool(info.num_host_blocks + 1)  # host block ids count from 0; see `_host_id`
        self.prefix_caching = prefix_caching
        self.watermark = int(watermark * self.device.usable)
        self.events = KVEvents(0)  # this and the next two, and `_unwritten`: see the table above
        self.transfers = Transfers()
        self.copied: dict[int, list[int]] = {}
        self.swap_pays = True  # copying a block out and back costs less than computing it again
        self.queries = self.hits = 0  # prompt tokens looked up, and found
        self._unwritten: dict[int, None] = {}

    def take_events(self) -> KVEvents:
        """The events of the plan that is now complete."""
        events, self.events = self.events, KVEvents(self.events.step_id + 1)
        for block in reversed(self._unwritten):  # its rows write them, so a later plan's transfer may read them
            self._save(block)
        self._unwritten.clear()
        return events

    def step_done(self, step_id: int) -> None:
        """The step came back: its copies have read their sources."""
        self.device.release(self.copied.pop(step_id, ()))

    def void(self) -> list[Request]:
        """The plans that did not come back never happened, nor does the one in the making. Returns what all transfers
        loaded."""
        for step_id in list(self.copied):
            self.step_done(step_id)
        step_id = self.events.step_id
        self.events = KVEvents(step_id)
        self._unwritten.clear()
        loaded = self.transfers.land(step_id)
        self.transfers.after = step_id - 1
        return loaded

    @property
    def leaving(self) -> int:
        """Device blocks that come free when transfers land."""
        return self.transfers.leaving(self.device)

    # --- a request comes and goes ---------------------------------------------------------------------------------

    def allocate(self, request: Request, source: Request | None, reserve: int) -> Allocated | None:
        """Give the request blocks for all its tokens, reusing what is there; at least one token stays to compute.

        The whole sequence must fit at once: two half-prefilled prompts can then never fight for the rest.

        Args:
            source: a running request with the same prompt, computed by earlier steps, to share blocks with.
            reserve: blocks that must stay free.

        Returns: None when there is no room now.
        """
        if self.prefix_caching:  # output known since the prompt was hashed
            block_hash.extend(request.hashes, request.root, request.tokens, self.block_size)
        total = -(-len(request.tokens) // self.block_size)
        prefix = self._fork(request, source) if source is not None else self._find(request)
        blocks = self._claim(prefix, total, reserve)
        if blocks is None and not request.host_blocks and (prefix.copied or prefix.on_host):
            # A copied last block needs its source and its copy at once, one block more than the sequence alone.
            prefix = _Prefix(len(prefix.shared) * self.block_size, prefix.shared)
            blocks = self._claim(prefix, total, reserve)
        if blocks is None:
            return None
        if request.host_blocks:
            self.host.release(reversed(request.host_blocks))
            request.host_blocks, request.swapped = [], 0
        elif source is None:
            request.stale = False
            if not request.started:
                self.queries += len(request.tokens)
                self.hits += prefix.tokens
        request.blocks = blocks
        if prefix.on_host:
            self.transfers.of(self.events.step_id).loading.append(request)
        return Allocated(prefix.tokens, bool(prefix.on_host))

    def grow(self, request: Request, slot: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all. False when no block is free; what was added stays."""
        while len(request.blocks) * self.block_size < num_tokens:
            if not self.device.num_free:
                return False
            block = self.device.allocate()
            self.events.table.append((slot, len(request.blocks), block))
            request.blocks.append(block)
        return True

    def free(self, request: Request) -> None:
        self.device.release(reversed(request.blocks))
        self.host.release(reversed(request.host_blocks))
        request.blocks, request.host_blocks, request.swapped = [], [], 0

    def swap_out(self, request: Request, num_tokens: int) -> bool:
        """Copy the blocks of its `num_tokens` computed tokens to the host, and free them as far as they are there.
        False if that cannot be, or does not pay."""
        needed = -(-num_tokens // self.block_size)
        held = request.blocks[:needed]  # a block beyond the computed tokens is empty
        if not (needed and self.swap_pays) or self.host.num_free < needed or request.needs_prompt_states:
            return False
        if not self._unwritten.keys().isdisjoint(held):
            return False  # this very plan began it: nothing is in them yet
        for block in held:
            self._save(block)
            digest = self.device.hash_of(block)
            host = None if digest is None else self.host.find(digest)
            if host is None:
                host = self.host.allocate()
                self._move_out(block, host)
            else:
                self.host.acquire((host,))
            request.host_blocks.append(host)
        request.swapped = num_tokens
        self.device.release(reversed(request.blocks))
        request.blocks = []
        return True

    # --- prefix map -----------------------------------------------------------------------------------------------

    def register(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens`; their hashes must be in `request.hashes`."""
        if not self.prefix_caching or request.stale:
            return
        for i in reversed(range(num_tokens // self.block_size)):
            if self.device.hash_of(request.blocks[i]) is not None:
                break  # it and all before it were registered by an earlier chunk, or found
            if self.device.register(request.blocks[i], request.hashes[i]):
                self._unwritten[request.blocks[i]] = None

    def register_next(self, request: Request, tokens: block_hash.Tokens, next_cache: int) -> int:
        """Same for a running request whose block up to `next_cache` is computed; returns the next such length."""
        if not self.prefix_caching:
            return NEVER
        block_hash.extend(request.hashes, request.root, tokens[:next_cache], self.block_size)
        i = next_cache // self.block_size - 1
        if self.device.register(request.blocks[i], request.hashes[i]):
            self._save(request.blocks[i])
        return next_cache + self.block_size

    def forget(self, request: Request) -> None:
        """The content of its blocks is not to be trusted, nor are copies of it."""
        for pool in (self.device, self.host):
            for digest in request.hashes:
                block = pool.find(digest)
                if block is not None:
                    pool.forget(block)

    def reset(self) -> None:
        """Forget all prefixes; blocks in use stay with their owners."""
        self.device.forget_all()
        self.host.forget_all()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _find(self, request: Request) -> _Prefix:
        """The longest known prefix: device blocks by hash, then host blocks (its own, or the second tier)."""
        if request.needs_prompt_states:
            return _Prefix(0)
        wanted = request.swapped or len(request.tokens)
        hashes = request.hashes[: -(-wanted // self.block_size)]
        shared = self.device.find_all(hashes)
        if request.host_blocks:
            on_host = request.host_blocks[len(shared) :]
        else:
            on_host = self.host.find_all(hashes[len(shared) :])
        found = min((len(shared) + len(on_host)) * self.block_size, wanted)
        if found < len(request.tokens):
            return _Prefix(found, shared, on_host=on_host)
        # All of it is there, but the last token must run to give logits, and writes into the last block ...
        if on_host:
            return _Prefix(found - 1, shared, on_host=on_host)
        return self._copy_last(shared, found - 1)  # ... which others may share

    def _fork(self, request: Request, source: Request) -> _Prefix:
        """Share the prompt's blocks; the one that holds its last token is copied, since both will write there."""
        tokens = len(request.tokens) - 1
        if tokens % self.block_size == 0:
            return _Prefix(tokens, source.blocks[: tokens // self.block_size])
        return self._copy_last(source.blocks[: tokens // self.block_size + 1], tokens)

    def _copy_last(self, blocks: list[int], tokens: int) -> _Prefix:
        """These blocks for so many tokens, the last one as a copy; without it where its content is not there yet."""
        *shared, last = blocks
        if last in self._unwritten:
            return _Prefix(len(shared) * self.block_size, shared)
        return _Prefix(tokens, shared, [last])

    def _claim(self, prefix: _Prefix, total: int, reserve: int) -> list[int] | None:
        """`total` blocks: the prefix's, and fresh ones with the copies that fill them; None when too few are free."""
        reused, fresh = (*prefix.shared, *prefix.copied), total - len(prefix.shared)
        idle = sum(self.device.refs(block) == 0 for block in reused)
        if self.device.num_free - idle - fresh < reserve:
            return None
        # Hits are touched before anything is allocated: allocation evicts, and must not evict a hit.
        self.device.acquire(reused)
        blocks = [self.device.allocate() for _ in range(fresh)]
        for host, block in zip(prefix.on_host, blocks, strict=False):
            self.events.swap_in.append((_host_id(host), block))
            self._own(block, host)
        for source, block in zip(prefix.copied, blocks, strict=False):
            self.copied.setdefault(self.events.step_id, []).append(source)
            self.events.copies.append((source, block))
            self._unwritten[block] = None  # all copies of a plan run at once
        return [*prefix.shared, *blocks]

    def _save(self, block: int) -> None:
        """Copy a findable block to the second tier, unless it is there."""
        digest = self.device.hash_of(block)
        if digest is None or not (self.swap_pays and self.host.num_free) or self.host.find(digest) is not None:
            return
        host = self.host.allocate()
        self.host.register(host, digest)
        self._move_out(block, host)
        self.host.release((host,))

    def _move_out(self, block: int, host: int) -> None:
        self.events.swap_out.append((block, _host_id(host)))
        self._own(block, host)

    def _own(self, block: int, host: int) -> None:
        """The plan's transfer owns both ends of a copy."""
        transfer = self.transfers.of(self.events.step_id)
        transfer.own(self.device, block)
        transfer.own(self.host, host)


def _host_id(block: int) -> int:
    """The host pool's block 0 is its null block; the runner's host blocks count from 0."""
    return block - 1
