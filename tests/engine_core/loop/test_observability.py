"""What an operator can ask the engine."""

from __future__ import annotations

import json
import logging
import re

import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import CLIENT, SchedulerDriver

from wavecore.engine_core.api.sampling_params import COUNTED_OUTPUT
from wavecore.engine_core.loop import stats
from wavecore.transport.errors import ValidationError

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=512)


def busy(**config: object) -> SchedulerDriver:
    driver = SchedulerDriver(SCRIPT, **{"max_num_seqs": 1, **config})
    driver.add(0, [1] * 40, max_tokens=9, n=2)
    driver.add(2, [2] * 5, max_tokens=9)
    driver.add(3, [2] * 6, max_tokens=9)
    driver.step()
    return driver


def test_why_is_my_request_waiting() -> None:
    driver = busy(max_num_batched_tokens=16)
    entries, _ = driver.core.utilities.call("debug_requests", {})
    by_handle = {entry["handle"]: entry for entry in entries}
    assert {handle: entry["state"] for handle, entry in by_handle.items()} == {
        0: "running", 1: "forking", 2: "waiting", 3: "waiting",
    }  # fmt: skip
    assert "compute the prompt that they share" in by_handle[1]["reason"]
    assert "budget of 16" in by_handle[2]["reason"] and by_handle[3]["reason"] == "requests ahead of it: 1"
    for _ in range(3):
        driver.step()
    entries, _ = driver.core.utilities.call("debug_requests", {"limit": 2})
    assert len(entries) == 2 and entries[0]["output_tokens"] == 1 and entries[0]["age"] >= 0
    assert "slots (max_num_seqs) are taken" in entries[1]["reason"]
    pages = [driver.core.utilities.call("debug_requests", {"limit": 2, "offset": at})[0] for at in (0, 2, 4)]
    assert [entry["handle"] for page in pages for entry in page] == [0, 1, 2, 3]
    assert pages[1][1]["reason"] == "requests ahead of it: 2"  # those of the page before count
    driver.run()
    assert driver.core.utilities.call("debug_requests", {}) == ([], [])


def test_the_last_ten_ids_of_each_sequence() -> None:
    """Of one that runs and has drawn tokens, of one that waits, and of one that was pushed out and waits again."""
    driver = SchedulerDriver(SCRIPT, block_size=4, num_gpu_blocks_override=13, max_num_seqs=2)
    driver.add(0, list(range(20, 34)), max_tokens=30, ignore_eos=True)
    driver.add(1, list(range(40, 54)), max_tokens=30, ignore_eos=True)
    driver.add(2, [7, 8, 9], max_tokens=1)
    seen = set()
    for _ in range(30):
        driver.step()
        for entry in driver.core.utilities.debug_requests():
            prompt, handle = driver.sent[entry["handle"]][0], entry["handle"]
            known = prompt + driver.outputs.get(handle, [])
            assert entry["last_token_ids"] == known[-10:]
            assert entry["output_tokens"] == len(known) - len(prompt)
            seen.add(entry["state"])
    assert {"waiting", "running", "preempted"} <= seen
    driver.run()


def test_a_request_without_room_says_how_much_is_missing() -> None:
    driver = SchedulerDriver(SCRIPT, block_size=4, num_gpu_blocks_override=11)
    driver.add(0, [1] * 30, max_tokens=9)
    driver.add(1, [2] * 30, max_tokens=9)
    driver.step()
    entries, _ = driver.core.utilities.call("debug_requests", {})
    assert "30 tokens" in entries[1]["reason"] and "2 of 10 blocks are free" in entries[1]["reason"]
    driver.run()


def test_memory_and_stats() -> None:
    driver = busy()
    memory, _ = driver.core.utilities.call("memory_stats", {})
    assert memory["blocks"] == 1023 and memory["blocks_in_use"] == 3 and memory["block_size"] == 16
    assert memory["kv_cache_bytes"] == 1024 * 16 * 4 and memory["process_bytes"] > 1 << 20
    driver.run()
    report, _ = driver.core.utilities.call("stats", {})
    assert report["output_tokens"] == 36 and report["finished"] == 4 and report["steps"] > 20
    assert sum(report[f"{name}_share"] for name in stats.PHASES) == pytest.approx(1.0)
    assert report["running"] == report["waiting"] == 0 and report["cache_usage"] == 0.0
    assert 0.0 <= report["hit_rate"] <= 1.0


def test_unknown_calls_and_arguments_are_refused() -> None:
    driver = busy()
    for method, args in (("__init__", {}), ("shutdown", {}), ("stats", {"x": 1}), ("debug_requests", {"y": 2}),
                         ("debug_requests", {"limit": 1001}), ("debug_requests", {"limit": -1}),
                         ("debug_requests", {"offset": -1}), ("debug_requests", {"limit": 1.5})):  # fmt: skip
        with pytest.raises(ValidationError):
            driver.core.utilities.call(method, args)
    driver.run()


def test_the_trace_keeps_the_last_thousand_turns() -> None:
    driver = SchedulerDriver(SCRIPT, check=False)
    for handle in range(1200):
        driver.add(handle, [1, 2], max_tokens=1)
        driver.step()
    driver.run()
    exported, _ = driver.core.utilities.call("export_trace", {})
    events = json.loads(json.dumps(exported))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4000 and {event["name"] for event in spans} == set(stats.PHASES)
    assert all(event["dur"] >= 0 for event in spans)
    starts = [event["ts"] for event in spans]
    assert starts == sorted(starts)
    loads = [event["args"] for event in events if event["ph"] == "C"]
    assert len(loads) == 1000 and max(load["rows"] for load in loads) >= 1


def test_log_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stats, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "wavecore")
    busy(log_stats=True).run()
    assert re.search(r"running 1, waiting \d; \d+ prompt and \d+ output tokens/s; cache \d+% used", caplog.text)
    assert re.search(r"schedule \d+%, launch \d+%, wait \d+%, update \d+%", caplog.text)
    caplog.clear()
    busy().run()
    assert not caplog.text


def test_load() -> None:
    """A client is told what others have, whatever becomes of it, how many wait, and what there is room for."""
    driver = busy(block_size=16, num_gpu_blocks_override=11, max_num_seqs=3, watermark=0.0)
    us, them = CLIENT, b"t" * 16
    mine = (40 + 2 * 9) + (5 + 9) + (6 + 9)
    assert driver.core.requests.load(them).others == mine and driver.core.requests.load(us).others == 0
    assert driver.core.requests.load(us) == (0, 1, 0)  # the second choice waits for no slot but the last
    driver.add(9, [3] * 20, client=them, max_tokens=None)
    assert driver.core.requests.load(us)[:2] == (20 + COUNTED_OUTPUT, 2)
    driver.core.abort(us, [1, 2])
    driver.step()
    assert driver.core.requests.load(them).others == (40 + 9) + (6 + 9)
    driver.core.abort(us, [0, 3])
    driver.step()
    assert driver.core.requests.load(them) == (0, 0, (10 - 2) * 16)
    driver.core.abort(them, [9])
    driver.run()
    assert driver.core.requests.load(us) == (0, 0, 10 * 16) and not driver.core.requests.sizes


def test_statistics_are_logged_at_any_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats.logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("wavecore"), "level", logging.WARNING)
    busy()
    assert stats.logger.level == logging.NOTSET
    busy(log_stats=True)
    assert stats.logger.level == logging.INFO
