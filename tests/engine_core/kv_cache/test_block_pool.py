"""The block pool against a model that keeps plain lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wavecore.engine_core.kv_cache.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """`order` is the free list, first to be handed out first; `named` maps hash to block; `refs` counts owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.order = list(range(1, 9))
        self.refs: Counter[int] = Counter()
        self.named: dict[bytes, int] = {}

    def name_of(self, block: int) -> bytes | None:
        return next((digest for digest, b in self.named.items() if b == block), None)

    @precondition(lambda self: self.order)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block == self.order.pop(0)
        self.refs[block] = 1
        self.named = {digest: b for digest, b in self.named.items() if b != block}

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        """A hit: found by hash, whether in use or free."""
        digest = data.draw(st.sampled_from(sorted(self.named)))
        block = self.pool.find(digest)
        assert block == self.named[digest]
        self.pool.acquire((block,))
        if not self.refs[block]:
            self.order.remove(block)
        self.refs[block] += 1

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.release((block,))
        self.refs[block] -= 1
        if not self.refs[block]:
            self.order.insert(len(self.order) if self.name_of(block) else 0, block)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        new = digest not in self.named and self.name_of(block) is None
        assert self.pool.register(block, digest) is new
        if new:
            self.named[digest] = block

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.named)))
        self.pool.forget(self.named.pop(digest))

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.named = {}

    @invariant()
    def same(self) -> None:
        self.pool.check_integrity(dict(+self.refs))
        assert self.pool.num_free == len(self.order) and self.pool.num_cached == len(self.named)
        assert all(self.pool.find(digest) == block for digest, block in self.named.items())
        assert all(self.pool.hash_of(block) == self.name_of(block) for block in range(1, 9))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40)


def test_tail_is_evicted_before_its_prefix() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, digest in zip(blocks, (b"0", b"1", b"2"), strict=True):
        pool.register(block, digest)
    pool.release(reversed(blocks))
    pool.allocate()
    assert (pool.find(b"0"), pool.find(b"1"), pool.find(b"2")) == (blocks[0], blocks[1], None)
    assert pool.evictions == 1


def test_an_empty_pool_hands_nothing_out() -> None:
    for pool in (BlockPool(0), BlockPool(1)):
        assert pool.num_free == pool.usable == 0
        with pytest.raises(AssertionError):
            pool.allocate()


def test_releasing_too_often_is_our_bug() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release((block,))
    with pytest.raises(AssertionError, match="released more often"):
        pool.release((block,))


def test_the_check_finds_a_lost_reference() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(AssertionError, match=f"block {block}: 1 references, 0 owners"):
        pool.check_integrity({})
