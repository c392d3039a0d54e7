"""Bytes of one GPU by use, and the settings under which they fit. Knows no torch.

|-- weights --|- tables -|- activations -|- graphs -|------ KV cache ------|- left free -|- others -|
`------------------ at most gpu_memory_utilization * total ----------------'
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30


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
