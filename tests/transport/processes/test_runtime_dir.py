"""The runtime directory: only what a deployment wrote is removed, and what others remove of it is made again."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wavecore.transport.errors import ConfigError, ResourceError
from wavecore.transport.processes import runtime_dir
from wavecore.transport.processes.runtime_dir import LOCK, RuntimeDir, is_held

NAMES = ("deployment.json", ".deployment.json", "engine0.in", "engine0.out")
KEYS = ("keys", "keys/server.key", "keys/client.key", "keys/authorized_clients")
USERS = ("engineering-thesis.txt", "notes.txt", "keys/id_ed25519", "engine-data/weights.bin", "engine0.input")


@pytest.fixture
def base(runtime_folder: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where fresh folders are made: a short path, because ipc paths are limited."""
    folder = runtime_folder / f"b{os.urandom(3).hex()}"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    folder.rename(tmp_path_factory.mktemp("used") / "base")


@pytest.fixture
def mine(base: Path) -> Path:
    """A folder of the user's, named as a fresh one would be, with files in it."""
    folder = base / "wavecore-prod"
    folder.mkdir(mode=0o700)
    for name in USERS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name} is mine")
    return folder


def check_users_files(folder: Path) -> None:
    for name in USERS:
        assert (folder / name).read_text() == f"{name} is mine"


def fill(folder: Path, names: tuple[str, ...]) -> None:
    """What a deployment writes."""
    for name in names:
        path = folder / name
        if name in ("keys", "keys/authorized_clients"):
            path.mkdir(exist_ok=True)
        elif name.startswith("engine"):
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        else:
            path.write_text(name)
            path.chmod(0o600)


def kill(held: RuntimeDir) -> None:
    """The supervisor is gone without a word; its lock goes with it."""
    os.close(held._lock)
    held._lock = -1


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- what is removed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [NAMES, NAMES[:2] + KEYS], ids=["ipc", "tcp"])
def test_a_fresh_folder_goes_with_all_that_was_written(base: Path, names: tuple[str, ...]) -> None:
    held = RuntimeDir(None, names)
    fill(held.path, names)
    assert held.path.stat().st_mode & 0o777 == 0o700
    assert is_held(held.path)
    held.remove()
    held.remove()  # again is no error
    assert entries(base) == set()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_named_folder_keeps_what_the_user_has_in_it(mine: Path, how: str) -> None:
    before = entries(mine)
    for _ in range(2):
        held = RuntimeDir(str(mine), NAMES)
        fill(held.path, NAMES)
        check_users_files(mine)
        held.remove() if how == "stopped" else kill(held)
    RuntimeDir(str(mine), NAMES).remove()
    check_users_files(mine)
    assert entries(mine) == before


def test_no_other_start_looks_into_a_named_folder(mine: Path) -> None:
    held = RuntimeDir(str(mine), NAMES)
    fill(held.path, NAMES)
    before = entries(mine)
    kill(held)
    RuntimeDir(None, NAMES).remove()
    assert entries(mine) == before


def test_keys_and_allow_list_of_a_named_folder_are_for_later_starts(mine: Path) -> None:
    names = (*NAMES[:2], *KEYS)
    held = RuntimeDir(str(mine), names)
    fill(mine, names)
    (mine / "keys/authorized_clients/friend.pub").write_text("friend")
    kill(held)
    held = RuntimeDir(str(mine), names)
    held.remove()
    assert (mine / "keys/server.key").read_text() == "keys/server.key"
    assert (mine / "keys/authorized_clients/friend.pub").read_text() == "friend"
    assert not (mine / "deployment.json").exists()


def test_a_named_folder_that_was_not_there_goes_when_it_is_empty(base: Path) -> None:
    path = base / "new"
    kill(RuntimeDir(str(path), NAMES))
    RuntimeDir(str(path), NAMES).remove()  # the list in the lock file knows who made it
    assert not path.exists()
    held = RuntimeDir(str(path), NAMES)
    (path / "notes.txt").write_text("mine")
    held.remove()
    assert entries(path) == {"notes.txt"}


@pytest.mark.parametrize("value", ["", "run", "/nonexistent", "/tmp/" + "ü" * 30])
def test_a_runtime_folder_of_the_system_that_cannot_be_used_is_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    held = RuntimeDir(None, NAMES)
    assert held.path.parent == base
    held.remove()


def test_an_empty_folder_of_the_users_stays(base: Path) -> None:
    path = base / "own"
    path.mkdir(mode=0o700)
    RuntimeDir(str(path), NAMES).remove()
    assert path.is_dir()


def test_only_fresh_folders_of_dead_supervisors_are_swept(base: Path) -> None:
    dead, living = RuntimeDir(None, NAMES), RuntimeDir(None, NAMES)
    fill(dead.path, NAMES)
    with_notes = RuntimeDir(None, (*NAMES, *KEYS))
    fill(with_notes.path, (*NAMES, *KEYS))
    (with_notes.path / "keys/authorized_clients/friend.pub").write_text("friend")
    kill(dead)
    kill(with_notes)
    open_to_others, unlocked, link = (base / f"wavecore-{name}" for name in ("foreign", "unlocked", "link"))
    open_to_others.mkdir(mode=0o755)
    (open_to_others / LOCK).write_text("wavecore, fresh\ndeployment.json\n")
    unlocked.mkdir(mode=0o700)
    (unlocked / "deployment.json").write_text("mine")
    link.symlink_to(living.path)
    RuntimeDir(None, NAMES).remove()
    assert not dead.path.exists()
    assert living.path.exists()
    assert (open_to_others / LOCK).exists()
    assert (unlocked / "deployment.json").exists()
    assert entries(with_notes.path) == {"keys", "keys/authorized_clients", "keys/authorized_clients/friend.pub"}
    living.remove()


def test_links_are_never_followed(base: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "ssh"
    secrets.mkdir()
    for name in ("server.key", "client.key"):
        (secrets / name).write_text("mine")
    held = RuntimeDir(None, (*NAMES, *KEYS))
    (held.path / "keys").symlink_to(secrets)
    (held.path / "deployment.json").symlink_to(secrets / "server.key")
    held.remove()
    assert entries(secrets) == {"server.key", "client.key"}


def test_a_list_can_name_nothing_but_what_deployments_write(base: Path) -> None:
    path, victim = base / "wavecore-dead", base / "victim.txt"
    path.mkdir(mode=0o700)
    victim.write_text("mine")
    (path / "other.txt").write_text("mine")
    lies = ["../victim.txt", str(victim), "other.txt", "keys/../../victim.txt", "..", "engine0.in\0", "", "lock"]
    (path / LOCK).write_text("\n".join(("wavecore, fresh", *lies)))
    RuntimeDir(None).remove()
    assert entries(path) == {"other.txt"}
    assert victim.exists()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deployment.json", ".deployment.json", "engine0.in", "engine0.out", LOCK])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_users_file_of_one_of_our_names_is_not_touched(mine: Path, name: str, kind: str) -> None:
    path = mine / name
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/etc/hostname")
    before = entries(mine)
    with pytest.raises((ConfigError, ResourceError), match=name):
        RuntimeDir(str(mine), NAMES)
    assert entries(mine) == before
    assert kind != "file" or path.read_text() == "mine"


def test_an_empty_lock_file_of_the_users_stays(mine: Path) -> None:
    (mine / LOCK).touch()
    RuntimeDir(str(mine), NAMES).remove()
    RuntimeDir(str(mine), NAMES).remove()
    assert (mine / LOCK).exists()


def test_a_folder_in_use_and_one_open_to_others_are_refused(mine: Path) -> None:
    held = RuntimeDir(str(mine), NAMES)
    with pytest.raises(ConfigError, match="in use"):
        RuntimeDir(str(mine), NAMES)
    held.remove()
    mine.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        RuntimeDir(str(mine), NAMES)
    with pytest.raises(ConfigError, match="too long"):
        RuntimeDir("/tmp/" + "x" * 90, NAMES)


@pytest.mark.parametrize("kind", ["fresh", "named", "there"])
def test_a_full_disk_is_named_and_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = base / "run"
    if kind == "there":
        path.mkdir(mode=0o700)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = entries(base)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError, match=f"{base}.*No space left") as caught:
        RuntimeDir(None if kind == "fresh" else str(path), NAMES)
    assert caught.value.exit_code == 3
    assert entries(base) == before


# --- what is made again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fresh", "named"])
@pytest.mark.parametrize("removed", ["lock", "key", "keys", "everything"])
def test_what_a_cleaner_took_is_made_again(base: Path, kind: str, removed: str) -> None:
    names = (*NAMES, *KEYS)
    held = RuntimeDir(None if kind == "fresh" else str(base / "run"), names)
    fill(held.path, names)
    held.keep("keys/server.key", "keys/client.key")
    gone = {"lock": [LOCK], "key": ["keys/server.key"], "keys": [*KEYS[::-1]], "everything": [*names[::-1], LOCK]}
    for name in gone[removed]:
        (held.path / name).rmdir() if (held.path / name).is_dir() else (held.path / name).unlink()
    if removed == "everything":
        held.path.rmdir()
    held.repair()
    assert is_held(held.path)
    assert held.path.stat().st_mode & 0o777 == 0o700
    assert (held.path / "keys/server.key").read_text() == "keys/server.key"
    assert (held.path / "keys/server.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="in use"):
        RuntimeDir(str(held.path), names)
    kill(held)  # the list was made again, too
    RuntimeDir(str(held.path), NAMES).remove()
    assert kind == "named" or not (held.path / "deployment.json").exists()


def test_an_emptied_lock_file_gets_its_list_again(base: Path) -> None:
    held = RuntimeDir(str(base / "run"), NAMES)
    text = (held.path / LOCK).read_text()
    (held.path / LOCK).write_text("")
    held.repair()
    assert (held.path / LOCK).read_text() == text
    held.remove()


def test_two_deployments_never_fight_for_a_folder(base: Path) -> None:
    """The whole folder is removed under the first, and a second takes the path before that is seen."""
    first = RuntimeDir(str(base / "run"), NAMES)
    fill(first.path, NAMES)
    for path in first.path.iterdir():
        path.unlink()
    first.path.rmdir()
    second = RuntimeDir(str(base / "run"), NAMES)
    fill(second.path, NAMES)
    with pytest.raises(ConfigError, match="in use by a running deployment"):
        first.repair()
    before = entries(second.path)
    first.remove()
    assert entries(second.path) == before
    second.remove()
    assert entries(base) == set()


@pytest.mark.parametrize("path", ["", "run\0", "~nobody of this name/run"])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="runtime_dir must be a path, not"):
        RuntimeDir(path, NAMES)


def test_home_may_be_written_as_a_tilde(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base))
    held = RuntimeDir("~/run", NAMES)
    assert held.path == base / "run"
    held.remove()
    assert entries(base) == set()


@pytest.mark.parametrize("target", ["real", "nowhere"])
def test_a_link_is_refused_as_one(base: Path, target: str) -> None:
    (base / "real").mkdir(mode=0o700)
    (base / "link").symlink_to(base / target)
    with pytest.raises(ConfigError, match="is a link: name the folder that it leads to"):
        RuntimeDir(str(base / "link"), NAMES)
    assert entries(base) == {"real", "link"}


def test_a_folder_that_its_last_owner_removes_meanwhile_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, is_private, seen = base / "run", runtime_dir.is_private, list[Path]()

    def removed_behind(folder: Path) -> bool:
        seen.append(folder)
        private = is_private(folder)
        if len(seen) == 1:
            folder.rmdir()
        return private

    monkeypatch.setattr(runtime_dir, "is_private", removed_behind)
    held = RuntimeDir(str(path), NAMES)
    assert seen == [path, path]
    assert is_held(path)
    held.remove()


def test_a_second_start_sees_the_first_even_where_its_lock_was_removed(base: Path) -> None:
    first = RuntimeDir(str(base / "run"), NAMES)
    fill(first.path, NAMES)
    (first.path / LOCK).unlink()
    with pytest.raises(ConfigError, match="no file of ours"):
        RuntimeDir(str(base / "run"), NAMES)
    first.repair()
    first.remove()
    assert entries(base) == set()


def test_a_folder_that_another_user_put_in_its_place_is_not_written_to(base: Path) -> None:
    held = RuntimeDir(str(base / "run"), NAMES)
    (held.path / LOCK).unlink()
    held.path.chmod(0o777)
    with pytest.raises(ConfigError, match="closed to others"):
        held.repair()
    assert entries(held.path) == set()
    held.path.chmod(0o700)
    held.remove()


def test_names_are_touched_so_that_cleaners_leave_them(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_dir, "TOUCH_SECONDS", 0.0)
    held = RuntimeDir(str(mine), NAMES)
    fill(mine, NAMES)
    ours = [mine, mine / LOCK, *(mine / name for name in NAMES)]
    for path in (*ours, *(mine / name for name in USERS)):
        os.utime(path, (1, 1))
    held.repair()
    assert all(path.stat().st_mtime > 1 and path.stat().st_atime > 1 for path in ours)
    assert all((mine / name).stat().st_mtime == 1 for name in USERS)
    held.remove()


def test_many_starts_at_once_sweep_beside_each_other(base: Path) -> None:
    for _ in range(20):
        kill(RuntimeDir(None, NAMES))
    held: list[RuntimeDir] = []
    threads = [threading.Thread(target=lambda: held.append(RuntimeDir(None, NAMES))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.path for one in held}) == 8
    assert all(is_held(one.path) for one in held)
    for one in held:
        one.remove()
    RuntimeDir(None).remove()
    assert entries(base) == set()
