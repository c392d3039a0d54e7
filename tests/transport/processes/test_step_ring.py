"""Records through the ring of a group: each reader gets each of them, whatever their length and its pace."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tests.support.group_memory import make_group

from wavecore.transport.processes import group_memory
from wavecore.transport.processes.group_memory import RING_BYTES
from wavecore.transport.processes.step_ring import StepRing


@pytest.fixture
def until() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def records(count: int) -> list[tuple[int, bytes]]:
    dice = random.Random(1)
    sizes = [dice.choice((0, 1, 10, 4169, 100_000, RING_BYTES - 24, RING_BYTES)) for _ in range(count)]
    return [(i % 7, bytes([i % 251]) * size) for i, size in enumerate([*sizes, 16 * RING_BYTES])]


@pytest.mark.parametrize("readers", [1, 3])
def test_every_reader_gets_every_record(until: ExitStack, readers: int) -> None:
    """Longer ones than the ring holds, too: 64 MiB through 4 MiB."""
    memories, sent = make_group(readers + 1, until), records(60)

    def read(rank: int) -> bool:
        reader, dice = StepRing(memories[rank]), random.Random(rank)
        for record in sent:
            if dice.random() < 0.1:
                time.sleep(0.002)  # not in step with the others
            if reader.read() != record:
                return False
        return not reader.has_more

    with ThreadPoolExecutor(readers) as threads:
        found = [threads.submit(read, rank) for rank in range(1, readers + 1)]
        writer = StepRing(memories[0])
        for kind, data in sent:
            cut = len(data) // 3
            writer.write(kind, [data[:cut], data[cut:]])
        assert all(future.result(60) for future in found)


def test_a_piece_that_is_not_all_there_is_not_taken(until: ExitStack) -> None:
    """As on processors that show the stores of others in another order: the count first, then some of the bytes."""
    [writes, reads] = make_group(2, until)
    StepRing(writes).write(3, [b"x" * 1000])
    whole = bytes(reads.records[:1024])
    for hidden in (range(0, 8), range(8, 24), range(24, 25), range(1023, 1024)):
        for at in hidden:
            reads.records[at] = whole[at] ^ 0xFF
        assert StepRing(reads)._piece() is None
        reads.records[:1024] = whole
    assert StepRing(reads).read() == (3, b"x" * 1000)


def test_a_writer_waits_for_a_reader_that_is_a_ring_behind(until: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says for whom, so that the supervisor blames the reader."""
    [writes, reads] = make_group(2, until)
    monkeypatch.setattr(group_memory, "SPIN_SECONDS", 0.0)
    writer, reader = StepRing(writes), StepRing(reads)
    writes.progress.busy(True)
    thread = threading.Thread(target=lambda: [writer.write(0, [bytes(1 << 20)]) for _ in range(6)], daemon=True)
    thread.start()
    until_waiting = time.monotonic() + 30
    while writes.progress.waits_for != 1:
        assert time.monotonic() < until_waiting
    assert thread.is_alive()
    assert [len(reader.read()[1]) for _ in range(6)] == [1 << 20] * 6
    thread.join(30)
    assert writes.progress.waits_for is None and not thread.is_alive()
