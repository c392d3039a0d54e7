"""Whole experts spread over ranks: the tokens of all engines go to each rank, and the sums of their experts back.

Ranks of one engine have the same tokens anyway, so only engines exchange. No rank learns which experts a token wants
before it computes them: what is exchanged has a size that all ranks agreed on, which a CUDA graph can hold.
"""

from torch import Tensor

from wavecore.kernels import ops
from wavecore.parallel.collectives import ALONE, Collectives


class Exchange:
    """Between the ranks of the same place in each engine. All of them call the same with as many tokens.

    Args:
        peers: these ranks; alone, nothing is exchanged.
    """

    def __init__(self, peers: Collectives = ALONE) -> None:
        self._peers, self.size = peers, peers.size

    def gather(self, x: Tensor) -> Tensor:
        """Of each engine's x [T, ...], in order: [size * T, ...]."""
        return x if self.size == 1 else self._peers.all_gather(x).flatten(0, 1)

    def scatter(self, x: Tensor) -> Tensor:
        """This engine's part [T, ...] of the sum of all x [size * T, ...]."""
        return self._peers.reduce_scatter(x)

    def least(self, value: int) -> int:
        """The least of the peers' numbers; see `Collectives.least`."""
        return self._peers.least(value)


def spread_experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kv_slots: Tensor,
    top_k: int,
    normalize: bool,
    first: int,
    exchange: Exchange,
) -> Tensor:
    """A mixture of experts of which this rank has some; see `kernels.reference.moe`.

    Args:
        x: [T, H] of this engine.
        router: [E, H].
        gate_up, down, top_k, normalize, first: of `ops.moe`.
        kv_slots: int32 [size * T], of all engines.

    Returns:
        [T, H]: the sum over the experts of these ranks.
    """
    tokens = exchange.gather(x)
    scores = ops.linear(tokens, router)
    return exchange.scatter(ops.moe(tokens, scores, gate_up, down, kv_slots, top_k, normalize, first))
