"""A flood of bad frames is counted, and does not flood the log."""

from __future__ import annotations

import logging

import pytest

from wavecore.transport.io import complaints
from wavecore.transport.io.complaints import Complaints


def test_each_kind_is_logged_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(complaints.time, "monotonic", lambda: now)
    caplog.set_level(logging.DEBUG)
    kept = Complaints(logging.getLogger("wavecore.test"))
    for _ in range(1000):
        kept.add("bad frame", "it is empty")
        kept.add("message of another life", "client a", logging.DEBUG)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]
    now += complaints.LOG_SECONDS
    kept.add("bad frame", "it is empty")
    assert caplog.records[-1].getMessage() == "bad frame (1001 so far): it is empty"
    assert kept.counts == {"bad frame": 1001, "message of another life": 1000}
