"""docs/faults.md and README.md say what the fault tests say."""

from __future__ import annotations

import runpy

from documents import ROOT


def test_the_table_is_in_step() -> None:
    module = runpy.run_path(str(ROOT / "scripts" / "fault_table.py"))
    assert module["TARGET"].read_text() == module["table"](), "run: python scripts/fault_table.py"
    assert module["README"].read_text() == module["readme"](), "run: python scripts/fault_table.py"
