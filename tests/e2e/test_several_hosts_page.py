"""Every command of docs/several-hosts.md, typed as a reader would; hosts are addresses of this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from documents import ROOT
from tests.e2e.test_lockstep_model import EXPERTS
from tests.support.checkpoints import make_config, save_model
from tests.support.environment import environment
from tests.support.tokenizers_for_tests import write_folder
from tests.support.waiting import free_ports, until

from wavecore import LLM, connect
from wavecore.transport.processes.deployment import read

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
PAGE = (ROOT / "docs" / "several-hosts.md").read_text()
READY = "; runtime directory: "
KEY = "secret"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(title: str) -> list[str]:
    """Each as one line, without the name of its host."""
    found = re.findall(r"^    (?:host\d\$ )?((?:wavecore|torchrun) (?:.*\\\n)*.*)", section(title), re.MULTILINE)
    return [" ".join(command.replace("\\\n", " ").split()) for command in found]


class Desk:
    """Where the commands are typed: a folder with a model, a mixture of experts and a file of API keys.

    The page's addresses and ports are others here: those of this machine, which are free.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
        save_model(folder / "my-llama", make_config("Llama", **sizes))
        save_model(folder / "my-moe", make_config("Qwen3Moe", **{**EXPERTS, "vocab_size": 512}))
        for name in ("my-llama", "my-moe"):
            write_folder(folder / name)
        (folder / "keys.txt").write_text(f"{KEY}\n")
        (folder / "bin").mkdir()
        for name, module in {"wavecore": "wavecore", "torchrun": "torch.distributed.run"}.items():
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        first = free_ports(11)  # eight of four engines, that of the link, torchrun's, the server's
        self.names = {"10.0.0.1": "127.0.0.2", "10.0.0.2": "127.0.0.3", "10.0.0.9": "127.0.0.4"}
        self.names |= {":5000": f":{first}", ":7000": f":{first + 8}", " 29500": f" {first + 9}"}
        self.names |= {"--port 8000": f"--port {first + 10}"}
        self.server_port = first + 10
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        settings = {"WAVECORE_MODEL": "./my-llama", "WAVECORE_KV_CACHE_MEMORY_GIB": "0.01"}
        self.environment = environment(PATH=path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **settings)

    def here(self, command: str) -> str:
        for there, own in self.names.items():
            command = command.replace(there, own)
        return command

    def run(self, command: str, **more: Any) -> str:
        """What it prints."""
        done = subprocess.run(
            ["sh", "-c", self.here(command)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **more,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *started: str) -> Iterator[list[Path]]:
        """Commands that go on, started at once: the runtime directory of each. In the end supervisors get SIGTERM, and
        torchrun ends by itself."""
        processes: list[subprocess.Popen[bytes]] = []
        logs: list[Path] = []
        for command in started:
            logs.append(self.folder / f"{len([*self.folder.glob('*.log')])}.log")
            with logs[-1].open("w") as log:
                words = shlex.split(self.here(command), comments=True)
                process = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
                processes.append(process)
        try:
            folders: list[Path] = until(lambda: self._ready(processes, logs), str(started), seconds=100)
            yield folders
            for process, folder in zip(processes, folders, strict=True):
                is_engine = (folder / "deployment.json").exists()
                os.kill(read(folder).supervisor_pid if is_engine else process.pid, signal.SIGTERM)
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                if process.poll() is None:
                    for each in psutil.Process(process.pid).children(recursive=True):
                        each.kill()
                    process.kill()
                    process.wait()

    def _ready(self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> list[Path]:
        said = [log.read_text() for log in logs]
        assert all(process.poll() is None for process in processes), said
        found = [Path(text.partition(READY)[2].splitlines()[0]) for text in said if READY in text]
        return found if len(found) == len(logs) else []


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path)


def all_up(llm: LLM, count: int) -> LLM:
    until(lambda: len(llm._service.client.engines) == count, "all engines")
    return llm


def test_one_program_and_one_host(desk: Desk) -> None:
    [generate] = commands("1. One program")
    assert desk.run(generate)
    engine, chat, status = commands("2. One host, several programs")
    with desk.running(engine) as [folder]:
        assert desk.run(chat.replace("DIR", str(folder)), input="Hello\n")
        assert len(desk.run(f"{status} {folder}").splitlines()) == 4


@pytest.mark.timeout(240)
def test_several_hosts(desk: Desk) -> None:
    keys, *engines, access1, access2, chat, status, torchrun1, torchrun2 = commands("3. Several hosts")
    desk.run(keys)
    with desk.running(*engines) as (one, other):
        desk.run(access1.replace("DIR", str(one)))
        desk.run(access2.replace("DIR", str(other)))
        assert desk.run(chat, input="Hello\n")
        assert desk.run(status).count(" ready ") == 4
        [program] = re.findall(r"```python\n(.*?)```", section("3. Several hosts"), re.DOTALL)
        desk.run(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}")
    with desk.running(torchrun1, torchrun2) as folders:
        assert [[engine.index for engine in read(folder).engines] for folder in folders] == [[0, 1], [2, 3]]


@pytest.mark.timeout(240)
def test_servers_in_front(desk: Desk) -> None:
    """Two of them, each with two API processes; a balancer that takes them in turn loads all engines alike."""
    keys, *engines, access1, access2, _, _, _, _ = commands("3. Several hosts")
    desk.run(keys)
    [serve] = commands("4. Servers in front")
    serve = serve.replace("--api-server-count 4", "--api-server-count 2")
    with desk.running(*engines) as (one, other):
        desk.run(access1.replace("DIR", str(one)))
        desk.run(access2.replace("DIR", str(other)))
        with (
            desk.running(serve, serve.replace("10.0.0.9", "127.0.0.5")),
            connect(["host1.json", "host2.json"], tokenizer="./my-llama") as llm,
        ):
            before = [stats["finished"] for stats in all_up(llm, 4).step_stats()]
            servers = [f"http://127.0.0.{last}:{desk.server_port}" for last in (4, 5)]
            for server in servers:
                until(lambda server=server: httpx.get(f"{server}/ready").status_code == 200, server)
            body = {"prompt": "Hello", "max_tokens": 8}
            with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
                for number in range(80):
                    answer = client.post(f"{servers[number % 2]}/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
            done = [stats["finished"] - then for stats, then in zip(llm.step_stats(), before, strict=True)]
            print(done)
            assert sum(done) == 80 and min(done) >= 10, done


@pytest.mark.timeout(240)
def test_engines_that_share_experts(desk: Desk) -> None:
    desk.run("wavecore keys ./keys")
    with desk.running(*commands("5. Engines that share experts")) as folders, connect(folders) as llm:
        assert [output.finished for output in all_up(llm, 2).generate(["Hello"] * 4, use_tqdm=False)] == [True] * 4


@pytest.mark.timeout(240)
def test_one_engine_over_several_hosts(desk: Desk) -> None:
    desk.run("wavecore keys ./keys")
    one, other, torchrun = commands("6. One engine over several hosts")
    second = torchrun.replace("--node-rank 0", "--node-rank 1").replace(
        "--address tcp://10.0.0.1", "--address tcp://10.0.0.2"
    )
    for started in ([one, other], [torchrun, second]):
        with desk.running(*started) as folders:
            shown = desk.run(f"wavecore status {folders[0]}").splitlines()
            assert [line.split()[1:3] for line in shown[2:]] == [
                [host, str(rank)] for rank, host in enumerate(["127.0.0.2"] * 2 + ["127.0.0.3"] * 2)
            ]
            with connect(folders[1]) as llm:
                assert llm.generate("Hello", use_tqdm=False)[0].finished
