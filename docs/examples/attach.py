"""Several programs, one engine: attach to an engine that runs already.

wavecore engine ./my-model                             # prints its runtime directory
python docs/examples/attach.py RUNTIME_DIRECTORY       # in another terminal, as often as you like

python docs/examples/attach.py [MODEL]                 # or both at once
"""

from __future__ import annotations

import sys
from pathlib import Path

from wavecore import LLM, SamplingParams, connect


def ask(runtime_dir: str | Path, prompt: str) -> None:
    # What `connect` gives is an `LLM`; leaving the block lets go of the engine and does not end it.
    with connect(runtime_dir) as llm:
        [output] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
        print(f"{prompt!r} -> {output.outputs[0].text!r}")


def main(where: str) -> None:
    if (Path(where) / "deployment.json").exists():
        ask(where, "The capital of Italy is")
        return
    with LLM(where) as owner:
        # The directory belongs to this user alone, and so does the right to attach.
        ask(owner.runtime_dir, "The capital of Italy is")
        ask(owner.runtime_dir, "The capital of Spain is")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
