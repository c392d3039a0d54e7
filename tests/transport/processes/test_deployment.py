"""deployment.json: what is written is read, what others put in its place is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from wavecore.transport.errors import ResourceError, StartError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Cause, Deployment, EngineEntry, RankEntry, why_dead
from wavecore.transport.processes.runtime_dir import RuntimeDir

RANKS = (RankEntry(0, 7, "cuda:0", "ended"), RankEntry(1, 8))
ENTRY = EngineEntry(
    0, "waiting", 7, "ab" * 16, "ipc://i", "ipc://o", "", Cause("signal", "m", log_tail=("a",)), 2, RANKS
)
STATE = Deployment("degraded", os.getpid(), (ENTRY,), {"max_model_len": 8}, 3.0)
GOOD: dict[str, Any] = json.loads(STATE.to_json())


def with_engine(**values: Any) -> str:
    return json.dumps({**GOOD, "engines": [{**GOOD["engines"][0], **values}]})


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A runtime directory whose supervisor is this process."""
    held = RuntimeDir(str(tmp_path / "run"))
    yield held.path
    held.remove()


def test_what_was_written_is_read(folder: Path) -> None:
    deployment.write(folder, STATE)
    assert deployment.read(folder) == STATE


HOSTILE = {
    "empty": "",
    "no JSON": "\x00",
    "no text": b"\xff\xfe\x00",
    "a string": '"state supervisor_pid engines"',
    "null": "null",
    "a list": "[]",
    "empty object": "{}",
    "deep nesting": "[" * 100_000,
    "deep values": json.dumps({**GOOD, "resolved": {"x": json.loads("[" * 500 + "]" * 500)}}),
    "a pid beyond any": json.dumps({**GOOD, "supervisor_pid": 10**30}),
    "an infinite pid": json.dumps({**GOOD, "supervisor_pid": 1e400}),
    "a pid of 5,000 digits": '{"supervisor_pid": ' + "1" * 5000 + "}",
    "a pid that is true": json.dumps({**GOOD, "supervisor_pid": True}),
    "NaN": json.dumps({**GOOD, "started": float("nan")}),
    "no engines": json.dumps({k: v for k, v in GOOD.items() if k != "engines"}),
    "engines that are one": json.dumps({**GOOD, "engines": GOOD["engines"][0]}),
    "engines that are texts": json.dumps({**GOOD, "engines": ["engine 0"]}),
    "engines that are many": json.dumps({**GOOD, "engines": GOOD["engines"] * 2000}),
    "an engine without a number": json.dumps({**GOOD, "engines": [{"state": "ready"}]}),
    "an epoch that is none": with_engine(epoch=None),
    "an address that is a list": with_engine(input=["ipc://i"]),
    "a cause that is a text": with_engine(cause="it died"),
    "a cause without a message": with_engine(cause={"code": "signal"}),
    "ranks that are one": with_engine(ranks=GOOD["engines"][0]["ranks"][0]),
    "ranks that are many": with_engine(ranks=GOOD["engines"][0]["ranks"] * 1000),
    "a rank without a number": with_engine(ranks=[{"pid": 7}]),
    "a rank beyond any": with_engine(ranks=[{"rank": 1 << 31}]),
    "a device that is a number": with_engine(ranks=[{"rank": 0, "device": 0}]),
    "a log that is a text": with_engine(cause={**GOOD["engines"][0]["cause"], "log_tail": "line"}),
    "too large": " " * (1 << 24) + STATE.to_json(),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_by_name(folder: Path, text: str | bytes) -> None:
    (folder / deployment.FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartError, match=f"{folder}/deployment.json is not a deployment file"):
        deployment.read(folder)
    assert why_dead(folder, 0, bytes(16)) is not None


def test_a_process_without_descriptors_learns_nothing_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.write(folder, STATE)

    def starved(path: Path, limit: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(deployment, "read_small", starved)
    with pytest.raises(ResourceError, match=r"deployment\.json: Too many open files; close some, or raise"):
        deployment.read(folder)
    assert why_dead(folder, 0, bytes.fromhex(ENTRY.epoch)) is None


@pytest.mark.parametrize("what", ["a folder", "a FIFO", "a device", "a link to nothing", "a link in a circle"])
def test_what_is_no_file_is_refused_and_never_waited_for(folder: Path, what: str) -> None:
    path = folder / deployment.FILE
    if what == "a folder":
        path.mkdir()
    elif what == "a FIFO":
        os.mkfifo(path)
    else:
        target = {"a device": "/dev/zero", "a link to nothing": "/nowhere"}.get(what, str(path))
        path.symlink_to(target)
    with pytest.raises(StartError, match="deployment"):
        deployment.read(folder)


def test_what_a_newer_version_adds_is_skipped(folder: Path) -> None:
    cause = {**GOOD["engines"][0]["cause"], "core_dump": "/tmp/core"}
    text = json.dumps({**json.loads(with_engine(cause=cause, host="a.b")), "shards": [[1, 2]], "new": {"deep": None}})
    (folder / deployment.FILE).write_text(text)
    assert deployment.read(folder) == STATE


def test_what_an_older_version_lacks_has_its_default(folder: Path) -> None:
    old = {"state": "ready", "supervisor_pid": os.getpid(), "engines": [{"index": 0}]}
    (folder / deployment.FILE).write_text(json.dumps(old))
    assert deployment.read(folder) == Deployment("ready", os.getpid(), (EngineEntry(0),))


def test_a_cause_with_an_undecodable_file_name_is_read(folder: Path) -> None:
    entry = EngineEntry(0, cause=Cause("model", "no such file: \udcff.gguf"))
    deployment.write(folder, Deployment("starting", os.getpid(), (entry,)))
    assert deployment.read(folder).engines == (entry,)


def test_a_lock_that_a_cleaner_took_is_no_death(folder: Path) -> None:
    deployment.write(folder, STATE)
    (folder / "lock").unlink()
    assert deployment.read(folder) == STATE
    gone = json.dumps({**GOOD, "supervisor_pid": (1 << 22) + 1})  # above the largest process id of Linux
    (folder / deployment.FILE).write_text(gone)
    assert deployment.read(folder).state == "dead"


@pytest.mark.parametrize(
    ("state", "own", "dead"),
    [
        ("ready", True, False),
        ("draining", True, False),
        ("waiting", True, True),
        ("restarting", True, True),
        ("failed", True, True),
        ("stopped", True, True),
        # another life: an earlier one if the disk was full when this one began, and a later one says so itself
        ("ready", False, False),
        ("waiting", False, False),
        ("restarting", False, False),
        ("failed", False, True),
        ("stopped", False, True),
    ],
)
def test_why_a_life_is_over(folder: Path, state: str, own: bool, dead: bool) -> None:
    cause = None if state in ("ready", "draining") else ENTRY.cause
    entry = EngineEntry(0, state, epoch=ENTRY.epoch, cause=cause)
    deployment.write(folder, Deployment(state, os.getpid(), (entry,)))
    epoch = bytes.fromhex(ENTRY.epoch) if own else bytes(16)
    assert why_dead(folder, 0, epoch) == (cause if dead else None)


def test_a_deployment_that_was_stopped_is_the_end_of_its_engines(folder: Path) -> None:
    cause = why_dead(folder, 0, bytes(16))
    assert cause is not None
    assert "was stopped" in cause.message
