"""Throw damaged input at everything that decodes bytes from outside, and check that it says no in its own words.

    python scripts/fuzz_wire.py --seconds 300 --seed 1

Decoders: frames on the wire, ADD messages taken in as requests, GGUF headers, deployment.json, addresses.
A decoder may give a value or raise the error that its documentation names. A frame that is accepted must encode to
the same bytes again. Anything else ends the run with exit code 1, the seed and the input as hex.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.gguf_file import read_gguf
from wavecore.engine_core.loop.admission import request_from_add
from wavecore.engine_core.plan import RunnerInfo
from wavecore.transport.addresses import parse_address
from wavecore.transport.errors import (
    ConfigError,
    ModelError,
    NotSupportedError,
    ProtocolError,
    StartError,
    ValidationError,
)
from wavecore.transport.processes import deployment
from wavecore.transport.wire import messages
from wavecore.transport.wire.codec import decode, encode
from wavecore.transport.wire.step_tokens import finish_rows
from wavecore.transport.wire.tensors import DTYPES

TOKEN = bytes(range(16))
ODD_NUMBERS = (0, 1, -1, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
ODD_BYTES = b"\x00\x01\x7f\x80\x90\x91\xa0\xc0\xc1\xc4\xc6\xc7\xc9\xcb\xcf\xd3\xd4\xdb\xdc\xdd\xde\xdf\xff"
PARAMS = ("n", "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "repetition_penalty", "logit_bias",
          "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos",
          "logprobs", "prompt_logprobs", "unknown")  # fmt: skip
OPTIONS = ("priority", "cache_salt", "timeout", "queue_timeout", "first_token_timeout", "data_parallel_rank",
           "pooling", "emitted", "unknown")  # fmt: skip
INFO = RunnerInfo(64, 0, 16, 512, 1000, 8, (2,), "float32", "cpu")
CONFIG = EngineConfig(model="scripted:none")


class Source:
    """Random messages, values and damage, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.last: tuple[Any, ...] = ()  # what the decoder was given, for the report

    def value(self, depth: int = 0) -> Any:
        pick = self.random.randrange(10 if depth < 4 else 7)
        if pick < 3:
            return self.random.choice(ODD_NUMBERS)
        if pick < 7:
            return self.random.choice([None, True, 0.5, -1.0, float("inf"), float("nan"), "", "text", "ü", b"bytes"])
        if pick < 9:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        keys = [self.random.choice(["a", "b", 1, 2]) for _ in range(3)]
        return {key: self.value(depth + 1) for key in keys}

    def table(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self.value() for name in self.random.sample(names, self.random.randrange(4))}

    def tensor(self, dtype: str | None = None) -> messages.TensorFrame:
        name = dtype or self.random.choice(sorted(DTYPES))
        shape = tuple(self.random.randrange(6) for _ in range(1 if dtype else self.random.randrange(4)))
        if self.random.random() < 0.02:
            shape = (70_000,)
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[name].itemsize
        return messages.TensorFrame(name, shape, self.random.randbytes(size))

    def tokens(self) -> messages.TensorFrame:
        ids = [self.random.choice([1, 2, 999, *([1000, -1] if self.random.random() < 0.1 else [])]) for _ in range(9)]
        return messages.TensorFrame("int32", (len(ids),), np.array(ids, np.int32).tobytes())

    def step_tokens(self) -> messages.StepTokens:
        if self.random.random() < 0.3:
            return finish_rows(range(self.random.randrange(4)), messages.FinishReason.ERROR, "code", "text")
        counts = np.array([self.random.randrange(3) for _ in range(self.random.randrange(6))], np.uint32)
        frames = tuple(self.tensor() for _ in range(self.random.randrange(3)))
        extras = {0: {"logprobs": list(range(len(frames))), "seed": 5}} if len(counts) else {}
        return messages.StepTokens(
            np.arange(len(counts), dtype=np.uint32),
            counts,
            np.arange(int(counts.sum()), dtype=np.int32),
            np.zeros(len(counts), np.uint8),
            extras,
            frames,
        )

    def number(self) -> int:
        return self.random.choice([0, 1, 77, (1 << 63) - 1])

    def add(self) -> messages.Add:
        prompt = self.tokens() if self.random.random() < 0.8 else self.tensor()
        embeds = self.tensor() if self.random.random() < 0.1 else None
        params, options = self.table(PARAMS), self.table(OPTIONS)
        return messages.Add(
            TOKEN, TOKEN, self.number(), self.random.randrange(1 << 32), prompt, params, options, embeds
        )

    def message(self) -> messages.Message:
        n, table = self.number, self.table(PARAMS)

        def load() -> messages.Load:
            return messages.Load(n(), n(), n())

        kinds: list[Callable[[], messages.Message]] = [
            self.add,
            lambda: messages.Abort(TOKEN, TOKEN, n(), np.arange(self.random.randrange(5), dtype=np.uint32)),
            lambda: messages.Utility(TOKEN, TOKEN, n(), n(), "method", table),
            messages.Hello,
            lambda: messages.Ping(TOKEN, n(), True),
            lambda: messages.Ready(TOKEN, table),
            lambda: messages.Step(TOKEN, n(), self.step_tokens(), load()),
            lambda: messages.Result(TOKEN, n(), n(), "", "", self.value(), (self.tensor(), self.tensor())),
            lambda: messages.Heartbeat(TOKEN, n(), load(), True),
            lambda: messages.UnknownClient(TOKEN),
            lambda: messages.Dead(TOKEN, "code", "message", "phase"),
            lambda: messages.Piece(TOKEN, TOKEN, n(), 1, np.array([5, 0], np.uint32), self.tensor()),
            lambda: messages.Mark(TOKEN, TOKEN, n(), n()),
        ]
        return self.random.choice(kinds)()

    def damage(self, data: bytes) -> bytes:
        """A few edits: flip, cut, insert, repeat, overwrite a length."""
        raw = bytearray(data)
        for _ in range(self.random.choice([0, 1, 1, 2, 5])):
            if not raw:
                return self.random.randbytes(self.random.randrange(40))
            at = self.random.randrange(min(len(raw), 400))
            action = self.random.randrange(6)
            if action == 0:
                raw[at] = self.random.randrange(256)
            elif action == 1:
                raw[at] = self.random.choice(ODD_BYTES)
            elif action == 2:
                del raw[at : at + self.random.randrange(1, 9)]
            elif action == 3:
                raw[at:at] = self.random.randbytes(self.random.randrange(1, 9))
            elif action == 4:
                raw[at:at] = raw[at : at + 40]
            else:
                raw[at : at + 8] = struct.pack("<Q", self.random.choice(ODD_NUMBERS) & 0xFFFFFFFFFFFFFFFF)
        return bytes(raw)


def fuzz_frames(source: Source) -> str:
    try:
        frames = [bytes(frame) for frame in encode(source.message())]
    except ProtocolError:  # a value that may not travel: the sender found out
        return "refused by the sender"
    original = list(frames)
    frames = [source.damage(frame) for frame in frames]
    if source.random.random() < 0.1:
        source.random.shuffle(frames)
    source.last = (frames,)
    try:
        again = encode(decode(frames))
    except ProtocolError:
        assert frames != original, "an undamaged message was refused"
        return "refused"
    # Another spelling of the same message is no fault; the second round must be exact.
    assert list(map(bytes, encode(decode(again)))) == list(map(bytes, again)), "accepted, but not exact"
    return "accepted"


def fuzz_requests(source: Source) -> str:
    try:
        add = decode(encode(source.add()))
        assert isinstance(add, messages.Add)
        source.last = (add,)
        request_from_add(add, INFO, CONFIG)
    except (ValidationError, ProtocolError, NotSupportedError):
        return "refused"
    return "accepted"


def fuzz_file(reader: Callable[[Path], object], path: Path, good: bytes, errors: tuple[type[Exception], ...]) -> Any:
    def fuzz(source: Source) -> str:
        data = source.damage(good)
        source.last = (data,)
        path.write_bytes(data)
        try:
            reader(path)
        except errors:
            return "refused"
        return "accepted"

    return fuzz


def fuzz_addresses(source: Source) -> str:
    text = source.random.choice(["tcp://127.0.0.1:80", "tcp://[::1]:80", "ipc:///tmp/x", "tcp://*:1", ""])
    text = source.damage(text.encode()).decode(errors="surrogateescape")
    source.last = (text,)
    if source.random.random() < 0.99 and text.startswith("tcp://") and not text.startswith("tcp://127"):
        return "skipped"  # names are looked up: rarely is often enough
    try:
        parse_address(text)
    except ConfigError:
        return "refused"
    return "accepted"


def gguf_header() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    pairs += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    tensor = text("weight") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + pairs + tensor
    return header + bytes(-len(header) % 32) + bytes(4 * 128)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    source = Source(seed)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        entry = deployment.EngineEntry(
            0, "ready", 1, "00" * 16, "ipc:///x", "ipc:///y", cause=deployment.Cause("a", "b")
        )
        state = deployment.Deployment("ready", 1, (entry,)).to_json().encode()
        file = Path(folder) / deployment.FILE
        targets: list[tuple[str, int, Callable[[Source], str]]] = [
            ("frames", 20, fuzz_frames),
            ("requests", 10, fuzz_requests),
            ("gguf", 2, fuzz_file(read_gguf, Path(folder) / "x.gguf", gguf_header(), (ModelError, NotSupportedError))),
            ("deployment", 2, fuzz_file(lambda path: deployment.read(path.parent), file, state, (StartError,))),
            ("addresses", 1, fuzz_addresses),
        ]
        deadline = time.monotonic() + args.seconds
        while time.monotonic() < deadline:
            for name, rounds, target in targets:
                for _ in range(rounds):
                    try:
                        outcome = target(source)
                    except Exception:
                        print(f"{name}: a fault with seed {seed}; input: {source.last!r:.4000}")
                        traceback.print_exc()
                        return 1
                    counts.setdefault(name, Counter())[outcome] += 1
    for name, outcomes in counts.items():
        print(f"{name:12s} {outcomes.total():9d} inputs: " + ", ".join(f"{n} {what}" for what, n in outcomes.items()))
    print("no fault found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
