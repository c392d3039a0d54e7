"""Transfers of blocks between device and host, and who owns the blocks meanwhile. Bookkeeping; `block_copies` copies.

The swaps of a plan are one transfer. It owns a reference to every block that it reads or writes until it lands: until
the runner said that it is done, or until all further plans are told to run behind it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from wavecore.engine_core.kv_cache.block_pool import BlockPool
from wavecore.engine_core.request import Request


@dataclass(slots=True)
class Transfer:
    """The swaps of one plan; `loading` are the requests that wait for it."""

    step_id: int
    owned: list[tuple[BlockPool, int]] = field(default_factory=list)
    loading: list[Request] = field(default_factory=list)

    def own(self, pool: BlockPool, block: int) -> None:
        pool.acquire((block,))
        self.owned.append((pool, block))


class Transfers:
    """All transfers that have not landed, oldest first.

    Attributes:
        after: the plan in the making and all further ones must run behind the transfers of all plans up to this one;
            -1 behind none.
    """

    def __init__(self) -> None:
        self.after = -1
        self._queue: deque[Transfer] = deque()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def of(self, step_id: int) -> Transfer:
        """The transfer of the plan in the making."""
        if not self._queue or self._queue[-1].step_id != step_id:
            self._queue.append(Transfer(step_id))
        return self._queue[-1]

    def leaving(self, pool: BlockPool) -> int:
        """Blocks that nobody else holds: they come free when their transfer lands."""
        owned = (entry for transfer in self._queue for entry in transfer.owned)
        return sum(owner is pool and pool.refs(block) == 1 for owner, block in owned)

    def land(self, step_id: int) -> list[Request]:
        """The transfers of plans up to `step_id` give back what they own. Returns the requests that they loaded."""
        self.after = max(self.after, step_id)
        loaded: list[Request] = []
        while self._queue and self._queue[0].step_id <= step_id:
            transfer = self._queue.popleft()
            for pool, block in reversed(transfer.owned):  # tail first, see BlockPool.release
                pool.release((block,))
            loaded += transfer.loading
        return loaded
