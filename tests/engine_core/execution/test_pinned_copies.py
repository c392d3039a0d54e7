"""Pinned rings against a device whose copies happen late: nothing is overwritten too early, and nobody waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine_core.execution.late_copies import LateDevice

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.pinned_copies import DEPTH, CopyIn, CopyOut
from wavecore.engine_core.execution.step_input import StepInput
from wavecore.engine_core.execution.step_shape import MAX_BUCKET, Bucket, Buckets, StepShape
from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import NewRequest, StepPlan

CPU = torch.device("cpu")
NONE = np.zeros(0, np.int32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


def test_the_vector_in_is_safe_with_two_steps_in_flight(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.step_copies(monkeypatch)
    copy_in = CopyIn((5, 1, 2), CPU)
    address = copy_in.target.data_ptr()
    for step in range(3 * DEPTH):
        copy_in.room()[:] = step
        copy_in.send(2)
        if step >= 2:  # the device comes to the step before the last one
            device.run(2 * (step - 1))
            assert copy_in.target.tolist() == [step - 2] * 6 + [0] * 2
    assert device.waits == 0
    assert copy_in.target.data_ptr() == address


def test_with_more_steps_in_flight_the_host_waits(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.step_copies(monkeypatch)
    copy_in = CopyIn((4,), CPU)
    for step in range(DEPTH + 1):
        copy_in.room()[:] = step
        copy_in.send(1)
    assert device.waits == 1 and device.done == 1
    assert copy_in.target.tolist() == [0] * 4


def test_the_vector_out_is_one_copy_and_safe_until_it_was_read(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.step_copies(monkeypatch)
    out = CopyOut(4, 10, CPU)
    address = out.vector.data_ptr()
    in_flight = []
    for step in range(3 * DEPTH):
        device.run(len(device.queue))  # the device works the steps off in order
        out.clear()
        out.tokens.fill_(step)
        out.faults.fill_(-step)
        part, place = out.take(2, 3, kind=np.float32)
        part.fill_(step + 0.5)
        queued = len(device.queue)
        in_flight.append((step, out.send(), place))
        assert len(device.queue) == queued + 1
        if len(in_flight) == 2:
            want, fetched, place = in_flight.pop(0)
            vector = fetched.wait()
            assert fetched.drawn(3).tolist() == [[want] * 3, [-want] * 3]
            found = place.read(vector)
            assert found.shape == (2, 3) and found.dtype == np.float32 and (found == want + 0.5).all()
            assert not np.shares_memory(found, vector)
    assert device.waits == 0 and out.vector.data_ptr() == address


def test_a_vector_that_was_used_again_is_not_mistaken_for_the_old_one() -> None:
    out = CopyOut(2, 0, CPU)
    first, second = out.send(), out.send()
    assert second.wait() is not None
    with pytest.raises(AssertionError, match="used again"):
        first.wait()


def test_more_output_than_a_plan_can_hold_is_our_bug() -> None:
    out = CopyOut(2, 6, CPU)
    for _ in range(3):
        out.clear()
        out.take(6, kind=np.int32)
    with pytest.raises(AssertionError, match="more than a plan can hold"):
        out.take(1, kind=np.float32)


@pytest.mark.parametrize("sizes", [[1, 2, 3], [64], [63, 1, 2], [65], [1000], [5, 700, 64, 64, 3, 200]])
def test_uploads_larger_than_a_piece_and_than_the_ring(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """Pieces of 256 bytes, four of them; arrays of up to 4,000 bytes. The steps wait for all of them."""
    ring = device.uploads(256, 4, monkeypatch)
    draw = np.random.default_rng(0)
    for joins in range(1, 4):
        arrays = [draw.integers(0, 1 << 30, size).astype(np.int32) for size in sizes]
        targets = [torch.zeros(size, dtype=torch.int32) for size in sizes]
        for target, array in zip(targets, arrays, strict=True):
            ring.write(target, array)
        ring.join()
        ring.join()  # nothing to wait for: no piece is given away
        assert len(device.joined) == joins
        device.run(device.joined[-1])
        for target, array in zip(targets, arrays, strict=True):
            assert (target.numpy() == array).all()
    if sum(sizes) <= 64:
        assert device.waits == 0
    assert {len(piece) for piece in ring._pieces} == {256}


def test_rows_of_many_requests_travel_together(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than once fit into what they are packed into, and into the ring; and one row too large to be packed."""
    ring = device.uploads(16384, 4, monkeypatch)
    draw = np.random.default_rng(0)
    tokens, biases = torch.zeros(300, 200, dtype=torch.int32), torch.zeros(300, 4)
    for _ in range(3):
        want, want_biases = tokens.clone(), biases.clone()
        before = len(device.queue)
        for row in draw.permutation(300).tolist():
            ids = draw.integers(0, 1 << 30, 200 if row == 7 else int(draw.integers(1, 40))).astype(np.int32)
            ring.write_row(tokens, row, ids)
            want[row, : len(ids)] = torch.from_numpy(ids)
            if row % 3 == 0:
                values = draw.normal(size=3).astype(np.float32)
                ring.write_row(biases, row, values)
                want_biases[row, :3] = torch.from_numpy(values)
        ring.join()
        assert len(device.queue) - before < 40, "copies and launches for 400 rows"
        device.run(device.joined[-1])
        assert torch.equal(tokens, want) and torch.equal(biases, want_biases)


def test_uploads_wait_only_for_a_ring_that_is_full(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = device.uploads(256, 4, monkeypatch)
    target = torch.zeros(4 * 64 + 1, dtype=torch.int32)
    ring.write(target[:-1], np.arange(4 * 64, dtype=np.int32))
    assert device.waits == 0
    ring.write(target[-1:], np.array([7], np.int32))
    assert device.waits == 1 and device.done == 1, "the oldest piece alone was waited for"


def plan(slots: list[int], lens: list[int], **more: object) -> StepPlan:
    columns = {"starts": [10 * slot for slot in slots], "samples": [1] * len(slots)} | more
    return StepPlan(
        step_id=0,
        slots=np.array(slots, np.intp),
        starts=np.array(columns["starts"], np.int32),
        query_lens=np.array(lens, np.int32),
        samples=np.array(columns["samples"], np.bool_),
        table=np.array(more.get("table", ()), np.int32).reshape(-1, 3),
    )


def test_rows_lie_at_the_same_place_whatever_the_step_before() -> None:
    columns = np.zeros(0, np.int32)
    step_input = StepInput(16, 0, CPU, Uploads(CPU))
    big = StepShape(plan(list(range(16)), [3] * 16), None)
    small = plan([2, 7, 5], [1, 1, 4], samples=[1, 1, 0])
    shape = StepShape(small, None)
    padded = StepShape(plan(list(range(9)), [1] * 9), Buckets(64, 10))
    assert padded.bucket == Bucket(9, 9, 9, 1)
    for before in (big, padded):
        step_input.bring(before, np.arange(16, dtype=np.int32)[: before.plan.num_rows], columns)
        step_input.bring(shape, np.array([1], np.int32), columns)
        rows = step_input.rows(shape.bucket.rows)
        assert rows.slots.tolist() == [2, 7, 5]
        assert rows.starts.tolist() == [20, 70, 50]
        assert rows.query_start.tolist() == [0, 1, 2, 6]
        assert rows.sample_slots.tolist() == [2, 7, -1]
        assert rows.positions.tolist() == [21, 71, 54]
        assert rows.logprob_rows[:1].tolist() == [1]
    assert step_input.rows(5).slots.data_ptr() == step_input.rows(9).slots.data_ptr()
    assert rows.slots.data_ptr() % 16 == rows.positions.data_ptr() % 16 == rows.query_start.data_ptr() % 16


def test_a_plan_whose_rows_are_out_of_order_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="one query token come first"):
        StepShape(plan([5, 2, 7], [4, 1, 1]), None)


@pytest.mark.parametrize("entries", [0, 3])
def test_a_step_is_one_copy_and_one_more_where_a_slot_begins(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    device.step_copies(monkeypatch)
    step_input = StepInput(16, 32, CPU, Uploads(CPU))
    columns, table = np.arange(1, 33, dtype=np.int32), [(i, i, i) for i in range(entries)]
    steady = plan([5, 2, 7], [1, 1, 1], table=table)
    shape = StepShape(steady, Buckets(64, 16))
    step_input.bring(shape, np.array([1], np.int32), columns)
    [(_, (target, _))] = device.queue
    assert target.is_contiguous() and target.data_ptr() == step_input.copy.target.data_ptr()
    assert len(target) == step_input.columns_at
    begins = NewRequest(5, np.zeros(3, np.int32), 3, SamplingParams())
    step_input.bring(StepShape(replace(steady, new_requests=(begins,)), Buckets(64, 16)), NONE, columns)
    _, (_, (again, _)), (_, (brought, _)) = device.queue
    assert again.shape == target.shape and again.data_ptr() == target.data_ptr()
    assert brought.data_ptr() == step_input.columns.data_ptr() and len(brought) == 32
    device.run(len(device.queue))
    assert step_input.columns.tolist() == columns.tolist()
    assert step_input.rows(3).slots.tolist() == [5, 2, 7]


def test_padding_of_rows_and_tokens() -> None:
    step_input = StepInput(64, 0, CPU, Uploads(CPU))
    lens = [1] * 17 + [2]
    shape = StepShape(plan(list(range(18)), lens), Buckets(4096, 64))
    assert shape.bucket == Bucket(tokens=20, rows=64, num_decode_rows=64, max_query_len=20)
    shape = StepShape(plan(list(range(33)), [1] * 33), Buckets(4096, 64))
    assert shape.bucket == Bucket(tokens=36, rows=36, num_decode_rows=36, max_query_len=1)
    step_input.bring(shape, NONE, NONE)
    rows = step_input.rows(36)
    assert rows.slots.tolist() == [*range(33), -1, -1, -1]
    assert rows.sample_slots.tolist() == rows.slots.tolist()
    assert rows.query_start.tolist() == [*range(34), 33, 33, 33]
    assert rows.starts.tolist()[33:] == rows.positions.tolist()[33:] == [0, 0, 0]


def test_rows_of_a_large_step_are_padded_and_its_tokens_are_not() -> None:
    """The last product of a step has a row for each row: it must not meet a new shape with each large step."""
    shape = StepShape(plan(list(range(35)), [100] * 35), Buckets(8192, 64))
    assert shape.num_tokens > MAX_BUCKET and not shape.has_graph
    assert shape.bucket == Bucket(3500, 36, 0, 100), "without padding the numbers are the step's own"
    decode = StepShape(plan(list(range(2500)), [1] * 2500), Buckets(8192, 4096))
    assert decode.bucket == Bucket(2560, 2560, 2560, 1) and decode.has_graph


def test_a_bucket_tells_nothing_of_the_step_but_its_size() -> None:
    """A graph is captured from one step and replayed for others: prompts alone, and with decode rows."""
    buckets = Buckets(4096, 64)
    prompts = StepShape(plan([0, 1], [9, 8]), buckets)
    mixed = StepShape(plan([0, 1, 2], [1, 1, 16]), buckets)
    assert prompts.bucket == mixed.bucket == Bucket(18, 4, 4, 18) and prompts.has_graph
    decode = StepShape(plan(list(range(18)), [1] * 18), buckets)
    assert decode.bucket == Bucket(18, 18, 18, 1) and decode.has_graph


def test_few_sizes_have_graphs() -> None:
    for seqs in (1, 3, 64, 256, 1000):
        buckets = Buckets(8192, seqs)
        decode = [bucket for bucket in buckets.graphs if bucket.max_query_len == 1]
        assert {bucket.rows for bucket in decode} == set(buckets.rows) and max(buckets.rows) == seqs
        mixed = buckets.graphs - set(decode)
        assert max(bucket.tokens for bucket in mixed) == MAX_BUCKET
        assert len({bucket.rows for bucket in mixed}) <= 4


@pytest.mark.parametrize("sizes", [[16, 4, 64], [300], []])
def test_given_sizes_are_those_of_graphs_and_larger_steps_are_padded_as_ever(sizes: list[int]) -> None:
    buckets = Buckets(512, 200, sizes)
    for rows in range(1, 201):
        shape = StepShape(plan(list(range(rows)), [1] * rows), buckets)
        fitting = min((min(size, 200) for size in sizes if size >= rows), default=0)
        assert shape.has_graph == (fitting > 0)
        assert shape.bucket.rows == fitting if fitting else shape.bucket.rows in Buckets(512, 200).rows
    for tokens in (3, 63, 65, 301):
        shape = StepShape(plan([0, 1], [1, tokens - 1]), buckets)
        assert shape.has_graph == any(size >= tokens for size in sizes)
        assert tokens <= shape.bucket.tokens <= 512


def test_a_dummy_step_is_padding_in_the_bucket_of_its_rows() -> None:
    step_input = StepInput(16, 0, CPU, Uploads(CPU))
    step_input.bring(StepShape(plan([3, 4], [1, 7], table=[(3, 1, 9)]), None), NONE, NONE)
    dummy = plan([-1] * 3, [1, 1, 5])
    shape = StepShape(dummy, Buckets(64, 16))
    assert dummy.is_dummy and shape.bucket == StepShape(plan([0, 1, 2], [1, 1, 5]), Buckets(64, 16)).bucket
    step_input.bring(shape, NONE, NONE)
    rows = step_input.rows(shape.bucket.rows)
    assert set(rows.slots.tolist()) == set(rows.sample_slots.tolist()) == {-1}
    assert not rows.query_start.any() and not step_input.changes[0]


@pytest.mark.parametrize("entries", [0, 3, 4000])
def test_changes_fit_the_vector_or_come_apart(entries: int) -> None:
    step_input = StepInput(8, 4, CPU, Uploads(CPU))
    step_input.columns.fill_(5)
    table = np.random.default_rng(1).integers(0, 1 << 20, (entries, 3)).astype(np.int32)
    changed = plan([0], [1], table=table)
    assert (entries > step_input.room) == (entries == 4000)
    apart = step_input.bring(StepShape(changed, None), NONE, step_input.columns.numpy())
    assert (apart is not None) == (entries == 4000)
    changes = step_input.changes if apart is None else apart
    assert changes[0] == entries
    assert (changes[1 : 1 + 3 * entries].view(-1, 3).numpy() == table).all()
    assert apart is None or step_input.changes[0] == 0
    assert step_input.columns.tolist() == [5] * 4
