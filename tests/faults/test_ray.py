"""Engines in Ray actors (`data_parallel_backend="ray"`), which can be lost in more ways than processes. Needs Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.conftest import right_answer
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.testing import deployment
from wavecore.transport.curve import create_keys
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes.deployment import EngineEntry, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]
LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "data_parallel_size": 2,
    "data_parallel_backend": "ray",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
}
AGENTS_SECONDS = 180.0  # that processes of Ray's own may outlive a killed driver

# A program with two engines that loses one as `ray.kill` ends it.
RAY_KILL = """
import gc, ray, time
from wavecore import LLM, SamplingParams
from wavecore.engine_core.ray_groups import RayGroup
from wavecore.transport.errors import EngineDead
with LLM({model!r}, **{settings}) as llm:
    stream = llm.stream([7], SamplingParams(temperature=0, max_tokens=600, ignore_eos=True), data_parallel_rank=1)
    next(stream)
    ray.kill(next(it for it in gc.get_objects() if isinstance(it, RayGroup) and it.entries[0].index == 1)._actor)
    try:
        list(stream)
    except EngineDead as error:
        print("lost:", error)
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    print("again:", llm.generate([[9]], short, data_parallel_rank=1)[0].outputs[0].token_ids)
"""


def actor_of(entry: EngineEntry) -> psutil.Process:
    found = psutil.Process(entry.pid).parent()
    assert found is not None and found.name().startswith("ray::")
    return found


@contextmanager
def two_streams(model: str, **settings: Any) -> Iterator[tuple[Path, LLM, psutil.Process, Sequence[Any]]]:
    """Two engines of `wavecore engine` in actors, and a stream at each that has begun; also the driver's process."""
    with (
        deployment("wavecore", model, **SETTINGS, **settings) as (runtime_dir, process),
        LLM.connect(runtime_dir) as llm,
    ):
        assert process is not None
        streams = [llm.stream({"prompt_token_ids": [7, i]}, LONG, data_parallel_rank=i) for i in range(2)]
        for stream in streams:
            next(stream)
        yield runtime_dir, llm, psutil.Process(process.pid), streams


def check_restarted(runtime_dir: Path, llm: LLM) -> EngineEntry:
    """Engine 0 serves again."""
    until(lambda: read(runtime_dir).engines[0].restarts == 1 and read(runtime_dir).state == "ready")
    until(lambda: len(llm._service.client.engines) == 2)
    outputs = llm.generate([[i, 9] for i in range(1, 5)], SHORT, use_tqdm=False, data_parallel_rank=0)
    assert [o.outputs[0].token_ids for o in outputs] == [right_answer([i, 9], 5) for i in range(1, 5)]
    return read(runtime_dir).engines[0]


def test_killed_child_of_an_actor(model: str) -> None:
    """The engine's process in a Ray actor is killed.

    As without Ray: its streams end with `EngineDead` and the signal, the other engines' go on, and the actor starts it
    again.
    """
    with two_streams(model) as (runtime_dir, llm, _, (lost, other)):
        before = read(runtime_dir).engines[0]
        actor = actor_of(before)
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"engine 0 \(pid \d+\) was ended by signal 9"):
            list(lost)
        assert actor_of(check_restarted(runtime_dir, llm)) == actor
        assert list(other)[-1].finished


def test_killed_actor(model: str) -> None:
    """A Ray actor is killed (kill -9).

    The engine in it ends at once, its streams with `EngineDead`, which names the address; the other engines' go on. A
    new actor is placed, on any node that has room.
    """
    with two_streams(model) as (runtime_dir, llm, _, (lost, other)):
        before = read(runtime_dir).engines[0]
        actor, engine = actor_of(before), psutil.Process(before.pid)
        actor.kill()
        assert not psutil.wait_procs([engine], 2.0)[1]
        with pytest.raises(EngineDead, match=r"its Ray actor at tcp://\S+ was lost: its worker process has died"):
            list(lost)
        assert actor_of(check_restarted(runtime_dir, llm)) != actor
        assert list(other)[-1].finished


def test_killed_actor_of_engines_in_lockstep(model: str, tmp_path: Path) -> None:
    """One of several Ray actors whose engines run in lockstep is killed (kill -9).

    The streams of all end with `EngineDead`, which names the actor's engine and its address. A new actor is placed, and
    the engines meet in a new life.
    """
    from ray.util import get_node_ip_address

    create_keys(tmp_path / "keys")
    meeting = {"data_parallel_address": f"tcp://{get_node_ip_address()}:{two_free_ports()}"}
    meeting |= {"keys": str(tmp_path / "keys"), "dp_lockstep": True}
    with two_streams(model, **meeting) as (runtime_dir, llm, _, (lost, other)):
        actor_of(read(runtime_dir).engines[0]).kill()
        for stream in (lost, other):
            with pytest.raises(EngineDead, match=r"engine 0: its Ray actor at tcp://\S+ was lost"):
                list(stream)
        check_restarted(runtime_dir, llm)
        assert read(runtime_dir).engines[1].restarts == 1


def test_stopped_actor(model: str) -> None:
    """A Ray actor is stopped (SIGSTOP), or its node out of reach.

    Its engine serves on meanwhile. After eight seconds without a word of it the actor is ended, and a new one placed.
    """
    with two_streams(model) as (runtime_dir, llm, _, _):
        actor_of(read(runtime_dir).engines[0]).suspend()
        cause = check_restarted(runtime_dir, llm).last_cause
        assert cause is not None and "it has not answered for 8 s" in cause.message


def test_ray_kill(model: str) -> None:
    """An actor is ended by `ray.kill`.

    The same.
    """
    code = RAY_KILL.format(model=model, settings={**SETTINGS, "disable_tqdm": True})
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "lost: engine 1: its Ray actor at tcp://" in said and "killed by `ray.kill`" in said
    assert f"again: {right_answer([9], 5)}" in said


def test_killed_raylet(model: str) -> None:
    """The Ray node (raylet) of the program that started the engines is killed.

    Its engines end at once, and their requests within ten seconds. Nothing can be placed from there any more: the
    program ends with exit code 5 and says so.
    """
    with two_streams(model) as (runtime_dir, _, driver, streams):
        engines = [psutil.Process(entry.pid) for entry in read(runtime_dir).engines]
        [raylet] = [child for child in driver.children(recursive=True) if child.name() == "raylet"]
        raylet.kill()
        assert not psutil.wait_procs(engines, 2.0)[1]
        for stream in streams:
            with pytest.raises(EngineDead, match="its Ray actor at"):
                list(stream)
        assert driver.wait(60) == EngineDead.exit_code


def test_killed_driver(model: str) -> None:
    """The program that started engines in Ray actors is killed.

    No engine is left two seconds later; streams end with `EngineDead`. (Ray's own agents stay for a minute.)
    """
    words = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "wavecore", "engine", model, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        runtime_dir = Path(next(line for line in process.stdout if "ready" in line).split()[-1])
        with LLM.connect(runtime_dir) as llm:
            stream = llm.stream([7], LONG)
            next(stream)
            family = psutil.Process(process.pid).children(recursive=True)
            engines = [psutil.Process(entry.pid) for entry in read(runtime_dir).engines]
            actors = [actor_of(entry) for entry in read(runtime_dir).engines]
            process.kill()
            assert not psutil.wait_procs([*engines, *actors], 2.0)[1]
            with pytest.raises(EngineDead, match="gone and its engines with it"):
                list(stream)
    assert not psutil.wait_procs(family, AGENTS_SECONDS)[1]


# Three nodes beside the head, on this host; until the program's input ends.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
for _ in range(3):
    cluster.add_node(num_cpus=1, **small)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a cluster; it asks for a token unless the test is given "no token"."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_AUTH_MODE", getattr(request, "param", "token"))
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield next(line for line in process.stdout if line.startswith("address")).split()[1]
        process.stdin.close()


def test_lost_node(model: str, cluster: str) -> None:
    """A node of a Ray cluster is lost.

    The engine there ends, and its requests within ten seconds; it is started again on another node.
    """
    with two_streams(model, ray_address=cluster) as (runtime_dir, llm, _, (lost, other)):
        node = actor_of(read(runtime_dir).engines[0]).parent()
        assert node is not None and node.name() == "raylet"
        node.kill()
        with pytest.raises(EngineDead, match="its Ray actor at"):
            list(lost)
        assert actor_of(check_restarted(runtime_dir, llm)).parent() != node
        assert list(other)[-1].finished


@pytest.mark.parametrize("cluster", ["disabled"], indirect=True)
def test_cluster_without_a_token(model: str, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray cluster lets everybody in, without a token.

    Engines refuse to start there, unless `ray_without_token` says that this is known.
    """
    command = [sys.executable, "-m", "wavecore", "engine", model, "--data-parallel-backend", "ray"]
    command += ["--ray-address", cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2 and "asks for no token" in done.stderr
    with two_streams(model, ray_address=cluster, ray_without_token=True):
        pass
