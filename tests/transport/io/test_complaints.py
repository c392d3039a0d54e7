"""What is normal for a moment is a complaint when it lasts."""

from __future__ import annotations

import logging

import pytest

from wavecore.transport.io import complaints
from wavecore.transport.io.complaints import Complaints


def test_what_is_normal_for_a_while_is_so_for_each_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(complaints.time, "monotonic", lambda: now)
    caplog.set_level(logging.DEBUG)
    kept = Complaints(logging.getLogger("wavecore.test"))
    for _ in range(1000):  # a whole window, sent again to a restarted engine
        kept.add_if_lasting("message of another life", b"a" * 16)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    now += complaints.NORMAL_SECONDS
    kept.add_if_lasting("message of another life", b"b" * 16)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    kept.add_if_lasting("message of another life", b"a" * 16)
    assert caplog.records[-1].levelno == logging.WARNING
    assert kept.counts["message of another life"] == 1002


def test_clients_are_not_remembered_without_a_bound() -> None:
    kept = Complaints(logging.getLogger("wavecore.test"))
    for i in range(3 * complaints.MAX_CLIENTS):
        kept.add_if_lasting("message of another life", i.to_bytes(16, "little"))
    assert len(kept._since) == complaints.MAX_CLIENTS
