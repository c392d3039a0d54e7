"""Bytes of one GPU by use, the settings under which they fit, and the refusal where they do not.

|-- weights --|- tables -|- activations -|- graphs -|------ KV cache ------|- left free -|- others -|
`------------------ at most gpu_memory_utilization * total ----------------'
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.out_of_memory import shortage
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

GIB = 1 << 30
MARGIN = 128 << 20  # no two starts measure quite the same: what one suggests should fit the next
SLACK = 256 << 20  # fragments of the allocator, embeddings of a second step in flight, kernels that are loaded later
SMALLER_STEPS = "lower max_num_batched_tokens and max_num_seqs"  # how far, nobody has measured


def gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"


@dataclass(frozen=True, slots=True)
class KVCacheNeed:
    """The least KV cache with which an engine starts.

    Attributes:
        block_size, block_bytes: tokens and bytes of a block.
        least: blocks: num_gpu_blocks_override where it is set, else the null block and one sequence of max_model_len;
            without a max_model_len any length will do.
        longer_tables: bytes by which a larger cache may lengthen the tables of requests.
    """

    block_size: int
    block_bytes: int
    least: int
    longer_tables: int

    @property
    def nbytes(self) -> int:
        return self.least * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one GPU by use, without the KV cache.

    Attributes:
        total: of the device.
        utilization: the share of `total` that this engine may use, KV cache included.
        weights: of the model, with its rotary tables.
        tables: what is kept for each of max_num_seqs requests, and the buffers of a step.
        activations: what the largest steps take beside them, SLACK included.
        graphs: reserved for CUDA graphs.
        others: other processes, and the CUDA context of this one; no part of the engine's share, but not free either.
    """

    total: int
    utilization: float
    weights: int
    tables: int
    activations: int
    graphs: int
    others: int

    @property
    def kv_cache(self) -> int:
        """What is left of the engine's share, and of the device; below zero by what is missing."""
        room = min(int(self.total * self.utilization), self.total - self.others)
        return room - self.weights - self.tables - self.activations - self.graphs

    def advice(self, config: EngineConfig, need: KVCacheNeed) -> str:
        """What makes room for the least KV cache: settings with a margin, else smaller steps; "" where nothing does."""
        return would_fit(self._fitting_settings(config, need)) or self.advice_on_steps(need)

    def advice_on_steps(self, need: KVCacheNeed) -> str:
        """To make steps smaller, where ones that take next to nothing would leave room for a KV cache; else ""."""
        smallest = replace(self, utilization=1.0, tables=0, activations=SLACK, graphs=0)
        return SMALLER_STEPS if smallest.kv_cache >= 2 * need.block_bytes + MARGIN else ""

    def _fitting_settings(self, config: EngineConfig, need: KVCacheNeed) -> list[str]:
        if config.num_gpu_blocks_override:
            blocks = (self.kv_cache - MARGIN) // need.block_bytes
            return [f"num_gpu_blocks_override {blocks}"] if blocks > 1 else []
        found = []
        utilization = self.fitting_utilization(need.nbytes + need.longer_tables + MARGIN)
        if utilization is not None:
            found.append(f"gpu_memory_utilization {utilization}")
        if config.max_model_len:
            whole = replace(self, utilization=1.0)
            if length := self._fitting_length(need):
                found.append(f"max_model_len {length}")
            elif not found and (length := whole._fitting_length(need)):
                found.append(f"gpu_memory_utilization 1.0 and max_model_len {length}")
        return found

    def fitting_utilization(self, kv_cache: int) -> float | None:
        """The least gpu_memory_utilization, in hundredths, that leaves `kv_cache` bytes; None: others hold too much."""
        shares = (hundredths / 100 for hundredths in range(1, 101))
        return next((share for share in shares if replace(self, utilization=share).kv_cache >= kv_cache), None)

    def _fitting_length(self, need: KVCacheNeed) -> int:
        """Tokens of the longest sequence that fits beside the null block, 0 for none."""
        return max(0, (self.kv_cache - MARGIN) // need.block_bytes - 1) * need.block_size

    def table(self, num_blocks: int, block_bytes: int) -> str:
        """The start's report."""
        rows = [
            ("weights", self.weights),
            ("tables of the requests and buffers of a step", self.tables),
            ("activations of the largest step", self.activations),
            ("graphs, reserved", self.graphs),
            (f"KV cache, {num_blocks} blocks", num_blocks * block_bytes),
            ("others: CUDA context, and other processes (see nvidia-smi)", self.others),
        ]
        rows += [("left free", self.total - sum(size for _, size in rows)), ("total", self.total)]
        lines = (f"  {size / GIB:8.2f} GiB  {name}" for name, size in rows)
        return f"GPU memory, gpu_memory_utilization {self.utilization:g}\n" + "\n".join(lines)


def would_fit(settings: Sequence[str]) -> str:
    """Advice: settings of which any makes room; "" without one."""
    return f"it would fit with {', or '.join(settings)}" if settings else ""


def no_room(what: str, advice: str, table: str = "") -> WavecoreError:
    """A refusal: what does not fit, what would help ("": no setting does), and the table."""
    if advice:
        return ConfigError(f"{what}; {advice}{table}")
    way_out = "free what other processes hold, or use another device, a smaller model or a smaller dtype"
    return ResourceError(f"{what}, and no setting makes room: {way_out}{table}")


@contextmanager
def refused(what: str, advice: str) -> Iterator[None]:
    """Where memory runs short inside, the start is refused with what does not fit and why; see `no_room`."""
    try:
        yield
    except Exception as error:
        reason = shortage(error)
        if not reason:
            raise
        raise no_room(f"{what}: {reason}", advice) from error
