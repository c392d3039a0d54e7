"""The supervisor against children that behave and misbehave; `fake_child` is one."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.support.environment import environment
from tests.support.waiting import until

from wavecore.transport.errors import ConfigError, EngineDead, ModelError, ResourceError, StartError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment, why_dead
from wavecore.transport.processes.process import Child, ChildSpec
from wavecore.transport.processes.runtime_dir import RuntimeDir, is_held
from wavecore.transport.processes.supervisor import Limits, Supervisor

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_restarts")
HERE = os.pathsep.join((str(Path(__file__).parent), environment()["PYTHONPATH"]))
LIMITS = Limits(ready=60, drain=5, step=60, idle=0.5, grace=5)


def spec(do: str, **config: Any) -> ChildSpec:
    return ChildSpec("engine 0", "fake_child", json.dumps({"do": do, **config}), {"PYTHONPATH": HERE})


def started(do: str, limits: Limits = LIMITS, **config: Any) -> Supervisor:
    supervisor = Supervisor([[spec(do, **config)]], limits=limits)
    supervisor.start()
    return supervisor


def test_signals_that_the_program_blocks_reach_a_child() -> None:
    """As Ray blocks SIGINT in all that it starts; a child inherits the mask of the thread that starts it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        supervisor = started("serve")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child = psutil.Process(supervisor.deployment().engines[0].pid)
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert int(status.partition("SigBlk:")[2].split()[0], 16) & (1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1) == 0
    supervisor.stop()


def test_start_reports_progress_and_stop_leaves_nothing() -> None:
    seen: list[tuple[int, str, float]] = []
    with Supervisor([[spec("serve")], [spec("serve")]], limits=LIMITS) as supervisor:
        runtime_dir = supervisor.start(lambda *phase: seen.append(phase))
        assert {(0, "load", 0.5), (1, "load", 0.5)} <= set(seen)
        found = deployment.read(runtime_dir)
        assert found == supervisor.deployment()
        assert found.state == "ready"
        assert found.supervisor_pid == os.getpid()
        assert [e.state for e in found.engines] == ["ready", "ready"]
        assert found.engines[0].input == f"ipc://{runtime_dir}/engine0.in"
        assert runtime_dir.stat().st_mode & 0o777 == 0o700
        assert all(psutil.pid_exists(e.pid) for e in found.engines)
        for engine in found.engines:
            assert list(engine.ranks[0].seconds) == ["start", "load"]
            assert all(0 <= seconds < 60 for seconds in engine.ranks[0].seconds.values())
    assert not runtime_dir.exists()
    assert not any(psutil.pid_exists(e.pid) for e in found.engines)
    with pytest.raises(StartError, match="no deployment"):
        deployment.read(runtime_dir)


def test_structured_failure_is_raised_as_the_childs_own_error() -> None:
    with pytest.raises(ModelError, match="truncated") as caught:
        Supervisor([[spec("fail")]], limits=LIMITS).start()
    assert caught.value.exit_code == 4


def test_a_surprise_in_start_keeps_its_traceback() -> None:
    with pytest.raises(StartError, match=r"ZeroDivisionError.*while: load") as caught:
        Supervisor([[spec("surprise")]], limits=LIMITS).start()
    assert any("1 / 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("do", "reason"),
    [("die in load", r"signal 9 \(SIGKILL\)"), ("missing library", "library libfoo.so.3 is missing")],
)
def test_silent_death_in_start_names_its_cause(do: str, reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        Supervisor([[spec(do)]], limits=LIMITS).start()


def test_start_has_one_deadline() -> None:
    with pytest.raises(StartError, match=r"was not ready after 1\.5 s \(phase: load\)"):
        Supervisor([[spec("hang in load")]], limits=Limits(ready=1.5)).start()


def test_kill_is_named_at_once_and_the_engine_comes_back() -> None:
    with started("serve") as supervisor:
        assert supervisor.runtime_dir is not None
        before = supervisor.deployment().engines[0]
        os.kill(before.pid, signal.SIGKILL)
        path, epoch = supervisor.runtime_dir, bytes.fromhex(before.epoch)
        cause = until(lambda: why_dead(path, 0, epoch))
        assert (cause.code, cause.signal) == ("signal", 9)
        assert "signal 9 (SIGKILL)" in cause.message
        assert any("doing serve" in line for line in cause.log_tail)
        after = until(
            lambda: next((e for e in supervisor.deployment().engines if e.restarts and e.state == "ready"), None)
        )
        assert after.pid != before.pid
        assert after.epoch != before.epoch
        assert (after.input, after.output, after.cause) == (before.input, before.output, None)


def test_what_the_child_started_ends_with_it() -> None:
    with started("grandchild") as supervisor:
        resolved = supervisor.deployment().resolved
        os.kill(resolved["pid"], signal.SIGKILL)
        until(lambda: not _alive(resolved["grandchild"]))


def test_five_failed_starts_in_a_row_stay_down(tmp_path: Path) -> None:
    with started("serve", once=str(tmp_path / "once"), later="die in load") as supervisor:
        os.kill(supervisor.deployment().engines[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"stays down.*signal 9") as caught:
            supervisor.wait()
        assert caught.value.exit_code == 5
        assert supervisor.runtime_dir is not None
        found = deployment.read(supervisor.runtime_dir).engines[0]
        assert (found.state, found.restarts) == ("failed", 5)


def test_a_child_that_was_ready_is_started_again_however_often_it_dies() -> None:
    with started("die") as supervisor:
        until(lambda: supervisor.deployment().engines[0].restarts > 8)
        assert supervisor.deployment().engines[0].state != "failed"


def test_status_lines_that_are_none_are_skipped() -> None:
    with started("babble") as supervisor:
        assert supervisor.deployment().state == "ready"


def test_a_child_stuck_in_native_code_is_ended_with_its_stacks_in_the_log(tmp_path: Path) -> None:
    with started("hold the GIL", once=str(tmp_path / "once")) as supervisor:
        cause = until(lambda: supervisor.deployment().engines[0].cause)
        assert cause.code == "stuck"
        assert "every thread sleeps" in cause.message
        assert any("in main" in line and "fake_child.py" in line for line in cause.log_tail)
        until(lambda: supervisor.deployment().state == "ready")


def test_a_long_step_on_a_starved_core_is_not_stuck() -> None:
    """The child shares its core, at nice 15, with somebody who wants all of it: no beat for seconds on end."""
    core = min(os.sched_getaffinity(0))
    hog = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    try:
        limits = replace(LIMITS, grace=0.1)  # it will not hear that it is to end
        with started("compute", limits, seconds=1000, nice=15, core=core) as supervisor:
            child = psutil.Process(supervisor.deployment().engines[0].pid)
            until(lambda: child.nice() == 15)
            used = sum(child.cpu_times()[:2])
            began = time.monotonic()
            until(
                lambda: sum(child.cpu_times()[:2]) >= used + 0.02 and time.monotonic() > began + 3 * LIMITS.idle,
                seconds=60,
            )
            engine = supervisor.deployment().engines[0]
            assert (engine.state, engine.restarts) == ("ready", 0)
    finally:
        hog.kill()
        hog.wait()


def test_a_step_that_computes_for_ever_is_ended() -> None:
    with started("compute", Limits(idle=0.5, step=0.5), seconds=1000) as supervisor:
        cause = until(lambda: supervisor.deployment().engines[0].cause)
        assert "one step has computed" in cause.message


def test_a_child_that_ignores_signals_is_killed() -> None:
    supervisor = started("ignore signals", Limits(grace=0.5))
    supervisor.stop(drain=0.1)
    assert supervisor.deployment().engines[0].state == "stopped"


def test_stop_from_another_thread_ends_a_start() -> None:
    supervisor = Supervisor([[spec("hang in load")]], limits=LIMITS)
    with pytest.raises(StartError, match="stopped before"):
        supervisor.start(lambda *_: supervisor.request_stop())


def test_stop_in_the_supervisors_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may drop whoever owns it there."""
    supervisor = started("serve")
    publish = supervisor._publish
    monkeypatch.setattr(supervisor, "_publish", lambda *all: (supervisor.stop(), publish(*all)))
    assert supervisor.runtime_dir is not None
    until(lambda: not supervisor.runtime_dir.exists())
    supervisor.stop()


def test_a_fork_ends_no_engine_of_its_parent() -> None:
    with started("serve") as supervisor:
        pid = os.fork()
        if pid == 0:
            supervisor.request_stop()
            supervisor.stop()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert supervisor.runtime_dir is not None
        assert deployment.read(supervisor.runtime_dir).state == "ready"
        assert psutil.pid_exists(supervisor.deployment().engines[0].pid)


def test_a_runtime_dir_serves_one_deployment(tmp_path: Path) -> None:
    where = tmp_path / "run"
    where.mkdir(mode=0o700)
    (where / "notes.txt").write_text("mine")
    with Supervisor([[spec("serve")]], runtime_dir=str(where), limits=LIMITS) as first:
        assert first.start() == where
        with pytest.raises(ConfigError, match="in use"):
            Supervisor([[spec("serve")]], runtime_dir=str(where), limits=LIMITS).start()
    assert sorted(p.name for p in where.iterdir()) == ["notes.txt"]
    where.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Supervisor([[spec("serve")]], runtime_dir=str(where), limits=LIMITS).start()


def test_keys_and_allow_list_of_a_named_runtime_dir_survive_its_deployment(tmp_path: Path) -> None:
    where, keys = tmp_path / "run", set()
    for _ in range(2):
        with Supervisor(
            [[spec("serve")]], runtime_dir=str(where), address="tcp://127.0.0.1", limits=LIMITS
        ) as supervisor:
            supervisor.start()
            keys.add(supervisor.deployment().engines[0].server_key)
            (where / "keys" / "authorized_clients" / "friend.pub").write_bytes(zmq.curve_keypair()[0])
    assert len(keys) == 1
    assert sorted(p.name for p in where.rglob("*.*")) == ["client.key", "friend.pub", "server.key"]


@pytest.mark.parametrize("taken", ["keys", "keys/server.key", "keys/authorized_clients"])
def test_keys_that_cannot_be_written_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: str) -> None:
    where = tmp_path / "run"
    (where / "keys").mkdir(parents=True, mode=0o700)
    where.chmod(0o700)
    if taken == "keys":
        (where / taken).rmdir()
    (where / taken).symlink_to("/nowhere")
    supervisor = Supervisor([[spec("serve")]], runtime_dir=str(where), address="tcp://127.0.0.1", limits=LIMITS)
    with pytest.raises(ResourceError, match=rf"cannot write the keys in {where}/keys: .*{taken}"):
        supervisor.start()
    assert (where / taken).is_symlink()
    assert not caplog.text, "the error says it all"


@pytest.mark.parametrize("what", ["deployment.json", "lock", "keys", "all of it", "damaged"])
def test_what_a_cleaner_took_is_back_within_a_tick(what: str) -> None:
    with Supervisor([[spec("serve")]], address="tcp://127.0.0.1", limits=LIMITS) as supervisor:
        path = supervisor.start()
        before, key = deployment.read(path), (path / "keys" / "client.key").read_bytes()
        if what == "damaged":
            (path / deployment.FILE).write_text("null")
        elif what == "all of it":
            shutil.rmtree(path)
        elif what == "keys":
            shutil.rmtree(path / "keys")
        else:
            (path / what).unlink()
        until(lambda: is_held(path) and (path / "keys" / "client.key").exists() and is_readable(path))
        assert deployment.read(path) == before
        assert (path / "keys" / "client.key").read_bytes() == key
    assert not path.exists()


def is_readable(path: Path) -> bool:
    try:
        return deployment.read(path).state == "ready"
    except StartError:
        return False


def test_of_two_deployments_in_one_folder_the_first_ends_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody removes the folder under a deployment, and a second one takes its place before the first has seen it."""
    where = tmp_path / "run"
    second = RuntimeDir(str(tmp_path / "second"), [deployment.FILE])
    (second.path / deployment.FILE).write_text("the second's")
    with Supervisor([[spec("serve")]], runtime_dir=str(where), limits=LIMITS) as first:
        first.start()
        where.rename(tmp_path / "removed")
        second.path = second.path.rename(where)
        with pytest.raises(ConfigError, match="in use by a running deployment"):
            first.wait()
        assert "the supervisor ends, and its engines with it" in caplog.text
        until(lambda: not _alive(first.deployment().engines[0].pid))
    assert (where / deployment.FILE).read_text() == "the second's"
    second.remove()


PARENT = """
import json, os, sys, time
from wavecore.transport.processes.process import Child, ChildSpec
from wavecore.transport.processes.supervisor import Supervisor
spec = ChildSpec("engine 0", "fake_child", json.dumps({{"do": "serve"}}), {{"PYTHONPATH": {here!r}}})
supervisor = Supervisor([[spec]])
if {serve}:
    sys.exit(supervisor.serve(lambda *phase: print(*phase, flush=True), lambda path: print("ready", path, flush=True)))
path = supervisor.start()
print("ready", path, flush=True)
time.sleep({sleep})
"""


def parent(serve: bool = False, sleep: float = 600) -> tuple[subprocess.Popen[str], Path, Deployment]:
    code = PARENT.format(here=HERE, serve=serve, sleep=sleep)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = next(Path(line.split()[1]) for line in process.stdout if line.startswith("ready"))
    return process, path, deployment.read(path)


def finish(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    try:
        return process.wait(30)
    finally:
        process.kill()
        process.stdout.close()


def test_a_killed_parent_takes_everything_with_it() -> None:
    process, path, found = parent()
    process.kill()
    finish(process)
    until(lambda: not _alive(found.engines[0].pid), seconds=2.0)
    assert deployment.read(path).state == "dead"
    cause = deployment.read(path).engines[0].cause
    assert cause is not None
    assert "supervisor" in cause.message
    with started("serve"):  # the next start removes what the dead one left
        assert not path.exists()


def test_a_script_that_just_ends_leaves_nothing() -> None:
    process, path, found = parent(sleep=0)
    assert finish(process) == 0
    until(lambda: not _alive(found.engines[0].pid), seconds=2.0)
    assert not path.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_serve_ends_with_the_documented_code(number: int, code: int) -> None:
    process, path, found = parent(serve=True)
    process.send_signal(number)
    assert finish(process) == code
    assert not path.exists()
    assert not _alive(found.engines[0].pid)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_restart_that_cannot_spawn_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = Child, iter([OSError(24, "Too many open files")])

    def spawn(*args: Any) -> Child:
        if started_once and (error := next(refusals, None)):
            raise error
        return real(*args)

    started_once = False
    monkeypatch.setattr("wavecore.transport.processes.rank_process.Child", spawn)
    with started("serve") as supervisor:
        started_once = True
        before = supervisor.deployment().engines[0]
        os.kill(before.pid, signal.SIGKILL)
        cause = until(lambda: (c := supervisor.deployment().engines[0].cause) and "Too many" in c.message and c)
        assert cause.code == "resource"
        until(lambda: supervisor.deployment().state == "ready")


def test_a_restart_whose_port_was_taken_gets_another() -> None:
    with Supervisor([[spec("serve on port 5")]], address="tcp://127.0.0.1", limits=LIMITS) as supervisor:
        supervisor.start()
        os.kill(supervisor.deployment().engines[0].pid, signal.SIGKILL)
        cause = until(lambda: (c := supervisor.deployment().engines[0].cause) and "port 5" in c.message and c)
        assert (cause.code, cause.phase) == ("start", "bind")
        until(lambda: supervisor.deployment().state == "ready")


def test_a_child_is_ending_until_it_is_reaped() -> None:
    child = Child(replace(spec("serve"), argv=["--index", "0"]))
    assert not child.is_ending
    child.kill()
    assert select.select([child.pidfd], [], [], 30)[0]
    assert child.is_ending
    child.reap()
    assert not child.is_ending


def test_a_child_that_cannot_be_spawned_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ResourceError, match="could not be started"):
        Supervisor([[spec("serve")]], limits=LIMITS).start()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "tcp://0.0.0.0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:port", "tcp://*"]
)
def test_a_bad_address_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(address)):
        Supervisor([[spec("serve")]], address=address, limits=LIMITS).start()
