"""A program, not a test: what becomes of an engine where a capture breaks, since something waits for the device.

Prints JSON: what some requests say without graphs and while the second capture breaks, how many graphs there are then,
how many complaints were logged, and bytes that the steps after it did not give back.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from tests.gpu.steps import make, prompt
from tests.support.model_driver import ModelDriver

from wavecore.kernels import ops


def main(folder: Path) -> None:
    complaints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wavecore.engine_core.execution.graphs").addHandler(handler)
    runner: Any = make(folder)

    def told() -> list[list[int]]:
        driver = ModelDriver(runner)
        return driver.run([driver.add(prompt(i, 20), 9, i) for i in range(5)])

    most, runner.graphs.most = runner.graphs.most, 0
    before = told()
    runner.graphs.most = most
    draw = ops.draw

    def waiting(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            logits.sum().item()
        return draw(logits, rows)

    ops.draw = waiting  # type: ignore[assignment]
    broken = told()
    allocated = torch.cuda.memory_allocated()
    for _ in range(3):
        told()
    kept = torch.cuda.memory_allocated() - allocated
    graphs = sum(graph is not None for graph in runner.graphs._graphs.values())
    json.dump(
        {"before": before, "broken": broken, "graphs": graphs, "complaints": len(complaints), "kept": kept}, sys.stdout
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
