"""What a step tells each client: columns in the order of its rows, and ends behind them."""

from __future__ import annotations

import numpy as np
from scripted_runner import Script
from tests.support.scheduler_driver import CLIENT, SchedulerDriver

from wavecore.engine_core.scheduling.step_output import Outputs
from wavecore.transport.wire.messages import FinishReason, TensorFrame

COUNT = 300


def columns(client: np.ndarray) -> tuple[np.ndarray, ...]:
    """Clients, handles, tokens and finish codes of rows."""
    numbers = np.arange(len(client))
    return client.astype(np.int32), numbers.astype(np.uint32), numbers.astype(np.int32) + 7, np.zeros(len(client), "u1")


def frame(byte: bytes) -> TensorFrame:
    return TensorFrame("uint8", (1,), byte)


def test_rows_of_several_clients_keep_their_order_and_what_belongs_to_them() -> None:
    outputs = Outputs()
    client = np.random.default_rng(0).integers(0, 3, COUNT)
    extras = outputs.rows(*columns(client))
    extras |= {row: {"seed": row, "logprobs": [frame(b"%d" % (row % 10))]} for row in range(0, COUNT, 7)}
    outputs.end(b"b", 1000, FinishReason.ABORT, {})
    outputs.end(b"d", 1001, FinishReason.TIMEOUT, {"message": "late"})
    parts = outputs.take([b"a", b"b", b"c"])
    assert parts.keys() == {b"a", b"b", b"c", b"d"}
    for number, name in enumerate((b"a", b"b", b"c")):
        part, rows = parts[name], np.flatnonzero(client == number).tolist()
        ends = [1000] if name == b"b" else []
        assert part.handles.tolist() == rows + ends  # an end may be that of a row before it
        assert part.tokens.tolist() == [row + 7 for row in rows]
        assert part.counts.tolist() == [1] * len(rows) + [0] * len(ends)
        told = {rows[place]: extra for place, extra in part.extras.items()}
        assert told.keys() == {row for row in rows if row % 7 == 0}
        for row, extra in told.items():
            [place] = extra["logprobs"]
            assert extra["seed"] == row and part.frames[place].buffer == b"%d" % (row % 10)
    assert (parts[b"d"].finish.tolist(), parts[b"d"].extras) == ([FinishReason.TIMEOUT], {0: {"message": "late"}})
    assert outputs.take([b"a"]) == {}


def test_rows_of_one_client_are_not_copied() -> None:
    """Encoding copies each column once; that is all."""
    outputs = Outputs()
    given = columns(np.zeros(COUNT))
    outputs.rows(*given)
    part = outputs.take([b"a"])[b"a"]
    for column, source in zip((part.handles, part.tokens, part.finish), given[1:], strict=True):
        assert np.shares_memory(column, source)


def test_an_end_that_nothing_else_goes_with_is_work() -> None:
    """A request that is aborted before it began: the loop must not sleep over its end."""
    driver = SchedulerDriver(Script(vocab_size=97, eos_token_id=[], max_model_len=512))
    driver.add(3, [1, 2, 3], max_tokens=3)
    driver.core.abort(CLIENT, [3])
    assert driver.core.has_work
    driver.step()
    assert driver.finish[3] == FinishReason.ABORT and not driver.core.has_work
