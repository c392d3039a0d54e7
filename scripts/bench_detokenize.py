"""What a step of 256 streams costs in the client: ids to text, with and without stop strings.

    python scripts/bench_detokenize.py [--tokenizer PATH] [--streams 256]

Prints microseconds a step: a Step into mailboxes, the same and out again as text, and detokenising alone.
Without --tokenizer it trains a small byte-level BPE; the cost of a step hardly depends on the vocabulary.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.engines import EngineState, RemoteEngine
from wavecore.frontend.client.in_flight import InFlight
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.text.detokenizer import ByteDetokenizer, ByteTable, StreamDetokenizer
from wavecore.frontend.text.stop_strings import StopStrings
from wavecore.frontend.text.tokenizer import Tokenizer as WavecoreTokenizer
from wavecore.frontend.text.tokenizer_files import load_tokenizer
from wavecore.transport.wire.messages import Step, StepTokens

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


class NoPump:
    """Takes requests and says nothing."""

    def send(self, *_: object) -> bytes:
        return b"client id"


def client_path(
    tokenizer: WavecoreTokenizer, streams: int, ids: list[list[list[int]]]
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """The client's two halves of a step: the IO thread delivers, the consumers take."""
    engine = RemoteEngine(0, EngineState.UP, client_id=b"client id")
    requests = InFlight(NoPump(), [engine])  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=None)
    request = EngineRequest("r", None, np.ones(4, np.int32), params, params.to_wire())
    mailboxes = [Mailbox(request, tokenizer, ThreadNotifier(), OutputKind.DELTA) for _ in range(streams)]
    for mailbox in mailboxes:
        requests.submit(mailbox)
    handles = np.arange(1, streams + 1, dtype=np.uint32)
    ones, zeros = np.ones(streams, np.uint32), np.zeros(streams, np.uint8)

    def deliver(i: int) -> None:
        tokens = np.array(ids[i], np.int32).ravel()
        requests.deliver(engine, Step(b"", i, StepTokens(handles, ones, tokens, zeros)))

    def deliver_and_take(i: int) -> None:
        deliver(i)
        for mailbox in mailboxes:
            mailbox.take()

    return deliver, deliver_and_take


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

    deliver, deliver_and_take = client_path(WavecoreTokenizer(backend, "bench"), args.streams, ids)
    for name, step in (
        ("deliver a Step", deliver),
        ("deliver and take with text", deliver_and_take),
        ("byte table", by_table),
        ("byte table, 2 stop strings", by_table_with_stops),
        ("DecodeStream", by_stream),
    ):
        print(f"{name:<28}{microseconds_a_step(step):>10.1f} us a step of {args.streams} streams")


if __name__ == "__main__":
    main()
