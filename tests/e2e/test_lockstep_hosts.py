"""Engines in lockstep on several hosts, 127.0.0.2 and 127.0.0.3: as on one host, and no open door."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.test_lockstep_model import EXPERTS, SETTINGS, answers
from tests.support.checkpoints import make_config, save_model
from tests.support.lockstep_hosts import hosts_in_lockstep, lockstep_settings
from tests.support.scripted_model import scripted_output
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ConfigError, EngineDead, StartError
from wavecore.transport.processes import deployment

SCRIPT: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 4096, "num_blocks": 400, "eos_token_id": []}


def listeners(llm: LLM) -> set[str]:
    """Addresses at which the processes of an attached engine listen, those of its host."""
    [engine] = deployment.read(llm.runtime_dir).engines
    found = {
        str(c.laddr.ip)
        for rank in engine.ranks
        if rank.pid
        for c in psutil.Process(rank.pid).net_connections("tcp")
        if c.status == "LISTEN"
    }
    assert found
    return found


def ask(llm: LLM, prompts: Sequence[dict[str, list[int]]], count: int) -> None:
    """Each is answered right."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        right, _ = scripted_output(prompt["prompt_token_ids"], vocab_size=1000, max_tokens=count, temperature=0)
        assert output.outputs[0].token_ids == right


def check_in_step(hosts: list[LLM]) -> None:
    until(lambda: len({s["steps"] + s["dummy_steps"] for llm in hosts for s in llm.step_stats()}) == 1, "equal passes")


def test_two_hosts_are_one_group(tmp_path: Path) -> None:
    """Equal forward passes, right tokens, and a pause that a client of either host asks for."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    prompts = [{"prompt_token_ids": [number + 1, 5, 7]} for number in range(20)]
    with hosts_in_lockstep(tmp_path, [{}, {}], model=f"scripted:{path}") as hosts:
        for count in (1, 10):
            for llm in hosts:
                ask(llm, prompts, count)
        check_in_step(hosts)
        hosts[0].pause()
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(ask, llm, prompts[:1], 5) for llm in hosts]
            until(lambda: [s["waiting"] for llm in hosts for s in llm.step_stats()] == [1, 1], "no steps in a pause")
            hosts[1].resume()
            for answer in asked:
                answer.result(30)
        check_in_step(hosts)
        for rank, llm in enumerate(hosts):
            assert listeners(llm) <= {f"127.0.0.{rank + 2}", "127.0.0.1"}


def test_hosts_of_unlike_settings(tmp_path: Path) -> None:
    """One is refused before anything is loaded; the other waits on for one that fits."""
    own = lockstep_settings(tmp_path, 2, two_free_ports())
    head, other = (
        make_supervisor(EngineConfig(model="scripted:", max_num_seqs=rows, **each))
        for rows, each in zip((4, 8), own, strict=True)
    )
    said = r"rank 1 on 127\.0\.0\.3 and rank 0 on 127\.0\.0\.2 are no group: .*max_num_seqs 8,.*max_num_seqs 4,"
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(head.start)
        with pytest.raises(ConfigError, match=said):
            other.start()
        assert not starting.done()
        head.stop()
        with pytest.raises(StartError, match="stopped before"):
            starting.result(30)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_experts_over_hosts(tmp_path: Path, size: int) -> None:
    """The tokens of one process, with experts spread over two hosts and over the devices of each; gloo meets over the
    link, and no process listens anywhere but on the hosts' interface."""
    model = str(save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS)))
    with LLM(model, **SETTINGS) as llm:
        alone = answers(llm)
    settings = {"model": model, "enable_expert_parallel": True, "tensor_parallel_size": size, **SETTINGS}
    with hosts_in_lockstep(tmp_path, [{}, {}], **settings) as hosts:
        for llm in hosts:
            assert answers(llm) == alone
        check_in_step(hosts)
        for llm in hosts:
            assert all(ip_address(address).is_loopback for address in listeners(llm))


@pytest.mark.slow
def test_a_rank_that_dies_in_a_collective(tmp_path: Path) -> None:
    """gloo only says that a connection broke; clients hear which rank it was."""
    model = str(save_model(tmp_path / "model", make_config("Qwen3Moe", **EXPERTS)))
    long = SamplingParams(max_tokens=5000, temperature=0, ignore_eos=True)
    with hosts_in_lockstep(tmp_path, [{}, {}], model=model, enable_expert_parallel=True, **SETTINGS) as hosts:
        before = answers(hosts[0])
        stream = hosts[0].stream({"prompt_token_ids": [1, 2, 3]}, long)
        next(stream)
        [engine] = deployment.read(hosts[1].runtime_dir).engines
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 on 127\.0\.0\.3 joins anew"):
            list(stream)
        until(lambda: all(llm._service.client.engines for llm in hosts), "a new life")
        assert answers(hosts[0]) == before


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "need data_parallel_address"),
        ({"keys": "k", "data_parallel_address": "tcp://h:1"}, "keys k: they are for tcp; give address"),
        ({"address": "tcp://127.0.0.1", "data_parallel_address": "tcp://h:1"}, "and keys"),
        ({"address": "tcp://127.0.0.1", "keys": "k"}, "need data_parallel_address"),
        *(
            ({"address": "tcp://127.0.0.1", "keys": "k", "data_parallel_address": bad}, "expected tcp://HOST:PORT")
            for bad in ("h", "tcp://h", "tcp://h:0", "h:1", "ipc:///a")
        ),
    ],
)
def test_what_a_host_must_be_told(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(data_parallel_size=2, data_parallel_rank=1, dp_lockstep=True, **given)
