"""What a long conversation costs before it is sent: 199 messages and 40 tools, with many special tokens.

    python scripts/bench_chat.py [--tokenizer FOLDER]

Compares with transformers' apply_chat_template, and measures how long an event loop stands still meanwhile. Without
--tokenizer it trains a small byte-level BPE and gives it as many special tokens as Llama 3.1 and DeepSeek-V3 have.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil
from bench_detokenize import small_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.messages import ChatOptions
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.text.tokenizer_files import load_tokenizer

ROUNDS = 20
TEMPLATE = """{%- if tools %}<|start|>system
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}<|end|>
{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}
{{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
WORDS = "word17 größer 你好 word403, of <b>several</b> words [and] marks | "
MESSAGES = [{"role": "assistant" if i % 2 else "user", "content": WORDS * (1 + i % 9)} for i in range(199)]
FIELD = {"type": "string", "description": WORDS, "enum": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "description": WORDS, "parameters": {"x": FIELD, "y": FIELD}}}
    for i in range(40)
]


def milliseconds(call: Callable[[], Any]) -> float:
    """The least of some rounds, as others may use the cores."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


async def longest_block(call: Callable[[], Any]) -> float:
    """Milliseconds that an event loop stands still at a time while the call runs in a thread; median over rounds."""
    blocks = []
    for _ in range(ROUNDS):
        task, longest = asyncio.create_task(asyncio.to_thread(call)), 0.0
        while not task.done():
            started = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - started)
        blocks.append(longest)
    return 1e3 * sorted(blocks)[ROUNDS // 2]


def compare(name: str, ours: Tokenizer, template: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours.backend, chat_template=template)
    options = ChatOptions(tools=TOOLS)

    def transformers() -> Any:
        return theirs.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True, return_dict=False)

    def wavecore() -> Any:
        return ours.render_chat(MESSAGES, options)[1]

    assert wavecore() == transformers()
    started = time.perf_counter()
    ours.close()
    wavecore()
    first = 1e3 * (time.perf_counter() - started)
    [process] = psutil.Process().children()
    print(
        f"{name:<28}{len(wavecore()):>7} tokens: transformers {milliseconds(transformers):6.1f} ms, "
        f"wavecore {milliseconds(wavecore):6.1f} ms, the first {first:5.0f} ms; "
        f"loop blocked {asyncio.run(longest_block(wavecore)):4.1f} ms "
        f"({asyncio.run(longest_block(lambda: time.sleep(0.05))):.1f} by others); "
        f"template process {process.memory_info().rss / 2**20:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="", help="a folder with a chat template")
    args = parser.parse_args()
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
        assert tokenizer.chat_template is not None
        compare(args.tokenizer, tokenizer, tokenizer.chat_template.source)
        return
    for name, texts in (
        ("256 as in Llama 3.1", [f"<|reserved_special_token_{i}|>" for i in range(254)]),
        ("804 as in DeepSeek-V3", [f"<｜place▁holder▁no▁{i}｜>" for i in range(802)]),
    ):
        backend = small_tokenizer()
        backend.add_special_tokens([AddedToken(text) for text in ("<|start|>", "<|end|>", *texts)])
        compare(name, Tokenizer(backend, "bench", ChatTemplate(TEMPLATE, "bench")), TEMPLATE)


if __name__ == "__main__":
    main()
