"""One rank's share of a model: its own architecture in numbers, and what of each parameter it holds.

Ranks share heads, the MLP's inner width and the rows of the vocabulary (see parallel/layers.py); norms, and the biases
behind sums over ranks, are whole on each. Where there are more ranks than KV heads, several hold the same one. Experts
are shared like other MLPs, or each rank has some whole ones (see parallel/experts.py).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from wavecore.engine_core.models.spec import ModelSpec
from wavecore.transport.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows [begin, end) of a whole parameter, as far as they are in `columns` (of a matrix), go to rows `row` and on of
    a rank's."""

    begin: int
    end: int
    row: int = 0
    columns: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Shard:
    """The share of `rank` of `size` in a model.

    Attributes:
        expert_ranks, expert_rank: ranks of all engines over which whole experts are spread, and which of them this is;
            of one, experts are shared over `size` ranks.

    Raises:
        ConfigError: the heads, or the MLP, or the experts, do not divide; with the sizes that work.
    """

    whole: ModelSpec
    size: int = 1
    rank: int = 0
    expert_ranks: int = 1
    expert_rank: int = 0

    def __post_init__(self) -> None:
        spec = self.whole
        if self.expert_ranks > 1 and (not spec.num_experts or spec.num_experts % self.expert_ranks):
            numbers = ", ".join(str(n) for n in range(1, spec.num_experts + 1) if spec.num_experts % n == 0)
            works = f"numbers of ranks that work: {numbers}" if numbers else "leave it out"
            raise ConfigError(
                f"enable_expert_parallel: {spec.num_experts} experts do not divide over {self.expert_ranks} ranks, "
                f"data_parallel_size x tensor_parallel_size; {works}"
            )
        if not self._divides(self.size):
            widths = [n for n in (spec.intermediate_size, self._expert_width, spec.shared_size) if n]
            sizes = ", ".join(str(n) for n in range(1, spec.num_heads + 1) if self._divides(n))
            raise ConfigError(
                f"tensor_parallel_size {self.size}: {spec.num_heads} heads, {spec.num_kv_heads} KV heads and the "
                f"MLP's width {' and '.join(map(str, widths))} do not divide so; sizes that work: {sizes}"
            )

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture of what this rank computes."""
        spec = self.whole
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
            expert_size=spec.expert_size if self._is_spread else spec.expert_size // self.size,
            shared_size=spec.shared_size // self.size,
            num_shards=self.size,
            first_expert=self.expert_rank * (spec.num_experts // self.expert_ranks),
            own_experts=spec.num_experts // self.expert_ranks,
        )

    def cuts(self, param: str) -> list[Cut]:
        """What of a whole parameter this rank holds.

        Args:
            param: as `ModelSpec.shapes` names it.
        """
        name = param.rsplit(".", 1)[-1]
        kind = name.removesuffix("_bias")
        if kind == "qkv":
            return self._qkv()
        if self._is_spread and kind.startswith("experts"):
            rows = self.spec.shapes()[param][0]
            return [Cut(self.expert_rank * rows, (self.expert_rank + 1) * rows)]
        if kind in ("gate_up", "experts_gate_up"):
            pairs = self.whole.num_experts if kind == "experts_gate_up" else 1
            width, own = (s.shapes()[param][0] // (2 * pairs) for s in (self.whole, self.spec))
            first = self.rank * own
            return [Cut(i * width + first, i * width + first + own, i * own) for i in range(2 * pairs)]
        if name in ("o", "down", "experts_down"):
            rows, own = self.spec.shapes()[param]
            return [Cut(0, rows, columns=slice(self.rank * own, (self.rank + 1) * own))]
        if name in ("embed", "lm_head"):
            own, vocab = self.spec.shapes()[name][0], self.whole.vocab_size
            return [Cut(min(self.rank * own, vocab), min((self.rank + 1) * own, vocab))]
        return [Cut(0, self.whole.shapes()[param][0])]

    def _qkv(self) -> list[Cut]:
        whole, own, dim = self.whole, self.spec, self.whole.head_dim
        query = own.num_heads * dim
        kv = self.rank * whole.num_kv_heads // self.size * dim
        keys, values = whole.num_heads * dim, (whole.num_heads + whole.num_kv_heads) * dim
        width = own.num_kv_heads * dim
        return [
            Cut(self.rank * query, (self.rank + 1) * query),
            Cut(keys + kv, keys + kv + width, query),
            Cut(values + kv, values + kv + width, query + width),
        ]

    @property
    def _is_spread(self) -> bool:
        return self.expert_ranks > 1

    @property
    def _expert_width(self) -> int:
        """What ranks share of an expert."""
        return 0 if self._is_spread else self.whole.expert_size

    def _divides(self, size: int) -> bool:
        spec = self.whole
        widths = spec.num_heads, spec.intermediate_size, self._expert_width, spec.shared_size
        return not (any(n % size for n in widths) or (spec.num_kv_heads % size and size % spec.num_kv_heads))
