"""Draws docs/top.svg: what `wavecore top` shows of a scripted engine under load.

python scripts/top_picture.py [FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
import threading
from pathlib import Path

from rich.console import Console

from wavecore import LLM, SamplingParams
from wavecore.frontend.cli import top
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.prompts import TokensPrompt

WIDTH = 118
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).parents[1] / "docs" / "top.svg")
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"step_seconds": 0.02, "eos_token_id": [], "vocab_size": 500, "num_blocks": 60}))
        with LLM(f"scripted:{script}", max_num_seqs=6, block_size=16) as llm:
            prompts = [TokensPrompt(prompt_token_ids=list(range(5 + i, 60 + 7 * i))) for i in range(12)]
            load = threading.Thread(target=llm.generate, args=(prompts, PARAMS), kwargs={"use_tqdm": False})
            load.start()
            client = EngineClient(llm.runtime_dir)
            console = Console(record=True, width=WIDTH, file=io.StringIO())
            console.print(top.tables(next(top.views_of(client, 1.0, 20))))
            client.close()
            load.join()
    drawn = console.export_svg(title="wavecore top DIR", unique_id="top")
    file.write_text(re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")  # from elsewhere


if __name__ == "__main__":
    main()
