"""Engines on two hosts, addresses of this machine, and clients that use both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.scripted_model import write_model
from tests.support.served import served
from tests.support.several_hosts import dense_hosts, save_access
from tests.support.waiting import two_free_ports, until

from wavecore import LLM, AsyncLLM, ConfigError, EngineConfig, SamplingParams, StartError, connect
from wavecore.frontend.cli import torchrun
from wavecore.frontend.cli.main import main
from wavecore.transport.curve import KeyPair, create_keys
from wavecore.transport.processes.deployment import read
from wavecore.transport.processes.supervisor import Supervisor

ENGINES = [2, 1]  # of each host
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_model(tmp_path_factory.mktemp("model"), step_seconds=0.002, eos_token_id=[])


@pytest.fixture(scope="module")
def hosts(model: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Supervisor]]:
    """Their model's tokenizer lies nowhere here."""
    settings = {"model": model["model"], "tokenizer": "/nowhere", "max_num_seqs": 256}
    with dense_hosts(tmp_path_factory.mktemp("hosts"), ENGINES, None, **settings) as supervisors:
        yield supervisors


@pytest.fixture
def files(hosts: list[Supervisor], tmp_path: Path) -> list[Path]:
    """An access file of each host."""
    folders = [supervisor.runtime_dir for supervisor in hosts]
    return [save_access(folder, tmp_path / f"{i}.json") for i, folder in enumerate(folders) if folder]


def finished(llm: LLM) -> list[int]:
    return [stats["finished"] for stats in llm.step_stats()]


def all_up(llm: LLM) -> LLM:
    until(lambda: len(llm._service.client.engines) == sum(ENGINES), "all engines")
    return llm


def test_a_client_spreads_its_requests_over_all_engines(files: list[Path], model: dict[str, str]) -> None:
    with connect(files, tokenizer=model["tokenizer"]) as llm:
        before = finished(all_up(llm))
        prompts = [[10 + i, 11] for i in range(256)]
        together = llm.generate(prompts, SHORT, use_tqdm=False)
        done = [now - then for now, then in zip(finished(llm), before, strict=True)]
        assert 256 <= sum(done) < 262  # one that moved has ended twice
        assert all(abs(count - 256 / 3) <= 0.1 * 256 / 3 for count in done)
        for rank in range(3):
            [alone] = llm.generate([prompts[rank]], SHORT, use_tqdm=False, data_parallel_rank=rank)
            assert alone.outputs[0].token_ids == together[rank].outputs[0].token_ids
        last = [now - then for now, then in zip(finished(llm), before, strict=True)]
        assert [now - then for now, then in zip(last, done, strict=True)] == [1, 1, 1]


async def test_directories_and_access_files_together(
    hosts: list[Supervisor], files: list[Path], model: dict[str, str]
) -> None:
    folder = hosts[0].runtime_dir
    assert folder is not None
    async with AsyncLLM.connect([folder, files[1]], tokenizer=model["tokenizer"]) as llm:
        until(lambda: len(llm._service.client.engines) == 3, "all engines")
        for rank in range(3):
            outputs = [o async for o in llm.generate([5, 6], SHORT, data_parallel_rank=rank)]
            assert outputs[-1].finished
    with pytest.raises(ConfigError, match=rf"engine 0 is at two of {folder}, {files[0]}"):
        connect([folder, files[0]])


def test_each_host_listens_at_its_own_address_alone(hosts: list[Supervisor]) -> None:
    for number, supervisor in enumerate(hosts):
        pids = [rank.pid for engine in supervisor.deployment().engines for rank in engine.ranks]
        found = [each for pid in pids for each in psutil.Process(pid).net_connections("inet")]
        listening = {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
        assert listening == {f"127.0.0.{number + 2}"}
        assert len([each for each in found if each.status == psutil.CONN_LISTEN]) == 2 * ENGINES[number]
    own = psutil.Process().net_connections("inet")
    assert not [each for each in own if each.status == psutil.CONN_LISTEN]  # nor do supervisors and clients


def test_status_of_all_hosts(
    hosts: list[Supervisor], files: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(supervisor.runtime_dir) for supervisor in hosts]
    for places in (folders, [str(file) for file in files]):
        assert main(["status", "--json", *places]) == 0
        found = json.loads(capsys.readouterr().out)["deployments"]
        engines = [engine for each in found for engine in each["engines"]]
        assert [engine["index"] for engine in engines] == [0, 1, 2]
        assert [engine["host"] for engine in engines] == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
        assert [engine["epoch"] for engine in engines] == [e.epoch for s in hosts for e in s.deployment().engines]
        assert all(engine["load"]["running"] == engine["load"]["dummy_steps"] == 0 for engine in engines)
        if places is folders:  # of ranks, restarts and causes the host alone knows
            assert all(rank["pid"] and rank["device"] == "cpu" for engine in engines for rank in engine["ranks"])
            told = [(len(engine["ranks"]), engine["restarts"], engine["last_cause"]) for engine in engines]
            assert told == [(1, 0, None)] * 3
    assert main(["status", str(files[0])]) == 0
    head, names, first, _ = capsys.readouterr().out.splitlines()
    assert head == f"{files[0]}: ready"
    assert names.split()[:4] == ["engine", "host", "rank", "device"]
    assert first.split()[:4] == ["0", "127.0.0.2", "0", "ready"]
    monkeypatch.setattr("wavecore.frontend.cli.status.ANSWER_SECONDS", 0.5)
    other = KeyPair.generate()
    save = {"public": other.public.decode(), "secret": other.secret.decode()}
    files[0].write_text(json.dumps(json.loads(files[0].read_text()) | save))
    assert main(["status", str(files[0])]) == 5
    head, _, first, _ = capsys.readouterr().out.splitlines()
    assert head == f"{files[0]}: degraded" and first.split()[:5] == ["0", "127.0.0.2", "0", "silent", "-"]


def test_a_server_of_both_hosts(files: list[Path], model: dict[str, str]) -> None:
    """It has a folder of its own for the operator's socket, and a tokenizer of its own."""
    attach = [word for file in files for word in ("--attach", str(file))]
    with served(*attach, "--tokenizer", model["tokenizer"]) as server:
        assert server.post("/tokenize", {"prompt": "Hello"}).status_code == 200
        assert (server.runtime_dir / "admin.sock").exists()
        body = {"prompt": [5, 6], "max_tokens": 3}
        for rank in range(3):
            headers = {"X-data-parallel-rank": str(rank)}
            assert server.post("/v1/completions", body, headers=headers).status_code == 200
    assert not server.runtime_dir.exists()


# --- keys and access files -----------------------------------------------------------------------------------------


def test_keys_for_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert f"keys in {folder}" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"keys": 0o700, "server.key": 0o600, "client.key": 0o600, "authorized_clients": 0o700}
    before = {name: (folder / name).read_bytes() for name in ("server.key", "client.key")}
    assert main(["keys", str(folder)]) == 0  # what is there stays
    assert {name: (folder / name).read_bytes() for name in before} == before
    folder.chmod(0o750)
    assert main(["keys", str(folder)]) == 2
    assert f"chmod 700 {folder}" in capsys.readouterr().err
    assert main(["keys", "/proc/none"]) == 3


def test_a_client_with_a_key_of_its_own(hosts: list[Supervisor], tmp_path: Path, model: dict[str, str]) -> None:
    """It may enter while its public key lies in the folder that the hosts were given."""
    folder, pair = hosts[1].runtime_dir, KeyPair.generate()
    assert folder is not None and hosts[1]._keys is not None
    own = {"public": pair.public.decode(), "secret": pair.secret.decode()}
    file = save_access(folder, tmp_path / "own.json", lambda told: told.update(own))
    listed = hosts[1]._keys / "authorized_clients" / "friend.pub"
    listed.write_bytes(pair.public)
    with connect(file, tokenizer=model["tokenizer"]) as llm:
        assert llm.generate([5, 6], SHORT, use_tqdm=False)[0].finished
    listed.unlink()
    with pytest.raises(StartError, match="another key"):
        connect(file, 0.5)


def test_a_runtime_directory_with_keys_of_another_deployment(model: dict[str, str], tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "run" / "keys")
    (tmp_path / "run").chmod(0o700)
    settings = {**model, "address": "tcp://127.0.0.2", "keys": str(tmp_path / "keys")}
    with pytest.raises(ConfigError, match=r"client.key is of other keys than .*: move it"):
        LLM(**settings, runtime_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"key file .*/none/server.key: No such file"):
        LLM(**{**settings, "keys": str(tmp_path / "none")})


def test_access_files_that_cannot_be(hosts: list[Supervisor], files: list[Path], tmp_path: Path) -> None:
    file, good = files[0], json.loads(files[0].read_text())
    damaged: list[Any] = ["", "[]", "{}", {**good, "engines": []}, {**good, "secret": "x" * 40}, {**good, "public": 5}]
    for content in damaged:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ConfigError, match=rf"{file} is (no access file|damaged).*`wavecore access`"):
            connect(file)
    file.write_text(json.dumps(good))
    file.chmod(0o604)
    with pytest.raises(ConfigError, match=f"closed to others: chmod 600 {file}"):
        connect(file)
    with pytest.raises(StartError, match="no deployment at"):
        connect(tmp_path / "none.json")


def test_access_to_what_other_hosts_cannot_reach(model: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(**model) as llm:
        assert main(["access", str(llm.runtime_dir)]) == 2
        assert "start them with --address" in capsys.readouterr().err
    assert main(["access", "/none"]) == 5


LINK = ["--keys", "keys", "--data-parallel-address", "tcp://127.0.0.1:7000"]

# --- torchrun ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "rank", "here", "flags", "engines", "ranks"),
    [
        (2, 0, 2, [], range(2), range(1)),
        (4, 2, 2, [], range(2, 4), range(1)),
        (8, 4, 4, ["-tp", "2"], range(2, 4), range(2)),
        (6, 4, 2, ["-tp", "2", "-dp", "3"], range(2, 3), range(2)),  # hosts need not be alike
        (4, 2, 2, ["-tp", "4", *LINK], range(1), range(2, 4)),  # a part of an engine
        (8, 6, 2, ["-tp", "4", *LINK], range(1, 2), range(2, 4)),
    ],
)
def test_torchrun_over_several_hosts(
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    rank: int,
    here: int,
    flags: Sequence[str],
    engines: range,
    ranks: range,
) -> None:
    found: list[EngineConfig] = []
    monkeypatch.setattr("wavecore.frontend.cli.engine.serve", lambda config: found.append(config) or 0)
    for name, value in {"WORLD_SIZE": world, "RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    assert torchrun.run(["engine", "x", "--address", "tcp://127.0.0.1", *flags], here) == 0
    [config] = found
    assert (config.engines_here, config.ranks_here) == (engines, ranks)
    with pytest.raises(ConfigError, match=rf"torchrun started {world} processes, {here} here, and .* 7 "):
        torchrun.run(["engine", "x", "-dp", "7"], here)
    if world > here:
        with pytest.raises(ConfigError, match=rf"{here} of {world} processes here: give address tcp://THIS_HOST"):
            torchrun.run(["engine", "x", *flags], here)


@pytest.mark.slow
def test_two_torchruns(model: dict[str, str], tmp_path: Path) -> None:
    """Two "nodes" on this machine, which meet as torchrun's nodes do."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    where += ["--master-port", str(two_free_ports())]
    create_keys(tmp_path / "keys")
    command = [sys.executable, "-m", "torch.distributed.run", *where]
    engine = ["-m", "wavecore", "engine", model["model"], "--skip-tokenizer-init", "--keys", str(tmp_path / "keys")]
    processes = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), *engine, "--address", f"tcp://127.0.0.{rank + 2}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        folders = [Path(process.stdout.readline().split()[-1]) for process in processes if process.stdout]
        assert [[engine.index for engine in read(folder).engines] for folder in folders] == [[0], [1]]
        with connect(folders) as llm:
            until(lambda: len(llm._service.client.engines) == 2, "both")
            assert llm.generate([[5], [6]], SHORT, use_tqdm=False)[1].outputs[0].token_ids
        for folder in folders:
            os.kill(read(folder).supervisor_pid, 15)
        for process in processes:
            process.communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
