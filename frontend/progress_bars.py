"""Progress bars of a start and of a batch; on a terminal or notebook by default, silent elsewhere."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.std import tqdm

from wavecore.frontend.outputs import RequestOutput
from wavecore.transport.wire.checks import OF_REQUEST

PHASES: dict[str, tuple[str, int, int]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Phases of a start in their order: in words, and the percent at which each begins and ends. A start may leave some
out."""

UseTqdm = bool | Callable[..., Any]
"""Whether a batch shows its progress; a function makes the bar, as `tqdm` does."""


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # tqdm's watch over slow bars is a thread that stays for ever


def _hidden() -> bool:
    """Bars are for people: a terminal or a notebook, not a log file."""
    try:
        for_people = sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # what a program put in its place, or closed
        return True
    return not for_people and "ipykernel" not in sys.modules


class StartBar(_Bar):
    """A start as one bar that only grows. Use as a context manager; call it as a supervisor's `progress`."""

    def __init__(self, disable: bool) -> None:
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
        hidden = disable or _hidden()
        super().__init__(total=100, desc="starting the engine", bar_format=form, disable=hidden, leave=False)

    def __call__(self, _engine: int, phase: str, fraction: float) -> None:
        words, begin, end = PHASES.get(phase, (phase, 0, 0))
        self.set_description_str(words, refresh=False)
        self.n = max(self.n, round(begin + (end - begin) * fraction))
        self.refresh()


class BatchBar:
    """Finished requests, with tokens a second in both directions."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        make: Any = use_tqdm
        if not callable(make):
            make = partial(_Bar, disable=not OF_REQUEST.flag("use_tqdm", use_tqdm) or _hidden())
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._input = self._output = 0

    def done(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(o.token_ids) for o in output.outputs)
        elapsed = float(self._bar.format_dict["elapsed"]) or 1e-9
        rates = f"input: {self._input / elapsed:.2f} tok/s, output: {self._output / elapsed:.2f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
