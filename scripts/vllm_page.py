"""Writes the tables of docs/coming-from-vllm.md from frontend/compat.json: what becomes of settings and parameters."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from typing import Any

from documents import is_current, only_checks, replace_part

from wavecore.engine_core.api import sampling_params as core
from wavecore.engine_core.api.fields import defaults
from wavecore.frontend.compat import ANY, FOREIGN, FOREIGN_SAMPLING, RENAMED, SETTINGS
from wavecore.frontend.vllm.modules import MODULES
from wavecore.frontend.vllm.params import SamplingParams

PAGE = "docs/coming-from-vllm.md"


def shown(value: Any) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def treatment(rule: Mapping[str, Any]) -> str:
    """What becomes of a name that is vLLM's alone."""
    if rule.get("allowed") == ANY:
        note = rule.get("note")
        return f"accepted, with a warning: {note}" if note else "accepted: it changes no answer"
    values = (rule.get("default"), *rule.get("allowed", ()))
    accepted = dict.fromkeys(shown(value) for value in values if value is not None)
    taken = f"accepted at {', '.join(accepted)}" if accepted else "accepted where it is not set"
    return f"{taken}; else refused: {rule['otherwise']}" if "otherwise" in rule else taken


def rows(names: Mapping[str, Any], ours: Container[str], rules: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of vLLM's names with their defaults."""
    lines = ["| vLLM | default there | here |", "|---|---|---|"]
    for name, default in names.items():
        rule = rules.get(name, {})
        here = "; ".join(["taken", *filter(None, [rule.get("otherwise")])]) if name in ours else treatment(rule)
        lines.append(f"| `{name}` | {shown(default)} | {here.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def parts() -> dict[str, str]:
    current = {name: rule["default"] for name, rule in FOREIGN.items() if "default" in rule}
    older = [f"| `{name}` | {treatment(rule)} |" for name, rule in FOREIGN.items() if "default" not in rule]
    older += [f"| `{name}` | taken as `{ours}` |" for name, ours in RENAMED.items()]
    own = [*defaults(core.SamplingParams), "output_kind", "best_of"]
    modules = [
        f"| `vllm{'.' * bool(name)}{name}` | {', '.join(f'`{n}`' for n in names)} |"
        for name, names in MODULES.items()
        if names
    ]
    return {
        "settings": rows(current, SETTINGS, FOREIGN),
        "older settings": "\n".join(["| name | here |", "|---|---|", *older]),
        "sampling": rows(SamplingParams.defaults, own, FOREIGN_SAMPLING),
        "modules": "\n".join(["| module | names |", "|---|---|", *modules]),
    }


def main() -> int:
    if only_checks(__doc__):
        return int(not all(is_current(PAGE, name, body) for name, body in parts().items()))
    for name, body in parts().items():
        replace_part(PAGE, name, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
