"""A small runner on CUDA, prompts, and plans to run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import VOCAB
from tests.support.model_driver import load

from wavecore.engine_core.plan import StepPlan, StepResult


def make(folder: Path, **settings: Any) -> Any:
    return load(folder, device="cuda", dtype="float32", block_size=16, max_logprobs=-1, **settings)


def prompt(i: int, length: int) -> list[int]:
    return np.random.default_rng(i).integers(0, VOCAB, length).tolist()


@contextmanager
def recorded(runner: Any) -> Iterator[list[tuple[StepPlan, StepResult]]]:
    """Every plan that is run meanwhile, and its result; without captures."""
    steps: list[tuple[StepPlan, StepResult]] = []
    launch = runner.launch

    class Recording:
        def __init__(self, plan: StepPlan) -> None:
            self.plan, self.pending = plan, launch(plan)

        def wait(self) -> StepResult:
            result = self.pending.wait()
            if not self.plan.captures:
                steps.append((self.plan, result))
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", Recording)
        yield steps
