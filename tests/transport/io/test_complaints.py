"""What is normal for a moment is a complaint when it goes on."""

from __future__ import annotations

import logging

import pytest

from wavecore.transport.io import complaints
from wavecore.transport.io.complaints import Complaints


def test_an_excuse_lasts_a_while_for_each_peer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(complaints.time, "monotonic", lambda: now)
    caplog.set_level(logging.DEBUG)
    kept = Complaints(logging.getLogger("wavecore.test"))
    for _ in range(1000):  # a whole window, sent again to a restarted engine
        kept.excuse("message of another life", b"a" * 16)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    now += complaints.NORMAL_SECONDS
    kept.excuse("message of another life", b"b" * 16)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    kept.excuse("message of another life", b"a" * 16)
    assert caplog.records[-1].levelno == logging.WARNING
    assert kept.counts["message of another life"] == 1002


def test_peers_are_not_remembered_without_a_bound() -> None:
    kept = Complaints(logging.getLogger("wavecore.test"))
    for i in range(3 * complaints.MAX_PEERS):
        kept.excuse("message of another life", i.to_bytes(16, "little"))
    assert len(kept._since) == complaints.MAX_PEERS
