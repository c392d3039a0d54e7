"""What counts as a hop, and that the tracer sees a step."""

from __future__ import annotations

from trace_rooms import Call, counts, room_of, steady_step, way

CORE, PLAN, POLICY = "engine_core/loop/core.py", "engine_core/plan.py", "engine_core/scheduling/policy.py"


def test_rooms() -> None:
    assert room_of(CORE) == "engine_core/loop"
    assert room_of(PLAN) == "engine_core/plan"


def test_hops_by_hand() -> None:
    files = [CORE, CORE, PLAN, POLICY, "engine_core/scheduling/slots.py", CORE]
    calls = [Call(float(i), 1, file) for i, file in enumerate(files)]
    assert counts(calls) == [6, 4, 4, 3, 3]
    assert way(calls)[1:] == ["| engine_core/plan | plan | 1 |", "| engine_core/scheduling | policy, slots | 2 |"]


def test_threads_are_walked_apart() -> None:
    calls = [Call(0.0, 1, CORE), Call(1.0, 2, PLAN), Call(2.0, 1, CORE), Call(3.0, 2, PLAN)]
    assert counts(calls) == [4, 2, 0, 2, 0]


def test_a_steady_step_stays_on_the_host() -> None:
    calls = steady_step("scripted:")
    rooms = {room_of(call.file) for call in calls}
    assert calls[0].file == CORE
    assert {"engine_core/loop", "engine_core/scheduling", "engine_core/kv_cache", "engine_core/plan"} <= rooms
    assert not {"engine_core/execution", "engine_core/models"} & rooms
