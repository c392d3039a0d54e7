"""Writes docs/settings.md, the page of settings, from EngineConfig: its fields, their defaults and its docstring."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import get_args

from documents import ROOT, only_checks

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.cli.parser import field_help

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Made by `python scripts/settings_page.py` from `EngineConfig` (`engine_core/api/config.py`).

A setting has one name in all places. The higher place wins:

| Place | Example |
|---|---|
| keyword argument, or flag | `LLM(model, max_num_seqs=64)`, `--max-num-seqs 64` |
| environment variable | `WAVECORE_MAX_NUM_SEQS=64`; in Python for every setting but the model |
| YAML file of `--config` | `max_num_seqs: 64`; `wavecore engine --print_config` writes such a file |

A value that cannot work is refused by the setting's name, before anything is loaded.

| Setting | Default | Meaning |
|---|---|---|
"""


def choices_of(name: str, told: str) -> str:
    """The values of a setting that has only a few, where its text does not name them all."""
    hints = inspect.get_annotations(EngineConfig, eval_str=True)
    values = [f'"{value}"' for value in get_args(hints[name]) if isinstance(value, str)]
    return "" if all(value in told for value in values) else f" One of {', '.join(values)}."


def default_of(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def page() -> str:
    told = field_help(EngineConfig)
    names = [field.name for field in fields(EngineConfig)]
    if missing := [name for name in names if name not in told]:
        raise SystemExit(f"EngineConfig's docstring says nothing of {', '.join(missing)}")
    rows = [
        f"| `{field.name}` | `{default_of(field.default)}` |"
        f" {told[field.name]}{choices_of(field.name, told[field.name])} |"
        for field in fields(EngineConfig)
    ]
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    text = page()
    if only_checks(__doc__):
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
