"""What detokenising a step of 256 streams costs, with and without stop strings.

    python scripts/bench_detokenize.py [--tokenizer PATH] [--streams 256]

Prints microseconds a step; `bench_client.py` has the whole client.
Without --tokenizer it trains a small byte-level BPE; the cost of a step hardly depends on the vocabulary.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wavecore.frontend.text.detokenizer import ByteDetokenizer, ByteTable, StreamDetokenizer
from wavecore.frontend.text.stop_strings import StopStrings
from wavecore.frontend.text.tokenizer_files import load_tokenizer

STEPS = 200


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [f"word{i} größer 你好 " for i in range(2000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def microseconds_a_step(step: Callable[[int], None]) -> float:
    """Median over steps."""
    times = []
    for i in range(STEPS):
        started = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - started)
    return 1e6 * sorted(times)[STEPS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="", help="folder, tokenizer.json or .gguf")
    parser.add_argument("--streams", type=int, default=256)
    args = parser.parse_args()
    backend = load_tokenizer(args.tokenizer).backend if args.tokenizer else small_tokenizer()
    draw = random.Random(0)
    vocab = backend.get_vocab_size()
    ids = [[[draw.randrange(vocab)] for _ in range(args.streams)] for _ in range(STEPS)]
    table = ByteTable(backend, frozenset())
    for token in range(vocab):  # as after some minutes of serving
        table[token]
    fast = [ByteDetokenizer(table) for _ in range(args.streams)]
    slow = [StreamDetokenizer(backend, True, []) for _ in range(args.streams)]
    stops = [StopStrings(["</answer>", "\n\n"], False) for _ in range(args.streams)]

    def by_table(i: int) -> None:
        for detokenizer, new in zip(fast, ids[i], strict=True):
            detokenizer.feed(new)

    def by_table_with_stops(i: int) -> None:
        for detokenizer, stop, new in zip(fast, stops, ids[i], strict=True):
            stop.feed(detokenizer.feed(new))

    def by_stream(i: int) -> None:
        for detokenizer, new in zip(slow, ids[i], strict=True):
            detokenizer.feed(new)

    for name, step in (
        ("byte table", by_table),
        ("byte table, 2 stop strings", by_table_with_stops),
        ("DecodeStream", by_stream),
    ):
        print(f"{name:<28}{microseconds_a_step(step):>10.1f} us a step of {args.streams} streams")


if __name__ == "__main__":
    main()
