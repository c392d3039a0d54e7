"""An engine without a scheduler or a model: the real pumps around a loop that counts. Also a program of its own.

Request options come in `params`: count (tokens), per_step, frame (bytes of a tensor sent along with every step).
Token i of a handle is `token(handle, i)`, so a receiver can tell a hole, a duplicate or a mix-up from the value alone.
"""

from __future__ import annotations

import argparse
import json
import queue
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import ValidationError
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.client_stream import ClientLimits
from wavecore.transport.io.input_pump import InputPump
from wavecore.transport.io.io_thread import IoThreadFailed
from wavecore.transport.io.output_pump import ClientGone, OutputPump
from wavecore.transport.wire.messages import Abort, Add, FinishReason, Load, StepTokens, Utility
from wavecore.transport.wire.step_tokens import finish_rows
from wavecore.transport.wire.tensors import from_numpy


def quicken(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """A second of this process's pumps lasts a tenth of one."""
    for owner, name in ((ClientPump, "tick_seconds"), (OutputPump, "tick_seconds")):
        set_attribute(owner, name, 0.1 * getattr(owner, name))


def token(handle: int, index: int) -> int:
    return (handle * 7919 + index) % (1 << 31)


def payload(handle: int, index: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(size, token(handle, index) % 251, np.uint8)


class FakeEngine:
    """`added`, `aborted`, `gone` record what came in; `open` holds the requests that run."""

    def __init__(
        self,
        input_address: str,
        output_address: str,
        *,
        curve: CurveServer | None = None,
        limits: ClientLimits | None = None,
        pace: float = 0.0,
    ) -> None:
        self.epoch = secrets.token_bytes(16)
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.added: list[tuple[bytes, int]] = []
        self.aborted: list[int] = []
        self.gone: list[bytes] = []
        self.failed: list[IoThreadFailed] = []
        self.open: dict[tuple[bytes, int], list[int]] = {}  # -> [tokens sent, count, per_step, frame bytes]
        self.steps = 0
        self.admission = threading.Event()  # what slow requests and `hold` calls wait for
        self._pace = pace
        self.output = OutputPump(
            output_address,
            epoch=self.epoch,
            resolved={"model": "fake"},
            load=lambda client: Load(len(self.open), 0, 0),
            input_queue=self.queue,
            curve=curve,
            limits=limits,
        )
        try:
            self.input = InputPump(input_address, self.output, admit=self._admit, input_queue=self.queue, curve=curve)
        except BaseException:
            self.output.close()
            raise
        self.addresses = (self.input.endpoint, self.output.endpoint)
        self.loop = threading.Thread(target=self._loop, name="engine")
        for thread in (self.input, self.output, self.loop):
            thread.start()

    def stop(self) -> None:
        self.admission.set()
        self.queue.put(None)
        self.loop.join()
        self.input.close()
        self.output.close()

    def _admit(self, add: Add) -> Add:
        if add.params.get("refuse"):
            raise ValidationError("refuse", "as asked")
        if add.params.get("slow"):
            self.admission.wait()
        if add.params.get("bug"):
            raise KeyError("a bug in admit")
        return add

    def _loop(self) -> None:
        while True:
            try:
                if not self.open:
                    item = self.queue.get()
                else:
                    item = self.queue.get(timeout=self._pace) if self._pace else self.queue.get_nowait()
            except queue.Empty:
                self._step()
                continue
            if item is None:
                return
            self._apply(item)

    def _apply(self, item: Any) -> None:
        if isinstance(item, Add):
            params = item.params
            self.added.append((item.client_id, item.handle))
            self.open[item.client_id, item.handle] = [
                0, params.get("count", 1), params.get("per_step", 1), params.get("frame", 0)
            ]  # fmt: skip
        elif isinstance(item, Abort):
            for handle in item.handles.tolist():
                self.aborted.append(handle)
                if self.open.pop((item.client_id, handle), None) is not None:
                    self.output.put({item.client_id: finish_rows([handle], FinishReason.ABORT)})
        elif isinstance(item, ClientGone):
            self.gone.append(item.client_id)
            for key in [key for key in self.open if key[0] == item.client_id]:
                del self.open[key]
        elif isinstance(item, Utility):
            if item.method == "hold":
                self.admission.wait()
            if item.method == "echo":
                self.output.put_result(item.client_id, item.call, item.args)
            elif item.method == "frames":
                frames = [from_numpy(payload(item.call, i, size)) for i, size in enumerate(item.args["sizes"])]
                self.output.put_result(item.client_id, item.call, {"n": len(frames)}, frames)
            elif item.method == "unsendable":
                self.output.put_result(item.client_id, item.call, object())
            else:
                self.output.put_result(item.client_id, item.call, error=ValidationError("method", "unknown"))
        else:
            self.failed.append(item)

    def _step(self) -> None:
        self.steps += 1
        outputs: dict[bytes, list[Any]] = {}
        for (client, handle), state in list(self.open.items()):
            sent, count, per_step, frame = state
            tokens = [token(handle, i) for i in range(sent, min(sent + per_step, count))]
            state[0] += len(tokens)
            ended = state[0] >= count
            if ended:
                del self.open[client, handle]
            outputs.setdefault(client, []).append(
                (handle, tokens, FinishReason.LENGTH if ended else 0, payload(handle, sent, frame) if frame else None)
            )
        self.output.put({client: _step_tokens(rows) for client, rows in outputs.items()})


def _step_tokens(rows: list[Any]) -> StepTokens:
    frames = [row[3] for row in rows if row[3] is not None]
    extras: dict[int, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        if row[3] is not None:
            extras[index] = {"pooled": [len(extras)]}
    return StepTokens(
        np.array([row[0] for row in rows], np.uint32),
        np.array([len(row[1]) for row in rows], np.uint32),
        np.array([one for row in rows for one in row[1]], np.int32),
        np.array([row[2] for row in rows], np.uint8),
        extras,
        tuple(map(from_numpy, frames)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--keys")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        quicken()
    curve = CurveServer.load(Path(args.keys)) if args.keys else None
    engine = FakeEngine(args.input, args.output, curve=curve, pace=args.pace)
    print(json.dumps({"input": engine.addresses[0], "output": engine.addresses[1]}), flush=True)
    sys.stdin.read()  # the parent's end of the pipe closes when it dies
    engine.stop()


if __name__ == "__main__":
    main()
