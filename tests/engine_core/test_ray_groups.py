"""Engines in Ray actors, with a stand-in for Ray; tests/faults/test_ray.py has Ray itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_ray import FakeRay
from tests.support.scripted_model import scripted_output
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.ray_actor import DPEngineCoreActor
from wavecore.engine_core.ray_groups import check_fits, make_ray_supervisor, needs
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.frontend.pipeline import ModelPipeline
from wavecore.transport.curve import KeyPair, create_keys
from wavecore.transport.errors import ConfigError, EngineDead, NotSupportedError, StartError
from wavecore.transport.processes.supervisor import Limits, Supervisor
from wavecore.transport.version import VERSION

LIMITS = Limits(ready=60, drain=5, grace=5)
SCRIPT = {"vocab_size": 1000, "max_model_len": 4096, "num_blocks": 400, "eos_token_id": [], "step_seconds": 0.005}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay.install(monkeypatch, [{"CPU": 2.0}])


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return ray_config(model=f"scripted:{path}", skip_tokenizer_init=True, data_parallel_size=2, max_num_seqs=8)


def ray_config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"data_parallel_backend": "ray", **settings})


@pytest.fixture
def deployed(ray: FakeRay, config: EngineConfig, quick_restarts: None) -> Iterator[tuple[Supervisor, LLM]]:
    with make_supervisor(config, LIMITS) as supervisor:
        llm = LLM.connect(supervisor.start())
        yield supervisor, llm
        llm.shutdown()
        folders = [Path(str(actor.instance._supervisor.runtime_dir)) for actor in ray.actors if not actor.silent]
    assert ray.shutdowns == len(ray.inits) == 1
    assert not ray.groups
    assert len(folders) == len({*folders}) and not any(folder.exists() for folder in folders)


def failure(actor: DPEngineCoreActor) -> tuple[str, str]:
    failed = actor.ready()["failed"]
    return failed["code"], failed["message"]


def test_two_actors(ray: FakeRay, deployed: tuple[Supervisor, LLM]) -> None:
    """Tokens are right, and the deployment's file says of engines on nodes what it says of processes."""
    supervisor, llm = deployed
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[number, 7] for number in range(1, 9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    right = [scripted_output(p, vocab_size=1000, max_tokens=20, temperature=0)[0] for p in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == right
    found = supervisor.deployment()
    assert found.state == "ready" and found.resolved["vocab_size"] == 1000
    assert [entry.index for entry in found.engines] == [0, 1]
    assert all(
        entry.input.startswith("tcp://127.0.0.1:") and entry.ranks[0].state == "ready" for entry in found.engines
    )
    assert len({entry.server_key for entry in found.engines}) == 2, "each node has a key of its own"
    assert [group.bundles for group in ray.groups] == [[{"CPU": 1.0}]] * 2
    assert {group.strategy for group in ray.groups} == {"STRICT_PACK"}
    assert all(given["max_restarts"] == 0 and given["num_cpus"] == 1.0 for given in ray.options)
    assert ray.inits == [("local",)]


def test_engines_in_lockstep(ray: FakeRay, config: EngineConfig, tmp_path: Path, quick_restarts: None) -> None:
    """They meet at the node of engine 0, take equal numbers of passes, and after a death meet again."""
    create_keys(tmp_path / "keys")
    ray.nodes_ = [{"CPU": 2.0, "node:127.0.0.1": 1.0}]
    where = {"data_parallel_address": f"tcp://127.0.0.1:{two_free_ports()}", "keys": str(tmp_path / "keys")}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    right, _ = scripted_output([3, 4], vocab_size=1000, max_tokens=20, temperature=0)
    with make_supervisor(replace(config, dp_lockstep=True, **where), LIMITS) as supervisor:
        with LLM.connect(supervisor.start()) as llm:
            assert ray.groups[0].bundles == [{"CPU": 1.0, "node:127.0.0.1": 0.001}]
            assert ray.groups[1].bundles == [{"CPU": 1.0}]
            assert llm.generate([[3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids == right
            until(lambda: len({s["steps"] + s["dummy_steps"] for s in llm.step_stats()}) == 1, "equal passes")
            os.kill(supervisor.deployment().engines[1].pid, signal.SIGKILL)
            until(lambda: [entry.restarts for entry in supervisor.deployment().engines] == [1, 1])
            until(lambda: supervisor.deployment().state == "ready")
            until(lambda: len(llm._service.client.engines) == 2)
            assert llm.generate([[3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids == right
        assert len({entry.server_key for entry in supervisor.deployment().engines}) == 1, "that of the folder"


def test_lost_actor_is_placed_again(ray: FakeRay, deployed: tuple[Supervisor, LLM]) -> None:
    """Its stream fails and says why, the other one goes on; a child's end is its actor's affair."""
    supervisor, llm = deployed
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    lost, other = (llm.stream([number + 1, 5], params, data_parallel_rank=number) for number in range(2))
    next(lost), next(other)
    ray.actors[1].unavailable = 1  # for a moment
    ray.kill(ray.actors[0])
    with pytest.raises(EngineDead, match=r"engine 0: its Ray actor at tcp://\S+ was lost: its worker process has died"):
        list(lost)
    until(lambda: supervisor.deployment().state == "ready" and supervisor.deployment().engines[0].restarts)
    before = supervisor.deployment().engines[0]
    assert len(ray.actors) == 3 and before.restarts == 1 and before.last_cause is not None
    assert list(other)[-1].finished
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: supervisor.deployment().engines[0].restarts == 2 and supervisor.deployment().state == "ready")
    after = supervisor.deployment().engines[0]
    assert len(ray.actors) == 3 and after.last_cause is not None and after.last_cause.signal == signal.SIGKILL
    until(lambda: len(llm._service.client.engines) == 2)
    assert llm.generate([[3, 4]], SamplingParams(max_tokens=3), use_tqdm=False)[0].finished


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecore.engine_core.ray_groups.SILENT_SECONDS", 1.0)


def test_silent_actor(impatient: None, ray: FakeRay, deployed: tuple[Supervisor, LLM]) -> None:
    """An actor that answers nothing, though Ray calls it alive, is given up; and so is all, when Ray itself is gone."""
    supervisor, _ = deployed
    ray.own_node = False
    for actor in ray.actors:
        actor.silent.add("entries")
    ray.silent.update(("entries", "ready"))
    with pytest.raises(EngineDead, match=r"every engine stays down; .* the Ray node of the program .* has died"):
        supervisor.wait()


@pytest.mark.parametrize(
    ("settings", "nodes", "asked"),
    [
        ({}, [{"CPU": 4.0}], {"CPU": 1.0}),
        ({}, [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}], {"GPU": 1.0}),
        ({"tensor_parallel_size": 2}, [{"CPU": 4.0, "GPU": 2.0}], {"GPU": 2.0}),
        ({"device": "cpu", "tensor_parallel_size": 2}, [{"CPU": 4.0, "GPU": 2.0}], {"CPU": 2.0}),
        ({"device": "cuda"}, [{"CPU": 4.0}], {"GPU": 1.0}),
        ({"model": "scripted:x"}, [{"CPU": 4.0, "GPU": 2.0}], {"CPU": 1.0}),
    ],
)
def test_needs(settings: dict[str, Any], nodes: list[dict[str, float]], asked: dict[str, float]) -> None:
    assert needs(ray_config(**settings), nodes) == asked


def test_check_fits() -> None:
    """An engine needs one node that has all that it asks for."""
    config = ray_config(data_parallel_size=2, tensor_parallel_size=4)
    check_fits(config, {"GPU": 4.0}, [{"GPU": 4.0}, {"GPU": 7.0}])
    check_fits(config, {"GPU": 4.0}, [{"GPU": 8.0, "CPU": 1.0}])
    with pytest.raises(ConfigError, match=r"room for 1 of 2 engines .* 4 GPU each, .*: 4 GPU; 3 GPU; 0 GPU; lower"):
        check_fits(config, {"GPU": 4.0}, [{"GPU": 4.0}, {"GPU": 3.0}, {"CPU": 8.0}])
    meeting = {"dp_lockstep": True, "data_parallel_size": 2, "keys": "keys"}
    config = ray_config(**meeting, data_parallel_address="tcp://10.0.0.3:7000")
    check_fits(config, {"GPU": 1.0}, [{"GPU": 8.0, "node:10.0.0.1": 1.0}, {"GPU": 8.0, "node:10.0.0.3": 1.0}])
    with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.3:7000: Ray's nodes are 10\.0\.0\.1, 10\.0\.0\.2$"):
        nodes = [{"node:10.0.0.2": 1.0}, {"node:10.0.0.1": 1.0, "node:__internal_head__": 1.0}]
        check_fits(config, {"GPU": 1.0}, nodes)


def test_placement_that_never_fits(ray: FakeRay, config: EngineConfig) -> None:
    """It is refused at once, and the private Ray is ended."""
    ray.nodes_ = [{"CPU": 1.0}]
    with pytest.raises(ConfigError, match="room for 1 of 2 engines"):
        make_supervisor(config).start()
    assert not ray.actors and ray.shutdowns == 1


def test_placement_that_waits_too_long(ray: FakeRay, config: EngineConfig) -> None:
    ray.silent.update(("entries", "ready"))
    with pytest.raises(StartError, match=r"not ready after 0\.1 s \(phase: place\); raise ready_timeout, or see `ray"):
        make_supervisor(config, Limits(ready=0.1)).start()
    assert not ray.groups and ray.shutdowns == 1


def test_start_that_fails(ray: FakeRay, config: EngineConfig) -> None:
    """The engine's own error is raised, as by a process of this host."""
    Path(config.model.removeprefix("scripted:")).write_text("no script")
    with pytest.raises(Exception, match=r"script\.json") as caught:
        make_supervisor(config, LIMITS).start()
    assert type(caught.value).__module__ == "wavecore.transport.errors"
    assert all(actor.is_dead for actor in ray.actors)


def test_one_connection_a_program(ray: FakeRay, config: EngineConfig) -> None:
    """A Ray that the program started itself is used and left alone; one of another deployment is not shared."""
    ray.init("by the program")
    ray.nodes_ = []
    with pytest.raises(ConfigError, match="room for 0 of 2"):
        make_supervisor(config).start()
    assert ray.is_initialized() and len(ray.inits) == 1
    sys.modules["wavecore.engine_core.ray_groups"].RayCluster.taken = True
    with pytest.raises(ConfigError, match=r"another deployment of this program .* call ray\.init\(\) before both"):
        make_supervisor(config).start()


def test_address_without_ray(ray: FakeRay, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray fails there, or tries on and on."""
    given = ray_config(model=config.model, ray_address="head:6379")
    monkeypatch.setattr("wavecore.engine_core.ray_groups.JOIN_SECONDS", 0.1)
    never = threading.Event()
    monkeypatch.setattr(ray, "init", lambda *_, **__: never.wait())
    with pytest.raises(StartError, match=r"no Ray at head:6379, waited 0\.1 s at most: TimeoutError"):
        make_supervisor(given).start()
    never.set()
    monkeypatch.setattr(ray, "init", lambda *_, **__: 1 / 0)
    with pytest.raises(StartError, match=r"no Ray at head:6379.*division by zero"):
        make_supervisor(given).start()


def test_ray_is_not_installed(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'wavecore\[ray\]'"):
        make_ray_supervisor(config, LIMITS)


def test_node_that_does_not_fit(ray: FakeRay, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, or in a cluster that lets everybody in."""
    given: tuple[Any, ...] = (0, config.to_json(), KeyPair.generate().public.decode(), {})
    code, message = failure(DPEngineCoreActor("9.9", *given))
    assert code == "config" and "node 127.0.0.1 has wavecore" in message and "9.9" in message
    monkeypatch.delenv("RAY_AUTH_MODE")
    code, message = failure(DPEngineCoreActor(VERSION, *given))
    assert code == "config" and "asks for no token" in message and "ray_without_token" in message


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (ConfigError, {"dp_lockstep": True, "data_parallel_size": 2}),
        (ConfigError, {"data_parallel_address": "h:1", "dp_lockstep": True, "data_parallel_size": 2, "keys": "k"}),
        (NotSupportedError, {"address": "tcp://127.0.0.1"}),
        (NotSupportedError, {"nnodes": 2, "tensor_parallel_size": 2}),
        (ConfigError, {"device": "cuda:1"}),
        (ConfigError, {"ray_address": "ray://head:10001"}),
        (ConfigError, {"ray_address": "auto", "data_parallel_backend": "mp"}),
        (ConfigError, {"data_parallel_backend": "dask"}),
    ],
)
def test_refused_settings(error: type[Exception], settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        ray_config(**settings)


def test_pipelines_are_refused(config: EngineConfig) -> None:
    with pytest.raises(NotSupportedError, match="data_parallel_backend"):
        ModelPipeline(data_parallel_backend="ray").add_stage("one", config.model)
