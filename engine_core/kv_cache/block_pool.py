"""Fixed KV blocks with reference counts, a free list in eviction order, and the map from content hash to block.

A block whose count falls to 0 keeps its content and its hash until it is handed out again (lazy eviction), so a later
request may still find it. Order of the free list: blocks without a hash first (nothing to lose), then hashed ones,
least recently used first. Invariant: `find(hash) == block` exactly when `hash_of(block) == hash`.

Block 0 is the null block: never handed out, never freed; padded rows and unused table entries point at it.
"""

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Bookkeeping of `num_blocks` blocks, the null block included; 0 or 1 blocks make an empty pool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = max(num_blocks, 1)
        self.evictions = 0
        self._refs = [0] * self.num_blocks
        self._hash: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = OrderedDict[int, None].fromkeys(range(1, self.num_blocks))  # as it says above, the first one first

    @property
    def usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a hash, in use or not."""
        return len(self._block_of)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def find_all(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of these hashes, up to the first one that is not here."""
        blocks: list[int] = []
        for digest in digests:
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def hash_of(self, block: int) -> bytes | None:
        return self._hash[block]

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int:
        """Take the first free block, with one reference; its old content leaves the map here and not earlier."""
        assert self._free, "no block is free"
        block, _ = self._free.popitem(last=False)
        if self._hash[block] is not None:
            self.evictions += 1
            self.forget(block)
        self._refs[block] = 1
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; a free one leaves the free list with its content."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less. Give a sequence's blocks tail first: a suffix is useless without its prefix, so the
        suffix must be evicted earlier."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released more often than acquired"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> bool:
        """Make `block` findable. False when it has a hash already or another block holds the same content."""
        if self._hash[block] is not None or digest in self._block_of:
            return False
        self._hash[block] = digest
        self._block_of[digest] = block
        return True

    def forget(self, block: int) -> None:
        """Take the block's content out of the map (evicted, or not to be trusted any more)."""
        digest = self._hash[block]
        if digest is not None:
            self._hash[block] = None
            del self._block_of[digest]

    def forget_all(self) -> None:
        for block in list(self._block_of.values()):
            self.forget(block)

    def check_integrity(self, expected_refs: dict[int, int]) -> None:
        """Recount everything; AssertionError names the first difference. `expected_refs`: block -> owners counted."""
        assert self._refs[NULL_BLOCK] == 0 and self._hash[NULL_BLOCK] is None, "the null block was used"
        for block in range(1, self.num_blocks):
            owners = expected_refs.get(block, 0)
            assert self._refs[block] == owners, f"block {block}: {self._refs[block]} references, {owners} owners"
            assert (owners == 0) == (block in self._free), (
                f"block {block}: {owners} owners, free: {block in self._free}"
            )
        assert NULL_BLOCK not in expected_refs, "the null block has an owner"
        held = {digest: block for block, digest in enumerate(self._hash) if digest is not None}
        assert held == self._block_of, "prefix map and the blocks' hashes differ"
