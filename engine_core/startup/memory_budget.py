"""Bytes of one GPU by use, and the settings under which they fit. Knows no torch.

|-- weights --|- tables -|- activations -|- graphs -|------ KV cache ------|- left free -|- others -|
`------------------ at most gpu_memory_utilization * total ----------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wavecore.engine_core.api.config import EngineConfig
from wavecore.transport.errors import ConfigError, ResourceError, WavecoreError

GIB = 1 << 30
MARGIN = 128 << 20  # no two starts measure quite the same: what one suggests should fit the next
Settings = dict[str, float | str]
"""A few settings with other values, which together make room."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a KV cache is made of.

    Attributes:
        size, nbytes: tokens and bytes of a block.
        least: the null block and one sequence of max_model_len; without one any length will do.
        longer_tables: bytes by which a larger cache may lengthen the tables of requests.
    """

    size: int
    nbytes: int
    least: int
    longer_tables: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes of one GPU by use, without the KV cache.

    Attributes:
        total: of the device.
        utilization: gpu_memory_utilization, the share of `total` that this engine may use, KV cache included.
        weights: of the model, with its rotary tables.
        tables: what is kept for each of max_num_seqs requests, and the buffers of a step.
        activations: what the largest steps take beside them, with a little slack.
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
        """What is left for the KV cache: of the engine's share, and of the device."""
        room = min(int(self.total * self.utilization), self.total - self.others)
        return max(0, room - self.weights - self.tables - self.activations - self.graphs)

    def ways_out(self, config: EngineConfig, blocks: Blocks) -> list[Settings]:
        """Settings that make room for the least KV cache, with a margin; an empty one where none need change."""
        asked = config.num_gpu_blocks_override
        if asked:
            fits = (replace(self, utilization=1.0).kv_cache - MARGIN) // blocks.nbytes
            return [{}] if fits >= asked else [{"num_gpu_blocks_override": fits}] if fits > 1 else []
        need = blocks.least * blocks.nbytes + MARGIN
        if self.kv_cache >= need:
            return [{}]
        ways: list[Settings] = []
        share = self.fitting_utilization(need + blocks.longer_tables)
        if share is not None:
            ways.append({"gpu_memory_utilization": share})
        length = ((self.kv_cache - MARGIN) // blocks.nbytes - 1) * blocks.size
        if config.max_model_len and length > 0:
            ways.append({"max_model_len": length})
        if ways or self.utilization == 1 or not config.max_model_len:
            return ways
        wide = replace(self, utilization=1.0).ways_out(config, blocks)
        return [{"gpu_memory_utilization": 1.0, **way} for way in wide]

    def fitting_utilization(self, kv_cache: int) -> float | None:
        """The least gpu_memory_utilization, in hundredths, that leaves `kv_cache` bytes; None: others hold too much."""
        least = self.weights + self.tables + self.activations + self.graphs + kv_cache
        for hundredths in range(max(1, 100 * least // self.total), 101):
            if replace(self, utilization=hundredths / 100).kv_cache >= kv_cache:
                return hundredths / 100
        return None

    def table(self, num_blocks: int, block_bytes: int, processes: str) -> str:
        """The start's report.

        Args:
            processes: who the others are.
        """
        rows = [
            ("weights", self.weights),
            ("tables of the requests and buffers of a step", self.tables),
            ("activations of the largest step", self.activations),
            ("graphs, reserved", self.graphs),
            (f"KV cache, {num_blocks} blocks", num_blocks * block_bytes),
            (f"others: CUDA context and processes {processes}", self.others),
        ]
        rows += [("left free", self.total - sum(size for _, size in rows)), ("total", self.total)]
        lines = (f"  {size / GIB:8.2f} GiB  {name}" for name, size in rows)
        return f"GPU memory, gpu_memory_utilization {self.utilization:g}\n" + "\n".join(lines)


def no_room(what: str, ways: Sequence[Settings], *, dtype: str = "", table: str = "") -> WavecoreError:
    """A refusal: what does not fit, the settings under which it would, and the table.

    Args:
        dtype: of the model; where no way is known, smaller numbers may be one.
    """
    if ways:
        words = ", or ".join(_words(way) for way in ways)
        return ConfigError(f"{what}; it would fit with {words}{table}")
    setting = "no setting but perhaps dtype bfloat16" if dtype == "float32" else "no setting"
    return ResourceError(
        f"{what}, and {setting} makes room: free what other processes hold, or use another device or a smaller model"
        f"{table}"
    )


def _words(way: Settings) -> str:
    return " and ".join(f"{name} {value}" for name, value in way.items()) or "these settings, started again"
