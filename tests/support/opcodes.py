"""Something happens between two chosen instructions of our code, as a signal handler or the collector may make it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class AtOpcode:
    """A context in which `action` is called before the `number`-th instruction that this thread runs in wavecore.

    Attributes:
        count: instructions so far.
    """

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.count = 0
        self._number, self._action = number, action

    def __enter__(self) -> AtOpcode:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if "/wavecore/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._instruction

    def _instruction(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self._number:
                sys.settrace(self._before)
                self._action()
        return self._instruction
